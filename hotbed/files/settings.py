"""How remote files are read and kept, from the environment, so that ranks and workers of a run share it.

HOTBED_CACHE            the folder of local copies; ~/.cache/hotbed
HOTBED_READ_CACHE       bytes that copies of remote files may take on the local disk (--read-cache); 10GiB
HOTBED_STORE_PATIENCE   seconds until a store that does not answer is given up; 300
HOTBED_STORE_TIMEOUT    seconds that one request may take; 60
"""

from __future__ import annotations

import os
from pathlib import Path

from hotbed.errors import ConfigError
from hotbed.host.memory import parse_bytes

CACHE_VARIABLE = "HOTBED_CACHE"
READ_CACHE_VARIABLE = "HOTBED_READ_CACHE"
PATIENCE_VARIABLE = "HOTBED_STORE_PATIENCE"
TIMEOUT_VARIABLE = "HOTBED_STORE_TIMEOUT"
READ_CACHE = "10GiB"


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Where built datasets and copies of remote files are kept."""
    if cache_dir is not None:
        return Path(cache_dir)
    named = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(named).expanduser() if named else Path.home() / ".cache" / "hotbed"
    except RuntimeError as error:  # a user without a home, as in many containers
        raise ConfigError(
            f"there is no home directory for the cache of datasets ({error}) Set {CACHE_VARIABLE} to a directory with "
            "500 MB free."
        ) from error


def set_read_cache(amount: str | None) -> None:
    """Let `--read-cache` hold for this process and those that it starts; `0` keeps nothing on the disk."""
    if amount is not None:
        _bytes(amount, "--read-cache")
        os.environ[READ_CACHE_VARIABLE] = amount


def read_cache_bytes() -> int:
    """The budget of local copies of remote files; 0: none."""
    return _bytes(os.environ.get(READ_CACHE_VARIABLE) or READ_CACHE, READ_CACHE_VARIABLE)


def patience() -> float:
    """Seconds until a store that does not answer is given up."""
    return _seconds(PATIENCE_VARIABLE, 300.0)


def timeout() -> float:
    """Seconds that one request may take before it is made again."""
    return _seconds(TIMEOUT_VARIABLE, 60.0)


def _bytes(text: str, name: str) -> int:
    return 0 if text.strip() == "0" else parse_bytes(text, name)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        found = float(text or default)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e7:
        raise ConfigError(f"{name} is {text!r}; it must be a number of seconds above 0, such as {default:.0f}.")
    return found
