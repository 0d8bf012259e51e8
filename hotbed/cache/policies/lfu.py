"""Least frequently used, with ageing: uses are counted, and every window takes a small share off all counts.

Without ageing a row that was hot last week stays for ever; with it a count is a mean over about 1 / (1 - KEEP) windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEEP = 0.995


class LFU:
    """One number per slot: its aged count of uses."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._counts = torch.zeros(num_slots, dtype=torch.float32, device=device)

    def used(self, slots: Tensor, counts: Tensor, is_new: Tensor) -> None:
        self._counts *= KEEP
        before = torch.where(is_new, 0.0, self._counts[slots])
        self._counts[slots] = before + counts.to(torch.float32)

    def scores(self) -> Tensor:
        return self._counts
