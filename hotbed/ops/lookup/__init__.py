"""Slots to pooled vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.backend import backend_of
from hotbed.ops.lookup import reference
from hotbed.ops.lookups import Lookups
from hotbed.ops.threads import in_parallel

__all__ = ["lookup"]


def lookup(records: Tensor, lookups: Lookups, dim: int) -> Tensor:
    """Pooled vectors [O, D] of the look-ups; rows of absent bags and padding are zero."""
    backend = backend_of(records)
    if backend == "reference":
        return reference.lookup(records, lookups, dim)
    if backend == "triton":
        from hotbed.ops.lookup import triton

        return triton.lookup(records, lookups, dim)
    from hotbed.ops.lookup import numba

    out = torch.empty(lookups.num_out, dim, dtype=records.dtype)
    slots = lookups.slots.numpy()
    if lookups.starts is None or lookups.out_rows is None:
        in_parallel(numba.lookup_single, records.numpy(), slots, out.numpy())
    else:
        scale = records.new_empty(0) if lookups.scale is None else lookups.scale
        in_parallel(
            numba.lookup_bags,
            records.numpy(),
            slots,
            scale.numpy(),
            lookups.starts.numpy(),
            lookups.out_rows.numpy(),
            out.numpy(),
        )
    return out
