"""64-bit ids in, small numbers out: ids are numbered in order of first occurrence, and counted on request.

An open-addressing hash table in Numba: 8 bytes for the id, 8 for its count, and 8 to 16 for the index, so 24 to 32 bytes per
distinct id (1.5 times as much for a moment while the table grows). Numbers are int32.
"""

from __future__ import annotations

import numpy as np

from hotbed.errors import DataError
from hotbed.host.jit import njit
from hotbed.host.splitmix import mix

_FIRST_SLOTS = 1 << 10


class Numbering:
    """The number of an id is the number of distinct ids added before it."""

    def __init__(self) -> None:
        self._number_of_slot = np.full(_FIRST_SLOTS, -1, dtype=np.int32)
        self._ids = np.empty(_FIRST_SLOTS // 2, dtype=np.int64)
        self._counts = np.zeros(_FIRST_SLOTS // 2, dtype=np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> np.ndarray:
        """The id of every number, int64."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """How often each number's id was counted, int64."""
        return self._counts[: self._size]

    def add(self, ids: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """Number `ids` (int64 [n]), counting those where `counted` (bool [n]); int32 [n]."""
        numbers = np.empty(len(ids), dtype=np.int32)
        done = 0
        while True:
            done, self._size = _add(
                ids, counted, done, self._number_of_slot, self._ids, self._counts, self._size, numbers
            )
            if done == len(ids):
                return numbers
            self._grow()

    def find(self, ids: np.ndarray) -> np.ndarray:
        """The numbers of `ids`, int32 [n]; -1 for ids never added."""
        numbers = np.empty(len(ids), dtype=np.int32)
        _find(ids, self._number_of_slot, self._ids, numbers)
        return numbers

    def _grow(self) -> None:
        slots = 2 * len(self._number_of_slot)
        if slots > 2**32:
            raise DataError(
                f"a feature has more than {self._size:,} distinct ids; a vocabulary holds at most 2**31. "
                "Use the hashing trick: --ids-mode hash --hash-rows N."
            )
        ids, counts = np.empty(slots // 2, dtype=np.int64), np.zeros(slots // 2, dtype=np.int64)
        ids[: self._size], counts[: self._size] = self.ids, self.counts  # unused pages take no memory
        self._ids, self._counts = ids, counts
        self._number_of_slot = np.full(slots, -1, dtype=np.int32)
        _reindex(self._number_of_slot, self._ids, self._size)


@njit(nogil=True, cache=True, inline="always")
def _slot(id_: int, number_of_slot: np.ndarray, ids: np.ndarray) -> np.uint64:
    """The slot that holds `id_`, or the free one where it belongs."""
    mask = np.uint64(len(number_of_slot) - 1)
    slot = mix(np.uint64(id_)) & mask
    while number_of_slot[slot] >= 0 and ids[number_of_slot[slot]] != id_:  # ends: half of the slots are free
        slot = (slot + np.uint64(1)) & mask
    return slot


@njit(nogil=True, cache=True)
def _add(
    new_ids: np.ndarray,
    counted: np.ndarray,
    done: int,
    number_of_slot: np.ndarray,
    ids: np.ndarray,
    counts: np.ndarray,
    size: int,
    numbers: np.ndarray,
) -> tuple[int, int]:
    """Add ids from position `done` on until all are in or the table is half full; (position, size)."""
    for i in range(done, len(new_ids)):
        slot = _slot(new_ids[i], number_of_slot, ids)
        number = number_of_slot[slot]
        if number < 0:
            if size == len(ids):
                return i, size
            number = size
            ids[number] = new_ids[i]
            number_of_slot[slot] = number
            size += 1
        counts[number] += counted[i]
        numbers[i] = number
    return len(new_ids), size


@njit(nogil=True, cache=True)
def _find(wanted: np.ndarray, number_of_slot: np.ndarray, ids: np.ndarray, numbers: np.ndarray) -> None:
    for i in range(len(wanted)):
        numbers[i] = number_of_slot[_slot(wanted[i], number_of_slot, ids)]


@njit(nogil=True, cache=True)
def _reindex(number_of_slot: np.ndarray, ids: np.ndarray, size: int) -> None:
    for number in range(size):
        number_of_slot[_slot(ids[number], number_of_slot, ids)] = number
