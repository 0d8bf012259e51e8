"""Temporary keys: what ids without a row are looked up by outside training.

A temporary key is valid as long as its batch lives. It is not a row of the store, and it is never used again.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from hotbed.ids import UNKNOWN
from hotbed.ids.index import Ints, Tables

TEMPORARY = 1 << 33  # keys from here on are temporary


class RowlessIds:
    """Distinct ids without a row, of one batch; id n has the key start + n."""

    def __init__(self, start: int, tables: Tables, ids: Ints) -> None:
        self.start, self.tables, self.ids = start, tables, ids


class TemporaryKeys:
    """The temporary keys of one group; a batch keeps the RowlessIds that it was given."""

    def __init__(self) -> None:
        self._alive: list[weakref.ref[RowlessIds]] = []
        self._next = TEMPORARY
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Batches whose keys are remembered."""
        return len(self._alive)

    def give(self, tables: Tables, ids: Ints, rows: Ints) -> RowlessIds | None:
        """Replace UNKNOWN in the rows of a batch by temporary keys, one for each distinct id."""
        unknown = np.flatnonzero(rows == UNKNOWN)
        if not unknown.shape[0]:
            return None
        tables, ids = tables[unknown], ids[unknown]
        order = np.lexsort((ids, tables))
        is_new: NDArray[np.bool_] = np.ones(order.shape[0], dtype=np.bool_)
        tables, ids = tables[order], ids[order]
        is_new[1:] = (tables[1:] != tables[:-1]) | (ids[1:] != ids[:-1])
        found = RowlessIds(self._next, tables[is_new], ids[is_new])
        rows[unknown[order]] = found.start + np.cumsum(is_new) - 1
        self._next += found.ids.shape[0]
        with self._lock:
            self._alive = [ref for ref in self._alive if ref() is not None] + [weakref.ref(found)]
        return found

    def owners_of(self, keys: Ints) -> tuple[Tables, Ints]:
        """(table, id) of temporary keys; in any thread."""
        with self._lock:
            alive = [found for ref in self._alive if (found := ref()) is not None]
        which = np.searchsorted(np.array([found.start for found in alive], dtype=np.int64), keys, side="right") - 1
        tables, ids = np.empty(keys.shape[0], dtype=np.uint16), np.empty(keys.shape[0], dtype=np.int64)
        for number in np.unique(which):
            mine = which == number
            places = keys[mine] - alive[number].start
            assert number >= 0, "a temporary row was dropped before its batch"
            assert places.max() < alive[number].ids.shape[0], "a temporary row was dropped before its batch"
            tables[mine], ids[mine] = alive[number].tables[places], alive[number].ids[places]
        return tables, ids
