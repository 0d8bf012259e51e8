"""How to install what an optional feature needs: a command that works for a clone, a wheel and an installed package alike."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires


def how_to_install(extra: str) -> str:
    """`pip install ...` with the packages of an extra, by name, since hotbed itself may not be on the index."""
    try:
        listed = requires("hotbed") or []
    except PackageNotFoundError:  # on the path, not installed
        return f"in a clone of hotbed: pip install '.[{extra}]'"
    needed = []
    for line in listed:
        package, _, condition = line.partition(";")
        if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", condition) and not package.startswith("hotbed"):
            needed.append(shlex.quote(package.strip().replace(" ", "")))
    return "pip install " + " ".join(needed)
