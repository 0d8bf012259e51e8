"""Optional packages: the command that installs them, and the connection to Ray. Everything else imports Ray from here."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
import threading
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from hotbed.errors import ConfigError, reason_of


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


def connect_ray() -> Any:
    """The module `ray`, connected: to RAY_ADDRESS, else to a cluster that `ray start` started here, else to a new one."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray announces a change of this in a warning
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "--ray needs the package ray in this environment and in that of every machine: "
            f"{sys.executable} -m pip install 'ray>=2.40' (in a clone: pip install -e '.[ray]')."
        ) from None
    if not ray.is_initialized():
        terminate = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            address = os.environ.get("RAY_ADDRESS", "a new cluster on this machine")
            raise ConfigError(
                f"Ray at {address} cannot be reached: {reason_of(error)}. `ray status` shows whether it runs."
            ) from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)  # Ray's handler would end the process with code 15
    return ray
