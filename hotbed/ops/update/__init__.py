"""Gradients to updated rows: sums the gradient of every row in the order of the batch and applies the row optimizer."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotbed.host.pool import in_parallel, threads_for
from hotbed.ops.backend import backend_of
from hotbed.ops.lookups import Lookups, Span, span_array
from hotbed.ops.precision import KINDS
from hotbed.ops.records import Layout
from hotbed.ops.update import reference
from hotbed.ops.update.settings import TableRows, UpdateSettings, settings_of

__all__ = ["TableRows", "UpdateSettings", "settings_of", "update"]

_MAX_PARTS = 32  # of one table; each part reads the table's whole list of slots and walks through all its pages


def update(records: Tensor, layout: Layout, grad: Tensor, lookups: Lookups, settings: UpdateSettings) -> None:
    """Apply the row optimizer in place; grad is the gradient of the pooled vectors [O, D]."""
    if settings.lr == 0 and settings.rule.divides_by_rate:
        return
    grad = grad.contiguous()
    backend = backend_of(records)
    if backend == "triton" and not settings.whole_table:
        from hotbed.ops.update import triton

        triton.update(records, layout, grad, lookups, settings)
        return
    if backend != "numba":  # whole tables are dense work, which torch does well
        reference.update(records, layout, grad, lookups, settings)
        return
    from hotbed.ops.update import numba

    out_rows = lookups.out_row_of_lookup()
    numbers = (settings.lr, settings.l2, settings.weight_decay, settings.clip_norm, float(settings.scale_by_count))
    constants = np.array(settings.constants, dtype=np.float64)
    visited = lookups.slots.numel() + (sum(table.rows for table in settings.tables) if settings.whole_table else 0)
    threads = threads_for(visited * layout.dim)
    parts, most = _parts(settings.tables, lookups.spans, threads, settings.whole_table)
    in_parallel(
        numba.update_kernel(settings.rule, KINDS[layout.precision], whole_table=settings.whole_table),
        records.numpy(),
        records.numpy().view(np.uint16),
        lookups.slots.numpy(),
        np.empty(0, dtype=np.int64) if lookups.keys is None else lookups.keys.numpy(),
        span_array(lookups.spans),
        parts,
        grad.numpy(),
        np.empty(0, dtype=np.int64) if out_rows is None else out_rows.numpy(),
        np.empty(0, dtype=grad.numpy().dtype) if lookups.scale is None else lookups.scale.numpy(),
        np.array(numbers, dtype=np.float64),
        constants,
        constants.astype(records.numpy().dtype),
        np.uint64(settings.salt),
        np.empty((threads, 2, most), dtype=np.uint64),
        threads=threads,
    )


@lru_cache(maxsize=64)
def _parts(
    tables: tuple[TableRows, ...], spans: tuple[Span, ...], threads: int, whole_table: bool
) -> tuple[NDArray[np.int64], int]:
    """(parts, most lookups of one table).

    parts [P, 6]: base, rows, first span, stop span, mask, residue; a part holds the rows with row & mask == residue.
    Thread t takes parts t, t + threads, ...: their order balances the work. No more parts than that needs: one table of 13 M
    rows, one thread, 103k lookups of dim 16 take 7 ms in one part and 17 ms in 16.
    """
    counts = [sum(span.length for span in spans[table.first_span : table.stop_span]) for table in tables]
    costs = []
    for table, count in zip(tables, counts):
        touched = min(count, table.rows)
        costs.append(count + 3 * touched)  # a row is three lookups' work
        if whole_table:
            costs[-1] += 2 * (table.rows - touched)
    most_work = sum(costs) / (2 * threads) if threads > 1 else sum(costs)
    parts: list[tuple[float, tuple[int, ...]]] = []
    for table, cost in zip(tables, costs):
        num_parts = 1
        while num_parts < _MAX_PARTS and cost > most_work * num_parts:  # ends: it doubles
            num_parts *= 2
        parts += [(cost / num_parts, (*table, num_parts - 1, residue)) for residue in range(num_parts)]
    parts.sort(key=lambda part: -part[0])
    shares = [part for _, part in parts]
    for start in range(
        0, len(shares), 2 * threads
    ):  # largest first, to and fro, so that every thread gets a fair share
        shares[start + threads : start + 2 * threads] = shares[start + threads : start + 2 * threads][::-1]
    return np.array(shares, dtype=np.int64).reshape(len(shares), 6), max(counts, default=0)
