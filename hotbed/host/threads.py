"""The threads of a process that torchrun started with others on one machine.

torchrun gives each of several processes one thread (OMP_NUM_THREADS=1) unless the user set the variable. A rank with
tables has work for more: `share_cores` gives it its part of the machine's cores, and leaves a number that a user chose.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

_NAME = "OMP_NUM_THREADS"


class CoreShare(NamedTuple):
    """What one rank takes of its machine."""

    threads: int
    cores: int
    local_ranks: int

    def __str__(self) -> str:
        each = f"{self.threads} thread{'s' * (self.threads != 1)} each instead of torchrun's one"
        return f"{self.local_ranks} ranks share {self.cores} cores: {each} ({_NAME}=N sets another number)"


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_cores() -> CoreShare | None:
    """Take cores / local ranks threads where torchrun has chosen one; None where nothing changes."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_ranks < 2 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if os.environ.get(_NAME) != "1" or torch.get_num_threads() != 1 or _is_users_choice():
        return None
    share = CoreShare(max(1, num_cores() // local_ranks), num_cores(), local_ranks)
    if share.threads == 1:
        return None
    torch.set_num_threads(share.threads)
    return share


def _is_users_choice() -> bool:
    """Whether torchrun itself was started with the variable, as far as that can be known: Linux keeps what it began with."""
    try:
        began_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(each.startswith(f"{_NAME}=".encode()) for each in began_with)
