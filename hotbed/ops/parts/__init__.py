"""Bags to parts: what each rank owns of a bag, for owners that pool their part and send one vector for it.

In: where the key of every lookup stands among the distinct keys by owner (ops/partition), and the bags. Out: how many keys and
vectors would travel either way; and, for bags that go in parts, the keys of their parts by owner. Bags that do not go in
parts stay lookups of distinct rows: a vector then is a row.

Shapes: L lookups, N bags, U distinct keys, T tables, W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.ops.backend import backend_of
from hotbed.ops.parts import reference

__all__ = ["Parts", "TableAddresses", "count_ways", "split"]


class TableAddresses(NamedTuple):
    """For each table, what is requested from other ranks."""

    rows: list[int]  # [T] distinct keys: as many keys and vectors travel if rows do
    keys: list[int]  # [T] lookups: keys that travel if parts do
    parts: list[int]  # [T] parts of bags: vectors that travel if parts do


class Parts(NamedTuple):
    """What one rank requests from all: rows and parts, by owner, rows first."""

    keys: Tensor  # int64 [K]; all keys of a part but its first are ~key
    num_keys: list[int]  # [W] of them for each owner
    num_vectors: list[int]  # [W] rows and parts of each owner
    slots: Tensor  # int64 [L']: the vector of each lookup of a row, and of each part; -1 is padding
    source: Tensor  # int64 [L']: the lookup, or the first of the part, ascending
    starts: Tensor  # int64 [N + 1]: the bags among them


def count_ways(places: Tensor, starts: Tensor, table_of_bag: Tensor, counts: list[int], rank: int) -> TableAddresses:
    """Places [L] among the distinct keys, `counts` [W] of each owner; bags of table -1 are not counted."""
    num_tables = int(table_of_bag.max()) + 1 if table_of_bag.numel() else 0
    if backend_of(places) != "numba":
        found = reference.count_ways(places, starts, table_of_bag, counts, rank, num_tables)
    else:
        from hotbed.ops.parts import numba

        arrays = (places.numpy(), starts.numpy(), table_of_bag.numpy(), np.array(counts, np.int64))
        found = torch.from_numpy(numba.count_ways(*arrays, rank, num_tables))
    return TableAddresses(*found.tolist())


def split(places: Tensor, starts: Tensor, in_parts: Tensor, keys: Tensor, counts: list[int]) -> Parts:
    """Rows of some bags and parts of others (`in_parts`, bool [N]); keys [U] are distinct and by owner."""
    if backend_of(places) != "numba":
        return Parts(*reference.split(places, starts, in_parts, keys, counts))
    from hotbed.ops.parts import numba

    arrays = (places.numpy(), starts.numpy(), in_parts.numpy(), keys.numpy(), np.array(counts, np.int64))
    out, num_keys, num_vectors, slots, source, new_starts = numba.split(*arrays)
    return Parts(
        torch.from_numpy(out),
        num_keys.tolist(),
        num_vectors.tolist(),
        torch.from_numpy(slots),
        torch.from_numpy(source),
        torch.from_numpy(new_starts),
    )
