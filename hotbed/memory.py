"""How much memory a device can still give, in bytes; None where the system does not say."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def available_memory(device: torch.device) -> int | None:
    """Free memory of a CUDA device; for the CPU what the machine has left, or its container if that is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = [amount for amount in (_machine(), _container()) if amount is not None]
    return min(known) if known else None


def in_words(amount: float) -> str:
    """1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


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
