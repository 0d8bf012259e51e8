"""Ids with counts in, the frequent ones out, in memory that is fixed beforehand.

Space-saving counters (Metwally et al. 2005) in the form of Misra and Gries, with the batched purge of Anderson et al.
(arXiv 1705.07001). A hash table holds up to `capacity` ids and a counter each. When it is full, the median of the counters
is subtracted from all of them and those that reach 0 leave: at least half. `error` is the sum of what was subtracted, so
for every id

    counter <= true count <= counter + error        (counter 0 for ids that are not in the table)

and an id that was seen more than `error` times is in the table for certain. Every purge takes at least capacity / 2 times
its median out of the total of all counts N, hence error <= 2 N / capacity whatever the ids are; skewed ids give far less,
and a stream of few distinct ids gives 0. The result depends on the order of the ids, and on nothing else. Merging adds
counters and errors; the bounds hold for the union.

Memory: 16 bytes a slot, 3 slots for every 2 ids at least, and half as much again while purging.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hotbed.data.hash import mix
from hotbed.errors import ConfigError
from hotbed.host.pages import zeros

_FEWEST_SLOTS = 16
_BYTES_OF_SLOT = 32  # two of 8, and as much for a purge
_PIECE = 1 << 20
_SMALL = 1 << 12  # values that are counted one by one to find a median


class Counted(NamedTuple):
    """The ids in the table, in no order, and how often each was seen at least."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]


class HeavyHitters:
    """`add` ids, `merge` others; `items` are the frequent ones, `error` is what their counts may lack."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < _FEWEST_SLOTS * _BYTES_OF_SLOT:
            least = _FEWEST_SLOTS * _BYTES_OF_SLOT
            raise ConfigError(f"a sketch of {num_bytes} bytes holds no ids; it needs {least} bytes at least.")
        slots = 1 << ((num_bytes // _BYTES_OF_SLOT).bit_length() - 1)
        self._slots = zeros((slots, 2), np.int64)  # id and counter, on one cache line; counter 0: a free slot
        self._size = 0
        self.capacity = slots * 3 // 4
        self.error = 0
        self.total = 0  # of all counts added

    def __len__(self) -> int:
        return self._size

    def add(self, ids: NDArray[np.int64], counts: NDArray[np.int64] | None = None) -> None:
        """Count `ids`, each once or as often as `counts` says (from 0)."""
        for begin in range(0, len(ids), _PIECE):
            piece = ids[begin : begin + _PIECE]
            weights = np.ones(len(piece), dtype=np.int64) if counts is None else counts[begin : begin + _PIECE]
            self.total += int(weights.sum())
            done = 0
            while True:
                done, self._size = _add(piece, weights, done, self._slots, self._size, self.capacity)
                if done == len(piece):
                    break
                self._purge()

    def merge(self, other: HeavyHitters) -> None:
        """Become a sketch of both streams."""
        total = self.total + other.total
        self.add(*other.items())
        self.total = total
        self.error += other.error

    def items(self) -> Counted:
        used = self._slots[self._slots[:, 1] > 0]
        return Counted(used[:, 0], used[:, 1])

    def _median(self) -> int:
        """Of the counters; most are small, and np.partition is slow where many are equal."""
        of_value = np.zeros(_SMALL, dtype=np.int64)
        _count_values(self._slots, of_value)
        reached = np.cumsum(of_value[1:])
        middle = self._size // 2
        if reached[-1] > middle:
            return int(np.searchsorted(reached, middle, side="right")) + 1
        large = self._slots[:, 1][self._slots[:, 1] >= _SMALL]
        large.partition(middle - reached[-1])
        return int(large[middle - reached[-1]])

    def _purge(self) -> None:
        """Subtract the median; at least half of the ids leave."""
        median = self._median()
        self.error += median
        kept = self._slots[self._slots[:, 1] > median]
        self._slots.fill(0)
        _, self._size = _add(kept[:, 0], kept[:, 1] - median, 0, self._slots, 0, self.capacity)


@njit(nogil=True, cache=True)
def _count_values(slots: NDArray[np.int64], of_value: NDArray[np.int64]) -> None:
    """How many counters have each value below len(of_value)."""
    for slot in range(len(slots)):
        if slots[slot, 1] < len(of_value):
            of_value[slots[slot, 1]] += 1


@njit(nogil=True, cache=True)
def _add(
    new_ids: NDArray[np.int64],
    weights: NDArray[np.int64],
    done: int,
    slots: NDArray[np.int64],
    size: int,
    capacity: int,
) -> tuple[int, int]:
    """Add from position `done` on until all are in or the table is full; (position, size)."""
    mask = np.uint64(len(slots) - 1)
    for i in range(done, len(new_ids)):
        if weights[i] == 0:
            continue
        id_ = new_ids[i]
        slot = mix(np.uint64(id_)) & mask
        while slots[slot, 1] > 0 and slots[slot, 0] != id_:  # ends: a quarter of the slots is free
            slot = (slot + np.uint64(1)) & mask
        if slots[slot, 1] == 0:
            if size == capacity:
                return i, size
            slots[slot, 0] = id_
            size += 1
        slots[slot, 1] += weights[i]
    return len(new_ids), size
