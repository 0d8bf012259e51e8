"""Streams of ids in, statistics of bounded size out: which ids are frequent, and how many are distinct.

Both are deterministic, take ids in pieces and can be merged.

`HeavyHitters`: space-saving counters (Metwally et al. 2005) in the form of Misra and Gries, with the batched purge of Anderson
et al. (arXiv 1705.07001). A hash table holds up to `capacity` ids and a counter each. When it is full, the median of the
counters is subtracted from all of them and those that reach 0 leave: at least half. `error` is the sum of what was subtracted,
so for every id

    counter <= true count <= counter + error        (counter 0 for ids that are not in the table)

and an id that was seen more than `error` times is in the table for certain. Every purge takes at least capacity / 2 times
its median out of the total of all counts N, hence error <= 2 N / capacity whatever the ids are; skewed ids give far less,
and a stream of few distinct ids gives 0. The result depends on the order of the ids, and on nothing else. Merging adds
counters and errors; the bounds hold for the union.

Memory: 16 bytes a slot, at least 3 slots for every 2 ids, and 1.5 times as much while purging.

`HyperLogLog`: ids in, an estimate of how many of them are distinct out (HyperLogLog, Flajolet et al. 2007).

Every id is mixed into 64 random-looking bits. The first 16 choose one of 65,536 registers of one byte; the register keeps the
largest number of leading zeros (plus 1) seen among the other 48. Registers depend on the set of ids alone: neither order nor
repetition changes them, and those of a union are the larger of each pair. The estimator is Ertl's (arXiv 1702.01284), which
needs no tables of corrections: standard error 1.04 / sqrt(65,536) = 0.41 % from a few ids to far beyond 2**60.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError
from hotbed.host.jit import njit
from hotbed.host.pages import zeros
from hotbed.host.splitmix import mix

BITS = 16
REGISTERS = 1 << BITS
STANDARD_ERROR = 1.04 / math.sqrt(REGISTERS)
_OTHER_BITS = 64 - BITS
_SEED = np.uint64(0xD1B54A32D192ED03)  # ids that are hashes already are mixed once more, independently
_FEWEST_SLOTS = 16
_BYTES_OF_SLOT = 32  # two of 8, and as much for a purge
_PIECE = 1 << 20
_SMALL = 1 << 12  # values that are counted one by one to find a median


class CountedIds(NamedTuple):
    """The ids in the table, unordered, and a lower bound of each count."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]


class HeavyHitters:
    """`add` ids, `merge` others; `items` are the frequent ids, `error` bounds what their counts may lack."""

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
        """Merge another sketch into this one."""
        total = self.total + other.total
        self.add(*other.items())
        self.total = total
        self.error += other.error

    def items(self) -> CountedIds:
        used = self._slots[self._slots[:, 1] > 0]
        return CountedIds(used[:, 0], used[:, 1])

    def _median(self) -> int:
        """The median counter; most are small, and np.partition is slow if many are equal."""
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


class HyperLogLog:
    """`add` ids, `merge` others, ask for the `estimate`."""

    def __init__(self) -> None:
        self.registers = np.zeros(REGISTERS, dtype=np.uint8)

    def add(self, ids: NDArray[np.int64]) -> None:
        _add_ids(ids, self.registers)

    def merge(self, other: HyperLogLog) -> None:
        """Merge another set into this one."""
        np.maximum(self.registers, other.registers, out=self.registers)

    def estimate(self) -> float:
        """How many distinct ids were added."""
        of_value = np.bincount(self.registers, minlength=_OTHER_BITS + 2) / REGISTERS
        total = _tau(1.0 - of_value[_OTHER_BITS + 1])
        for value in range(_OTHER_BITS, 0, -1):
            total = 0.5 * (total + of_value[value])
        total += _sigma(of_value[0])
        return REGISTERS / (2.0 * math.log(2.0) * total) if math.isfinite(total) else 0.0


def _sigma(x: float) -> float:
    """x + sum over k >= 1 of x**(2**k) * 2**(k - 1); the share of empty registers in, what they stand for out."""
    if x == 1.0:
        return math.inf
    weight, total = 1.0, x
    while True:
        x *= x
        before = total
        total += x * weight
        weight += weight
        if total == before:
            return total


def _tau(x: float) -> float:
    """(1 - x - sum over k >= 1 of (1 - x**(2**-k))**2 * 2**-k) / 3; the same for full registers."""
    if x in (0.0, 1.0):
        return 0.0
    weight, total = 1.0, 1.0 - x
    while True:
        x = math.sqrt(x)
        before = total
        weight *= 0.5
        total -= (1.0 - x) ** 2 * weight
        if total == before:
            return total / 3.0


@njit(nogil=True, cache=True)
def _add_ids(ids: NDArray[np.int64], registers: NDArray[np.uint8]) -> None:
    for i in range(len(ids)):
        bits = mix(np.uint64(ids[i]) ^ _SEED)
        register = bits >> np.uint64(_OTHER_BITS)
        rest = bits << np.uint64(BITS)
        value = np.uint8(1)
        while value <= _OTHER_BITS and rest < np.uint64(2**63):
            value += np.uint8(1)
            rest <<= np.uint64(1)
        registers[register] = max(registers[register], value)
