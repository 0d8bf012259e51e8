"""Gradients of pooled vectors to sums per row: what a rank sends to the owners of rows instead of updating them.

Sums are taken in the order of the batch, as in an update.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hotbed.host.pool import in_parallel
from hotbed.ops.backend import backend_of
from hotbed.ops.lookups import Lookups
from hotbed.ops.records import layout_of
from hotbed.ops.update import TableRows, settings_of, update
from hotbed.optim import SGD

__all__ = ["sum_by_row"]

_SUM = SGD(lr=1.0)  # at a rate of -1, rows of zeros become the sums of their gradients


def sum_by_row(grad: Tensor, lookups: Lookups, num_rows: int, tables: tuple[str, ...]) -> Tensor:
    """Sums [num_rows, D] of grad [O, D] over the lookups, whose slots are rows; `tables` are those of the spans."""
    if backend_of(grad) == "numba":
        return _compiled(grad.contiguous(), lookups, num_rows)
    layout = layout_of(grad.shape[1], _SUM)
    records = torch.zeros(num_rows, layout.width, dtype=grad.dtype, device=grad.device)
    starts = [p for p, table in enumerate(tables) if p == 0 or tables[p - 1] != table]
    runs = [TableRows(0, num_rows, first, stop) for first, stop in zip(starts, [*starts[1:], len(tables)])]
    update(records, layout, grad, lookups, settings_of(_SUM, -1.0, tuple(runs)))
    return records[:, : layout.dim]


def _compiled(grad: Tensor, lookups: Lookups, num_rows: int) -> Tensor:
    from hotbed.ops.sums import numba

    out = torch.empty(num_rows, grad.shape[1], dtype=grad.dtype, device="cpu")
    out_rows = lookups.out_row_of_lookup()
    in_parallel(
        numba.sum_by_row,
        lookups.slots.numpy(),
        np.empty(0, dtype=np.int64) if out_rows is None else out_rows.numpy(),
        np.empty(0, dtype=grad.numpy().dtype) if lookups.scale is None else lookups.scale.numpy(),
        grad.numpy(),
        out.numpy(),
    )
    return out
