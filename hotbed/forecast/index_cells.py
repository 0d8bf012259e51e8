"""How large the index of a cache grows on a CPU: rows in slots and rows of batches ahead each have a cell.

Told of what happens in the order of a run, it keeps the books of `Cache.make_room`: what is live, what of it the cache knows
already, and when the table is made larger. Its size at the end is that of the cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotbed.ops.index import WAYS

_FULL, _GROWTH, _PER_SLOT = 0.7, 1.25, 2  # of hotbed/cache/cache.py


class Cells:
    """Of one cache."""

    def __init__(self, num_slots: int, num_rows: int) -> None:
        self.num_cells = _rounded(_PER_SLOT * num_slots)
        self._ahead = np.zeros(num_rows, dtype=np.int16)  # batches ahead that use a row
        self._live = self._usual = 0
        self._open: list[tuple[int, int]] = []  # (new cells, look-ups) of arrivals that are not counted
        self._ready = 0  # of them, those whose counts have come
        self._begun = False

    def arrive(self, rows: NDArray[np.int32], num_lookups: int, slot_of: NDArray[np.int32]) -> None:
        """A batch is known."""
        self._make_room(num_lookups)
        new = int(((self._ahead[rows] == 0) & (slot_of[rows] == -1)).sum())
        self._ahead[rows] += 1
        self._open.append((new, num_lookups))
        self._ready += not self._begun  # the first is waited for: it tells how far to look ahead
        self._begun = True

    def forget(self, rows: NDArray[np.int32], slot_of: NDArray[np.int32]) -> None:
        """A batch is past; its rows that are in no slot lose their cells."""
        self._ahead[rows] -= 1
        self._live -= int(((self._ahead[rows] == 0) & (slot_of[rows] == -1)).sum())

    def leave(self, rows: NDArray[np.int64]) -> None:
        """Victims: those that no batch ahead uses lose their cells."""
        self._live -= int((self._ahead[rows] == 0).sum())

    def planned(self) -> None:
        """A window is decided, and all counts have come."""
        self._ready = len(self._open)

    def _make_room(self, num_lookups: int) -> None:
        pending = sum(lookups for _, lookups in self._open)
        usual = 2 * self._usual * (len(self._open) + 1) if self._usual else pending + num_lookups
        self._count(self._ready)
        if self._live + usual <= _FULL * self.num_cells and self._live + pending + num_lookups <= self.num_cells:
            return
        self._count(len(self._open))
        if self._live + num_lookups > _FULL * self.num_cells:
            self.num_cells = _rounded(int((self._live + num_lookups) / _FULL * _GROWTH))

    def _count(self, number: int) -> None:
        for new, _ in self._open[:number]:
            self._live += new
            self._usual = max(new, self._usual - self._usual // 8)
        del self._open[:number]
        self._ready = 0


def _rounded(num_cells: int) -> int:
    return max(1, -(-num_cells // WAYS)) * WAYS
