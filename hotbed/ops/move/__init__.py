"""Moving whole records: into the cache, out of it, and to and from host memory.

    host records --gather_rows--> staging (host) ==copy==> staging (device) --unpack--> cache
    host records <-scatter_rows-- staging (host) <==copy== staging (device) <--pack---- cache

A row that was never stored is not copied: `unpack` creates its first record in place, from the same pure function of
(seed, table, id) on every device. No call waits for the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.host.pool import in_parallel, num_threads
from hotbed.ops.backend import backend_of
from hotbed.ops.move import reference
from hotbed.ops.move.copy import GATHER, SCATTER, move_rows
from hotbed.ops.move.initial import InitialRows, InitialTable, arrays, initial_rows
from hotbed.ops.precision import KINDS

__all__ = [
    "InitialRows",
    "InitialTable",
    "RowExchange",
    "exchange",
    "gather_rows",
    "initial_records",
    "initial_rows",
    "pack",
    "scatter_rows",
    "unpack",
]

_PER_THREAD = 1 << 14  # numbers that pay for waking one more thread


def unpack(records: Tensor, slots: Tensor, source: Tensor, staging: Tensor, keys: Tensor, first: InitialRows) -> None:
    """Bring M rows into records [S, W].

    records[slots[i]] becomes staging[source[i]], or the first record of keys[i] where source[i] is negative; negative
    slots are skipped. slots and keys are int64 [M], source is int32 [M], staging is [N, W]; all contiguous, on one device.
    """
    keys = first.shard.keys_of(keys)
    backend = backend_of(records)
    if backend == "reference":
        reference.unpack(records, slots, source, staging, keys, first)
        return
    if backend == "triton":
        from hotbed.ops.move import triton

        triton.unpack(records, slots, source, staging, keys, first)
        return
    from hotbed.ops.move import numba

    layout = first.layout
    in_parallel(
        numba.unpack_kernel(first.rule),
        records.numpy(),
        records.numpy().view(np.uint16),
        KINDS[layout.precision],
        slots.numpy(),
        source.numpy(),
        staging.numpy(),
        keys.numpy(),
        *_initial(first),
        threads=_threads(slots.shape[0], layout.width),
    )


class RowExchange(NamedTuple):
    """The rows of a window on the CPU: which row comes into which slot, and which leaves it."""

    slots: Tensor  # int64 [M]
    keys: Tensor  # int64 [M]
    victim_slots: Tensor  # int64 [V], in the order of the misses that take them
    victim_keys: Tensor  # int64 [V]


def exchange(records: Tensor, below: Tensor, state: NDArray[np.uint8], rows: RowExchange, first: InitialRows) -> int:
    """Victims go from records [S, W] to below [R, W], misses come from there; the number of those that were there.

    One pass over the slots, all in host memory. A row whose `state` [R] says that it was never stored is created in place.
    """
    from hotbed.ops.move import numba

    threads = _threads(rows.slots.shape[0], first.layout.width)
    counts, keys = np.zeros((threads, 2), dtype=np.int64), rows.keys.numpy()
    first_keys = keys if first.shard.world == 1 else first.shard.keys_of(rows.keys).numpy()
    in_parallel(
        numba.exchange_kernel(first.rule),
        records.numpy(),
        records.numpy().view(np.uint16),
        KINDS[first.layout.precision],
        rows.slots.numpy(),
        keys,
        first_keys,
        rows.victim_slots.numpy(),
        rows.victim_keys.numpy(),
        below.numpy(),
        state,
        *_initial(first),
        counts,
        threads=threads,
    )
    num_found, num_left = counts.sum(axis=0).tolist()
    assert num_left == len(rows.victim_keys), (
        f"{num_left} of {len(rows.victim_keys)} victims left a slot that was taken"
    )
    return int(num_found)


@lru_cache(maxsize=64)
def _initial(first: InitialRows) -> tuple[tuple[NDArray[Any], ...], tuple[int, int, bool, int]]:
    """(tables, scales, constants), (dim, element states, has a row state, first column): as kernels read them."""
    layout = first.layout
    return tuple(arrays(first)), (
        layout.dim,
        len(layout.element_states),
        bool(layout.row_states),
        first.first_column,
    )


def initial_records(keys: Tensor, first: InitialRows) -> Tensor:
    """The records [M, W] that the rows of `keys` [M] start from."""
    num_rows = keys.shape[0]
    records = torch.empty(num_rows, first.layout.width, device=keys.device, dtype=torch.float32)
    slots = torch.arange(num_rows, device=keys.device)
    source = torch.full([num_rows], -1, dtype=torch.int32, device=keys.device)
    unpack(records, slots, source, records[:0], keys, first)
    return records


def pack(records: Tensor, slots: Tensor, out: Tensor) -> None:
    """out[i] = records[slots[i]]; slots int64 [V], out [V, W], on one device."""
    if backend_of(records) == "numba":
        gather_rows(records, slots, out)
    else:
        reference.pack(records, slots, out)


def gather_rows(records: Tensor, keys: Tensor, out: Tensor) -> None:
    """out[i] = records[keys[i]] on the host; keys int64 [M], best sorted, out [M, W], may be pinned; all contiguous."""
    move_rows(GATHER, *_addresses(records, keys, out))


def scatter_rows(records: Tensor, keys: Tensor, values: Tensor) -> None:
    """records[keys[i]] = values[i] on the host; keys int64 [M], distinct, best sorted, values [M, W]; all contiguous."""
    move_rows(SCATTER, *_addresses(records, keys, values))


def _addresses(records: Tensor, keys: Tensor, packed: Tensor) -> tuple[int, int, int, int, int]:
    """(records, keys, packed, number of rows, bytes of a row); what would read foreign memory is refused."""
    num_rows, width = packed.shape
    fits = keys.shape == (num_rows,) and records.shape[1] == width and records.dtype == packed.dtype
    if not (fits and keys.dtype == torch.int64):
        raise ValueError(
            f"keys {keys.dtype} {list(keys.shape)} and rows {packed.dtype} {list(packed.shape)} do not fit records "
            f"{records.dtype} {list(records.shape)}"
        )
    if not (records.is_contiguous() and keys.is_contiguous() and packed.is_contiguous()):
        raise ValueError("records, keys and rows must be contiguous")
    return records.data_ptr(), keys.data_ptr(), packed.data_ptr(), num_rows, width * packed.itemsize


def _threads(num_rows: int, width: int) -> int:
    return min(num_threads(), 1 + num_rows * width // _PER_THREAD)
