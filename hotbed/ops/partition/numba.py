"""Distinct keys by owner on the CPU, compiled: one pass through a hash table, one that sorts by owner."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotbed.host.intrinsics import prefetch
from hotbed.host.jit import njit
from hotbed.host.splitmix import GOLDEN

_S29 = np.uint64(29)
_AHEAD = 16  # lookups between asking for a cell and reading it


@njit(nogil=True, cache=True, inline="always")
def _cell(key: Any, kind: Any, shift: Any) -> Any:
    x = np.uint64(key)
    return np.int64(((x ^ (x >> _S29) ^ np.uint64(kind)) * GOLDEN) >> shift)


@njit(nogil=True, cache=True)
def distinct(keys: Any, slots: Any, kinds: Any) -> Any:
    """(keys, kinds and times of U distinct keys, in the order in which they first come; the number of every lookup's).

    slots is empty where there is no padding, kinds where all keys are of one.
    """
    size, bits = 16, 4
    while size < 2 * keys.size:
        size *= 2
        bits += 1
    shift = np.uint64(64 - bits)
    has_kinds, has_padding = kinds.size > 0, slots.size > 0
    cells = np.full((size, 1), -1, np.int32)
    found, times = np.empty(keys.size, np.int64), np.empty(keys.size, np.int32)
    kind_of = np.empty(keys.size if has_kinds else 0, np.int32)
    numbers = np.empty(keys.size, np.int64)
    num_found = 0
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            ahead = i + _AHEAD
            prefetch(cells, _cell(keys[ahead], kinds[ahead] if has_kinds else 0, shift), 0)
        if has_padding and slots[i] < 0:
            numbers[i] = -1
            continue
        key = keys[i]
        kind = kinds[i] if has_kinds else np.int32(0)
        cell = _cell(key, kind, shift)
        while True:  # ends: half of the cells are free
            number = cells[cell, 0]
            if number < 0 or (found[number] == key and (not has_kinds or kind_of[number] == kind)):
                break
            cell = (cell + 1) & (size - 1)
        if number < 0:
            number = num_found
            cells[cell, 0] = number
            found[number], times[number] = key, 0
            if has_kinds:
                kind_of[number] = kind
            num_found += 1
        numbers[i] = number
        times[number] += 1
    return found[:num_found], kind_of[:num_found], times[:num_found], numbers


@njit(nogil=True, cache=True)
def by_owner(found: Any, kinds: Any, times: Any, owners: Any, numbers: Any, world: int) -> Any:
    """(keys, kinds and times sorted by owner, how many each owner has); numbers become places among them.

    Keys of one owner keep their order.
    """
    counts = np.zeros(world, np.int64)
    for n in range(found.size):
        counts[owners[n]] += 1
    starts = np.cumsum(counts) - counts
    keys_by_owner, times_by_owner = np.empty_like(found), np.empty_like(times)
    kinds_by_owner, place_of = np.empty_like(kinds), np.empty(found.size, np.int64)
    for n in range(found.size):
        place = starts[owners[n]]
        starts[owners[n]] += 1
        keys_by_owner[place], times_by_owner[place], place_of[n] = found[n], times[n], place
        if kinds.size > 0:
            kinds_by_owner[place] = kinds[n]
    for i in range(numbers.size):
        if numbers[i] >= 0:
            numbers[i] = place_of[numbers[i]]
    return keys_by_owner, kinds_by_owner, times_by_owner, counts
