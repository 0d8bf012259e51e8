"""64-bit ids in, row numbers out, for vocabularies and dynamic ids: in memory, or in a file where memory is short.

In memory: an open-addressing index, 14 to 20 bytes an id. In a file: sorted blocks of 256 ids with their numbers. Memory then
holds the first id of every block and a cache of requested ids, so an id outside the cache costs one read of 3 KiB. Ids are
given in the order of their numbers, most frequent first for a vocabulary, and the cache starts with the first ones.

Ids that come later get the next numbers while others search (`add`); a number is never taken back. Which of them have a row is
up to the version that a reader uses (versions.py), so a map needs no versions of its own.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError
from hotbed.host.intrinsics import fence, read_fully
from hotbed.host.jit import njit
from hotbed.host.splitmix import mix
from hotbed.scorer.kernels import WAYS, set_of
from hotbed.scorer.scratch import scratch_file, write_all

Ints = NDArray[np.int64]
BLOCK = 256
_BLOCK_BYTES = 12 * BLOCK
_NEVER = -2  # the number of a slot without an id
_SET_BYTES = WAYS * (8 + 4) + 1  # ids, numbers, the next way


class IdMap(Protocol):
    """Row number of every known id."""

    @property
    def num_ids(self) -> int:
        """Numbers given so far."""

    @property
    def num_bytes(self) -> int:
        """Memory."""

    def find(self, ids: Ints) -> Ints:
        """The numbers of ids [n]; -1 for unknown ones."""

    def add(self, ids: Ints) -> Ints:
        """The numbers of ids [n], distinct; unknown ones get the next numbers. One caller at a time."""

    def close(self) -> None:
        """Close files."""


def bytes_in_memory(num_ids: int) -> int:
    """The size of a map that is entirely in memory."""
    return 8 * num_ids + 4 * _num_slots(num_ids)


def bytes_in_file(num_ids: int, memory: int) -> int:
    """The size of a map whose ids are in a file, with `memory` bytes if that holds a cache, else the least that does."""
    return _fixed_bytes(num_ids) + _SET_BYTES * _num_sets(num_ids, memory)


class MemoryIds:
    """All in memory."""

    def __init__(self, ids: Ints) -> None:
        self.num_ids = len(ids)
        slots = np.full(_num_slots(len(ids)), -1, dtype=np.int32)
        _index(ids, 0, len(ids), slots)
        self._arrays = ids, slots  # replaced together: no slot names a number that the ids have no room for

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for one in self._arrays)

    def find(self, ids: Ints) -> Ints:
        numbers = np.empty(len(ids), dtype=np.int64)
        _find(ids, *self._arrays, numbers)
        return numbers

    def add(self, ids: Ints) -> Ints:
        numbers = self.find(ids)
        new = ids[numbers < 0]
        first, stop = self.num_ids, self.num_ids + len(new)
        numbers[numbers < 0] = np.arange(first, stop)
        known, slots = self._arrays
        if stop > len(known) or _num_slots(stop) > len(slots):
            known = np.concatenate([known[:first], np.empty(len(new) + stop // 8, dtype=np.int64)])
            slots = np.full(_num_slots(len(known)), -1, dtype=np.int32)
            known[first:stop] = new
            _index(known, 0, stop, slots)
        else:
            known[first:stop] = new
            _index(known, first, stop, slots)
        self._arrays, self.num_ids = (known, slots), stop
        return numbers

    def close(self) -> None:
        """There is no file."""


class FileIds:
    """Sorted in a file, with a cache of `memory` bytes for requested ids."""

    def __init__(self, ids: Ints, memory: int, scratch: Path) -> None:
        order = np.argsort(ids, kind="stable")
        self._fences = np.ascontiguousarray(ids[order[::BLOCK]])
        self._file = scratch_file(scratch, self)
        self._num_in_file = len(ids)
        self._later = MemoryIds(np.empty(0, dtype=np.int64))  # than those in the file
        for start in range(0, len(ids), BLOCK << 8):
            write_all(self._file, _blocks(ids, order[start : start + (BLOCK << 8)]))
        num_sets = _num_sets(len(ids), memory)
        self._keys = np.zeros((num_sets, WAYS), dtype=np.int64)
        self._numbers = np.full((num_sets, WAYS), _NEVER, dtype=np.int32)
        self._turns = np.zeros(num_sets, dtype=np.uint8)
        self._lock = threading.Lock()
        self._block = np.empty(_BLOCK_BYTES, dtype=np.uint8)
        hot = ids[: num_sets * WAYS // 2]
        _prefill(hot, self._keys, self._numbers, self._turns)

    @property
    def num_ids(self) -> int:
        return self._num_in_file + self._later.num_ids

    @property
    def num_bytes(self) -> int:
        held = (self._fences, self._keys, self._numbers, self._turns)
        return sum(one.nbytes for one in held) + self._later.num_bytes

    def find(self, ids: Ints) -> Ints:
        numbers = np.empty(len(ids), dtype=np.int64)
        with self._lock:
            fault = _find_in_file(
                ids,
                numbers,
                (self._keys, self._numbers, self._turns),
                (self._fences, self._block, self._file.fileno(), self._num_in_file),
            )
        if fault:
            raise StoreError(f"the ids that memory has no room for cannot be read back: {os.strerror(max(fault, 0))}.")
        if self._later.num_ids:
            absent = np.flatnonzero(numbers < 0)
            later = self._later.find(ids[absent])
            numbers[absent] = np.where(later < 0, -1, later + self._num_in_file)
        return numbers

    def add(self, ids: Ints) -> Ints:
        numbers = self.find(ids)
        numbers[numbers < 0] = self._later.add(ids[numbers < 0]) + self._num_in_file
        return numbers

    def close(self) -> None:
        self._file.close()


def _num_slots(num_ids: int) -> int:
    """A power of two, at least 1.5 times the number of ids."""
    return 1 << max(3, (num_ids + num_ids // 2).bit_length())


def _num_sets(num_ids: int, memory: int) -> int:
    """Sets of the cache of ids that are in a file."""
    return max(1, (memory - _fixed_bytes(num_ids)) // _SET_BYTES)


def _fixed_bytes(num_ids: int) -> int:
    """The first ids of blocks, and the map of ids that come later."""
    return 8 * -(-num_ids // BLOCK) + bytes_in_memory(0)


def _blocks(ids: Ints, order: Ints) -> bytes:
    """Ids and numbers, block after block, the last one filled up with its last id."""
    missing = -len(order) % BLOCK
    order = np.concatenate([order, np.repeat(order[-1:], missing)])
    content = np.empty((len(order) // BLOCK, _BLOCK_BYTES), dtype=np.uint8)
    content[:, : 8 * BLOCK] = ids[order].view(np.uint8).reshape(-1, 8 * BLOCK)
    content[:, 8 * BLOCK :] = order.astype(np.int32).view(np.uint8).reshape(-1, 4 * BLOCK)
    return content.tobytes()


@njit(nogil=True, cache=True)
def _index(ids: Any, first: Any, stop: Any, number_of_slot: Any) -> None:
    """Others may search meanwhile: a slot is filled after its id, and its number is part of the address of that id."""
    mask = number_of_slot.shape[0] - 1
    fence()
    for number in range(first, stop):
        slot = np.int64(mix(np.uint64(ids[number])) & np.uint64(mask))
        while number_of_slot[slot] >= 0:  # ends: a third of the slots is free
            slot = (slot + 1) & mask
        number_of_slot[slot] = number


@njit(nogil=True, cache=True)
def _find(wanted: Any, ids: Any, number_of_slot: Any, numbers: Any) -> None:
    mask = number_of_slot.shape[0] - 1
    for i in range(wanted.shape[0]):
        slot = np.int64(mix(np.uint64(wanted[i])) & np.uint64(mask))
        number = np.int64(number_of_slot[slot])
        while number >= 0 and ids[number] != wanted[i]:  # ends: a third of the slots is free
            slot = (slot + 1) & mask
            number = np.int64(number_of_slot[slot])
        numbers[i] = number


@njit(nogil=True, cache=True)
def _remember(id_: Any, number: Any, keys: Any, numbers: Any, turns: Any) -> None:
    """Put an id into the next slot of its set, round robin."""
    s = set_of(id_, keys.shape[0])
    way = np.int64(turns[s])
    turns[s] = np.uint8((way + 1) % WAYS)
    keys[s, way], numbers[s, way] = id_, number


@njit(nogil=True, cache=True)
def _prefill(ids: Any, keys: Any, numbers: Any, turns: Any) -> None:
    for number in range(ids.shape[0] - 1, -1, -1):  # the most frequent last: they stay where a set is full
        _remember(ids[number], number, keys, numbers, turns)


@njit(nogil=True, cache=True)
def _find_in_file(wanted: Any, found: Any, cache: Any, file: Any) -> Any:
    """0, or a fault."""
    keys, numbers, turns = cache
    fences, block, handle, num_ids = file
    for i in range(wanted.shape[0]):
        id_ = wanted[i]
        s, known = set_of(id_, keys.shape[0]), False
        for way in range(WAYS):
            if keys[s, way] == id_ and numbers[s, way] != _NEVER:
                found[i], known = np.int64(numbers[s, way]), True
                break
        if known:
            continue
        number: Any = -1
        at = np.searchsorted(fences, id_, side="right") - 1
        if at >= 0:
            fault = read_fully(handle, block.ctypes.data, _BLOCK_BYTES, at * _BLOCK_BYTES)
            if fault != 0:
                return fault
            ids = block[: 8 * BLOCK].view(np.int64)
            size = min(BLOCK, num_ids - at * BLOCK)
            place = np.searchsorted(ids[:size], id_)
            if place < size and ids[place] == id_:
                number = np.int64(block[8 * BLOCK :].view(np.int32)[place])
        found[i] = number
        _remember(id_, number, keys, numbers, turns)
    return 0
