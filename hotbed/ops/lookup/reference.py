"""Look-up and pooling in plain torch; runs on every device, with sums in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.lookups import Lookups


def rows_of(records: Tensor, lookups: Lookups, dim: int) -> Tensor:
    """The weights each look-up reads [L, D], zero for padding, before scaling."""
    slots = lookups.slots
    if records.shape[0] == 0:
        return records.new_zeros(slots.shape[0], dim)
    rows = records[:, :dim].index_select(0, slots.clamp(min=0))
    return torch.where((slots >= 0).unsqueeze(1), rows, 0)


def lookup(records: Tensor, lookups: Lookups, dim: int) -> Tensor:
    """Pooled vectors [O, D]."""
    rows = rows_of(records, lookups, dim)
    if lookups.starts is None or lookups.out_rows is None:
        return rows
    if lookups.scale is not None:
        rows = rows * lookups.scale.unsqueeze(1)
    out = torch.zeros(lookups.num_out, dim, dtype=records.dtype, device=records.device)
    if rows.shape[0]:
        out[lookups.out_rows] = torch.segment_reduce(rows, "sum", offsets=lookups.starts, initial=0)
    return out
