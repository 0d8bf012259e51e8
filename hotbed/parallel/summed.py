"""Gradients that an owner has received from all ranks in, what it updates its rows with out.

As a rule each rank's sum stands for itself and the update adds them. Where a row optimizer divides by how often a row occurs
(`scale_by_count`), ranks tell how often their batch has it: sums are then added and divided here, and every row comes once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.ops.lookups import Lookups, Span
from hotbed.ops.sums import sum_by_row


class Summed(NamedTuple):
    """Gradients [n, D] of look-ups of one span, and how often a batch has the row of each."""

    lookups: Lookups
    grad: Tensor
    times: Tensor  # int64 [n]


def averaged(summed: Summed) -> Summed:
    """The sum of every row, added in order, by how often all batches have it; every row once."""
    lookups, grad, times = summed
    slots, places = torch.unique(lookups.slots, return_inverse=True)
    count, size = grad.shape[0], int(slots.shape[0])
    sums = sum_by_row(grad, Lookups(places, (Span("rows", 0, count, 1),), count), size, ("rows",))
    totals = torch.zeros(size, dtype=torch.int64, device=grad.device).index_add_(0, places, times)
    keys = None
    if lookups.keys is not None:
        keys = lookups.keys.new_empty(size)
        keys[places] = lookups.keys  # any of them will do: they are one row's
    grad = sums / totals.clamp(min=1).to(grad.dtype).unsqueeze(1)
    return Summed(Lookups(slots, (Span("rows", 0, size, 1),), size, keys=keys), grad, totals)
