"""Least recently used: the row whose last use lies farthest back goes first."""

from __future__ import annotations

import torch
from torch import Tensor


class LRU:
    """One number per slot: the window of its last use."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._last_use = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self._window = 0

    def used(self, slots: Tensor, counts: Tensor, is_new: Tensor) -> None:
        self._window += 1
        self._last_use[slots] = float(self._window)

    def scores(self) -> Tensor:
        return self._last_use
