"""Lookup and pooling in plain torch; runs on every device, with sums in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.lookups import Lookups


def rows_of(numbers: Tensor, lookups: Lookups, dim: int) -> Tensor:
    """The weights each lookup reads [L, D], at least float32, zero for padding, before scaling."""
    slots, dtype = lookups.slots, result_type(numbers)
    if numbers.shape[0] == 0:
        return numbers.new_zeros(slots.shape[0], dim, dtype=dtype)
    rows = numbers[:, :dim].index_select(0, slots.clamp(min=0)).to(dtype)
    return torch.where((slots >= 0).unsqueeze(1), rows, 0)


def result_type(numbers: Tensor) -> torch.dtype:
    """The type of vectors: that of the weights, or float32 where those have 16 bits."""
    return torch.float32 if numbers.itemsize == 2 else numbers.dtype


def lookup(numbers: Tensor, lookups: Lookups, dim: int) -> Tensor:
    """Pooled vectors [O, D]."""
    rows = rows_of(numbers, lookups, dim)
    if lookups.bags is None:
        return rows
    if lookups.bags.scale is not None:
        rows = rows * lookups.bags.scale.unsqueeze(1)
    out = torch.zeros(lookups.num_out, dim, dtype=rows.dtype, device=rows.device)
    if rows.shape[0]:
        out[lookups.bags.out_rows] = torch.segment_reduce(rows, "sum", offsets=lookups.bags.starts, initial=0)
    return out
