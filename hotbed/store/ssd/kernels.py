"""Compiled code, all without the GIL: records to bytes and back with their checksum, and the index of places.

The checksum keeps 64 bits. Four lanes each take every fourth 64-bit word: lane = rotate((lane ^ word) * odd number). Every
step is a bijection of the lane and of the word, and so is joining the lanes: a change inside one word (any flipped bit or
byte) is always found, a larger one is missed once in 2^64. It needs no table and no special instruction (CRC32C does, and
Numba does not offer it), and takes 70 ns for 528 bytes on one core, where a single lane takes 120.

Index: one int64 word for each key: 0 for a key without a record, else 1 + place, where place = slot << 32 | record number in
the segment of that slot; bit 62 says that a newer record is on its way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotbed.host.intrinsics import copy_bytes, load_unsigned, prefetch, store_unsigned
from hotbed.host.jit import njit

EXPECTED = 1 << 62
_PLACE = EXPECTED - 1
_AHEAD = 24
BLOCK = 12  # keys are counted as touched in blocks of 2^12
_A, _B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_C, _D = np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0xA0761D6478BD642F)
_LEFT, _RIGHT = np.uint64(31), np.uint64(33)


@njit(nogil=True, cache=True, inline="always")
def _step(lane: Any, word: Any, odd: Any) -> Any:
    lane = (lane ^ word) * odd
    return (lane << _LEFT) | (lane >> _RIGHT)


@njit(nogil=True, cache=True)
def checksum(seed: Any, number: Any, record: Any, stride: Any) -> Any:
    """The checksum of the record at address `record`: of its key, payload and place in a segment."""
    a, b = _step(seed, np.uint64(number), _A), _step(seed, load_unsigned(record), _B)
    c, d = seed ^ _C, seed ^ _D
    at, stop = record + 16, record + stride
    while at + 32 <= stop:
        a = _step(a, load_unsigned(at), _A)
        b = _step(b, load_unsigned(at + 8), _B)
        c = _step(c, load_unsigned(at + 16), _C)
        d = _step(d, load_unsigned(at + 24), _D)
        at += 32
    while at < stop:
        a = _step(a, load_unsigned(at), _A)
        at += 8
    return _step(_step(_step(a, b, _B), c, _C), d, _D)


@njit(nogil=True, cache=True)
def encode(keys: Any, records: Any, first: Any, seed: Any, out: Any, stride: Any) -> None:
    """Encode the records [n, W] of keys [n], from record number `first` of a segment on, to the address `out`."""
    num_bytes = records.shape[1] * 4
    source = records.ctypes.data
    for i in range(keys.shape[0]):
        at = out + i * stride
        store_unsigned(at, np.uint64(keys[i]))
        store_unsigned(at + stride - 8, np.uint64(0))  # what rounding up adds
        copy_bytes(at + 16, source + i * num_bytes, num_bytes)
        store_unsigned(at + 8, checksum(seed, first + i, at, stride))


@njit(nogil=True, cache=True)
def decode_live(
    piece: Any, stride: Any, first: Any, stop: Any, seed: Any, live: Any, numbers: Any, keys: Any, records: Any
) -> Any:
    """Decode the live ones of records first..stop-1, at address `piece`: how many, or -1 - number of a damaged one."""
    num_bytes = records.shape[1] * 4
    out = records.ctypes.data
    count = 0
    for number in range(first, stop):
        if (live[number >> 6] >> np.uint64(number & 63)) & np.uint64(1) == 0:
            continue
        at = piece + (number - first) * stride
        if checksum(seed, number, at, stride) != load_unsigned(at + 8):
            return -1 - number
        numbers[count] = number
        keys[count] = np.int64(load_unsigned(at))
        copy_bytes(out + count * num_bytes, at + 16, num_bytes)
        count += 1
    return count


@njit(nogil=True, cache=True)
def find(words: Any, keys: Any, waits: Any, places: Any, found: Any, missing: Any) -> Any:
    """(number found, number missing); places and positions of the found, positions of the missing.

    Where `waits`, missing are those whose record is on its way; else those that have no record.
    """
    lines = words.reshape(-1, 1)
    num_found, num_missing = 0, 0
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(lines, keys[i + _AHEAD], 0)
        word = words[keys[i]]
        if waits and word & EXPECTED:
            missing[num_missing] = i
            num_missing += 1
        elif word & _PLACE:
            places[num_found] = (word & _PLACE) - 1
            found[num_found] = i
            num_found += 1
        elif not waits:
            missing[num_missing] = i
            num_missing += 1
    return num_found, num_missing


@njit(nogil=True, cache=True, inline="always")
def _die(word: Any, live_of_slot: Any, num_live: Any) -> None:
    """The record of this word is stale from now on."""
    place = (word & _PLACE) - 1
    slot, number = place >> 32, place & 0xFFFFFFFF
    at = live_of_slot[slot] + 8 * (number >> 6)
    store_unsigned(at, load_unsigned(at) & ~(np.uint64(1) << np.uint64(number & 63)))
    num_live[slot] -= 1


@njit(nogil=True, cache=True, inline="always")
def _live(place: Any, live_of_slot: Any, num_live: Any) -> None:
    slot, number = place >> 32, place & 0xFFFFFFFF
    at = live_of_slot[slot] + 8 * (number >> 6)
    store_unsigned(at, load_unsigned(at) | (np.uint64(1) << np.uint64(number & 63)))
    num_live[slot] += 1


@njit(nogil=True, cache=True)
def commit(words: Any, touched: Any, keys: Any, place: Any, live_of_slot: Any, num_live: Any) -> None:
    """The records of keys [n] are at place, place + 1, ... from now on."""
    lines = words.reshape(-1, 1)
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            prefetch(lines, keys[i + _AHEAD], 0)
        key = keys[i]
        if words[key] & _PLACE:
            _die(words[key], live_of_slot, num_live)
        words[key] = place + i + 1
        touched[key >> BLOCK] = 1
        _live(place + i, live_of_slot, num_live)


@njit(nogil=True, cache=True)
def relocate(words: Any, keys: Any, old: Any, numbers: Any, new: Any, live_of_slot: Any, num_live: Any) -> None:
    """Records old + numbers[i] were copied to new + i: update the index, except for those that became stale meanwhile."""
    for i in range(keys.size):
        word = words[keys[i]]
        if word & _PLACE == old + numbers[i] + 1:
            _die(word, live_of_slot, num_live)
            words[keys[i]] = (word & EXPECTED) | (new + i + 1)
            _live(new + i, live_of_slot, num_live)


@njit(nogil=True, cache=True)
def adopt(words: Any, touched: Any, keys: Any, place: Any, numbers: Any, live_of_slot: Any, num_live: Any) -> Any:
    """Records place + numbers[i] are those of keys [n]; -1, or the position of a key that had a record already."""
    for i in range(keys.size):
        if words[keys[i]] & _PLACE:
            return i
        words[keys[i]] = place + numbers[i] + 1
        touched[keys[i] >> BLOCK] = 1
        _live(place + numbers[i], live_of_slot, num_live)
    return -1


@njit(nogil=True, cache=True)
def forget(words: Any, keys: Any, live_of_slot: Any, num_live: Any) -> None:
    """Keys [n] have no record from now on."""
    for i in range(keys.size):
        if words[keys[i]] & _PLACE:
            _die(words[keys[i]], live_of_slot, num_live)
        words[keys[i]] = 0


@njit(nogil=True, cache=True)
def expect(words: Any, touched: Any, keys: Any) -> None:
    """A record of each of these keys is on its way."""
    for i in range(keys.size):
        words[keys[i]] |= EXPECTED
        touched[keys[i] >> BLOCK] = 1


@njit(nogil=True, cache=True)
def outside(keys: Any, num_rows: Any) -> Any:
    """The position of the first key that is not in 0..num_rows-1, or -1."""
    for i in range(keys.size):
        if keys[i] < 0 or keys[i] >= num_rows:
            return i
    return -1


@njit(nogil=True, cache=True)
def plan_runs(places: Any, stride: Any, header: Any, gap: Any, longest: Any, offsets: Any, runs: Any) -> Any:
    """Byte offsets of sorted places, and runs [_, 3] = (slot, first, stop) of records worth one read: how many runs."""
    num_runs = 0
    for i in range(places.size):
        slot = places[i] >> 32
        offsets[i] = header + (places[i] & 0xFFFFFFFF) * stride
        joins = False
        if num_runs > 0 and runs[num_runs - 1, 0] == slot:
            first = runs[num_runs - 1, 1]
            near = offsets[i] <= offsets[i - 1] + stride + gap
            joins = near and offsets[i] + stride - offsets[first] <= longest
        if not joins:
            runs[num_runs, 0], runs[num_runs, 1] = slot, i
            num_runs += 1
        runs[num_runs - 1, 2] = i + 1
    return num_runs
