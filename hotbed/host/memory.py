"""Amounts of memory: what a user writes ("2GiB") in bytes and back, and what a device can still give.

None where the system does not say how much is left. torch is loaded only to ask a CUDA device, so that settings can be read
without it.
"""

from __future__ import annotations

import math
import os
import re
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from hotbed.errors import ConfigError

if TYPE_CHECKING:
    import torch

_UNITS = {
    "": 1,
    "B": 1,
    "BYTES": 1,
    **{f"{letter}IB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")},
    **{f"{letter}B": 1000 ** (power + 1) for power, letter in enumerate("KMGT")},
}
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_bytes(amount: str | int, name: str) -> int:
    """The bytes of "2GiB", "1.5 GiB" (steps of 1024), "2GB" (of 1000), "4096" or 4096; else a ConfigError that names `name`."""
    wrong = f"{name}: must be an amount of memory such as 2GiB, 512MiB or 2GB, not {amount!r}"
    if isinstance(amount, bool) or not isinstance(amount, int | str):
        raise ConfigError(wrong)
    if isinstance(amount, int):
        count = Fraction(amount)
    else:
        match = _AMOUNT.fullmatch(amount.strip())
        if match is None:
            raise ConfigError(wrong)
        number, unit = match[1], match[2].upper()
        if unit in ("K", "M", "G", "T"):
            raise ConfigError(f"{wrong}; {number}{unit}iB is in steps of 1024, {number}{unit}B in steps of 1000")
        if unit not in _UNITS:
            raise ConfigError(f"{wrong}; the units are bytes, KiB, MiB, GiB, TiB and KB, MB, GB, TB")
        count = Fraction(number) * _UNITS[unit]
    if not 1 <= count < 2**63:
        raise ConfigError(f"{wrong}; it must be at least 1 byte and below 8 EiB")
    return int(count)


def available_memory(device: torch.device) -> int | None:
    """Free memory of a CUDA device; for the CPU what the machine has left, or its container if that is less."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    known = [amount for amount in (_machine(), _container()) if amount is not None]
    return min(known) if known else None


def resident_memory() -> int | None:
    """Bytes of memory that this process takes, with code and all it has loaded."""
    fields = "".join(_lines(Path("/proc/self/statm"))).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else None


def shared_out_memory(pid: int) -> int | None:
    """Bytes of memory of a process, where a page that n processes share counts as 1/n."""
    for line in _lines(Path(f"/proc/{pid}/smaps_rollup")):
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None


def in_words(amount: float) -> str:
    """1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def typed(amount: float) -> str:
    """The same as an option takes it, rounded up: 605KiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if amount >= size:
            return f"{math.ceil(10 * amount / size) / 10:g}{unit}"
    return f"{math.ceil(amount / 1024)}KiB" if amount >= 10 * 1024 else f"{math.ceil(amount)}B"


def parse_share(text: str) -> float:
    """A share as a number: 0.015 or 1.5%; a ValueError where it is neither."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def percent_hint(given: object) -> str:
    """What to write where a share was given in percent; "" where it was not."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 1 < given <= 100:
        return ""
    return f"; {given:g} % is {given / 100:g}"


def _machine() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Limit less use, where file cache that the kernel would give back is not use (cgroup v2, then v1)."""
    for folder, limit_name, used_name in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = "".join(_lines(folder / limit_name)), "".join(_lines(folder / used_name))
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
            return max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
