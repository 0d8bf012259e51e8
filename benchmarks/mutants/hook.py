"""Which functions of hotbed ran, in this process and in those it starts: a name each, `hotbed/cache/cache.py:Cache.plan`.

The first process asks with `take`. Others, which import this before all else (as `sitecustomize`), append every name to a
file once. Compiled kernels run unseen. Python 3.12 asks once for every function, Python 3.11 at every call.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import Any

_FILE = os.environ.get("MUTANTS_SEEN", "")
_ROOT = os.path.join(os.environ.get("MUTANTS_ROOT", ""), "")
_known: set[int] = set()
_found: set[str] = set()
_first = os.getpid() if os.environ.get("MUTANTS_FIRST") is None else 0
_read = [0]  # of the file of the others
_TOOL = 4


def take() -> set[str]:
    """What ran since the last time."""
    found = set(_found)
    others = Path(f"{_FILE}.others")
    if others.exists():
        text = others.read_text()
        found |= set(text[_read[0] :].split())
        _read[0] = len(text)
    _found.clear()
    _known.clear()
    if hasattr(sys, "monitoring"):
        sys.monitoring.restart_events()
    return found


def stop() -> None:
    """No more."""
    if hasattr(sys, "monitoring"):
        sys.monitoring.free_tool_id(_TOOL)
    else:
        sys.setprofile(None)


def _note(code: CodeType) -> None:
    if id(code) in _known:
        return
    _known.add(id(code))
    if not code.co_filename.startswith(_ROOT + "hotbed") or not code.co_flags & inspect.CO_OPTIMIZED:
        return  # of others, or the body of a module or class, which whoever comes first runs
    name = f"{code.co_filename.removeprefix(_ROOT)}:{code.co_qualname}"
    if os.getpid() == _first:
        _found.add(name)
    else:
        with open(f"{_FILE}.others", "a") as file:
            file.write(name + "\n")


def _start() -> None:
    os.environ["MUTANTS_FIRST"] = "no"  # of processes from here on
    if hasattr(sys, "monitoring"):
        monitoring: Any = sys.monitoring
        monitoring.use_tool_id(_TOOL, "mutants")

        def noted(code: CodeType, offset: int) -> Any:
            _note(code)
            return monitoring.DISABLE

        monitoring.register_callback(_TOOL, monitoring.events.PY_START, noted)
        monitoring.set_events(_TOOL, monitoring.events.PY_START)
    else:

        def called(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                _note(frame.f_code)

        threading.setprofile(called)
        sys.setprofile(called)


if _FILE:
    _start()
