"""A command in a process group of its own: how long it ran, how much memory it took, and a kill at a chosen moment.

Memory is what all processes of the group have resident, shared pages divided among them, looked at twice a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

BETWEEN_LOOKS = 0.5  # seconds


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    seconds: float
    peak: int  # bytes
    killed: bool


def run_watched(command: Sequence[str], log: Path, kill_when: Callable[[], bool] | None = None) -> Ended:
    """Run to the end, or until `kill_when` says so: then SIGKILL to the whole group. The output is appended to `log`."""
    began, peak, killed = time.perf_counter(), 0, False
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while not killed:
                try:
                    process.wait(BETWEEN_LOOKS)
                    break
                except subprocess.TimeoutExpired:
                    peak = max(peak, resident(process.pid))
                    killed = kill_when is not None and kill_when()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(process.returncode, time.perf_counter() - began, peak, killed)


def resident(group: int) -> int:
    """Bytes that the processes of a group have in memory."""
    total = 0
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            if os.getpgid(int(entry)) == group:
                lines = Path("/proc", entry, "smaps_rollup").read_text().splitlines()
                total += next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):  # it ended meanwhile
            continue
    return total


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # renamed or removed meanwhile
                continue
    return total
