"""Occurrences of pending ids, which have no row yet: exact counts, or a sketch of fixed size.

Both can be undone: a change includes the previous values. The sketch is a count-min sketch of four lines with conservative
update (only the cells that hold the smallest count grow). A count is never too low and, on long-tailed streams, far less often
too high than with plain adding. Cells are as narrow as the rule's limit allows and saturate there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.host.intrinsics import prefetch
from hotbed.host.jit import njit
from hotbed.host.pages import HUGE_PAGE, Pages, in_pages
from hotbed.host.splitmix import GOLDEN, mix
from hotbed.ids.index import MAX_ROWS, Entries, IdIndex, Ints, Tables

_LINES = 4
_AHEAD = 8


class ExactCounts:
    """A count for every pending (table, id); 0 is not stored."""

    def __init__(self, capacity: int = MAX_ROWS) -> None:
        self._index = IdIndex(capacity)
        self._counts: NDArray[np.uint32] = Pages((self._index.capacity,), np.uint32).array
        self._freed = np.empty(1024, dtype=np.int64)  # freed places; the last one is reused first
        self._num_freed = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes + in_pages(4 * self._index.end, HUGE_PAGE) + self._freed.nbytes

    def get(self, tables: Tables, ids: Ints) -> Ints:
        places = self._index.find(tables, ids)
        return np.where(places >= 0, self._counts[np.maximum(places, 0)], 0).astype(np.int64)

    def set(self, tables: Tables, ids: Ints, counts: Ints) -> None:
        """Set the counts of distinct ids; a count of 0 removes the id."""
        places = self._index.find(tables, ids)
        gone, new = (places >= 0) & (counts == 0), (places < 0) & (counts > 0)
        if gone.any():
            self._give_back(self._index.remove(tables[gone], ids[gone]))
        if new.any():
            places[new] = self._take(int(np.count_nonzero(new)))
            self._index.insert(tables[new], ids[new], places[new])
        kept = counts > 0
        self._counts[places[kept]] = counts[kept]

    def items(self) -> tuple[Entries, Ints]:
        """All of them, ordered by table and id, whatever their order of arrival."""
        parts = list(self._index.items())
        if not parts:
            parts = [Entries(np.empty(0, dtype=np.uint16), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))]
        tables, ids, places = (np.concatenate(column) for column in zip(*parts))
        order = np.lexsort((ids, tables))
        counts = self._counts[places[order]].astype(np.int64)
        return Entries(tables[order], ids[order], places[order]), counts

    def _take(self, count: int) -> Ints:
        reused = min(count, self._num_freed)
        old = self._freed[self._num_freed - reused : self._num_freed]
        new = np.arange(self._index.end, self._index.end + count - reused)
        self._num_freed -= reused
        return np.concatenate([old, new])

    def _give_back(self, places: Ints) -> None:
        needed = self._num_freed + places.shape[0]
        if needed > self._freed.shape[0]:
            self._freed = np.resize(self._freed, 2 * needed)
        self._freed[self._num_freed : needed] = places
        self._num_freed = needed


class SketchChange(NamedTuple):
    """The changes of one addition: flat cells in the order of writing, and their previous values."""

    cells: Ints
    values: NDArray[Any]


class CountMinSketch:
    """Counts up to `limit` of the ids of one table in `num_bytes`."""

    def __init__(self, num_bytes: int, limit: int, seed: int) -> None:
        dtype = np.min_scalar_type(limit)
        self.cells = np.zeros((_LINES, num_bytes // dtype.itemsize // _LINES), dtype=dtype)
        self._limit = limit
        self._seed = np.uint64(seed)

    def add(self, ids: Ints, counts: Ints) -> tuple[Ints, SketchChange]:
        """Count distinct ids: (the count of each, at most the limit, and the changes)."""
        totals = np.empty(ids.shape[0], dtype=np.int64)
        places = np.empty(ids.shape[0] * _LINES, dtype=np.int64)
        values = np.empty(ids.shape[0] * _LINES, dtype=self.cells.dtype)
        changed = _add(self.cells, ids, counts, self._limit, self._seed, totals, places, values)
        return totals, SketchChange(places[:changed].copy(), values[:changed].copy())

    def swap(self, changes: SketchChange, *, back: bool) -> None:
        """Swap present and previous values: backwards to undo, forwards to redo."""
        swap(self.cells.reshape(-1), changes.cells, changes.values, back)


@njit(nogil=True, cache=True)
def swap(array: Any, places: Any, values: Any, back: Any) -> None:
    """Swap array[places] and values one after the other, from the last on if `back`."""
    for i in range(places.shape[0]):
        at = places.shape[0] - 1 - i if back else i
        array[places[at]], values[at] = values[at], array[places[at]]


@njit(nogil=True, cache=True, inline="always")
def _cell(id_: Any, seed: Any, line: Any, width: Any) -> Any:
    bits = mix(mix(np.uint64(id_) ^ seed) + np.uint64(line) * GOLDEN)
    return np.int64(((bits >> np.uint64(32)) * np.uint64(width)) >> np.uint64(32))


@njit(nogil=True, cache=True)
def _add(cells: Any, ids: Any, counts: Any, limit: int, seed: Any, totals: Any, places: Any, values: Any) -> int:
    width = cells.shape[1]
    changed = 0
    for i in range(ids.shape[0]):
        if i + _AHEAD < ids.shape[0]:
            for line in range(_LINES):
                prefetch(cells, line, _cell(ids[i + _AHEAD], seed, line, width))
        smallest: Any = limit
        for line in range(_LINES):
            smallest = min(smallest, np.int64(cells[line, _cell(ids[i], seed, line, width)]))
        total = min(smallest + counts[i], limit)
        totals[i] = total
        for line in range(_LINES):
            cell = _cell(ids[i], seed, line, width)
            if np.int64(cells[line, cell]) < total:
                places[changed], values[changed] = line * width + cell, cells[line, cell]
                cells[line, cell] = total
                changed += 1
    return changed
