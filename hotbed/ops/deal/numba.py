"""Distinct keys by owner on the CPU, compiled: one pass through a hash table, one that sorts by owner."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S29 = np.uint64(29)


@njit(nogil=True, cache=True)
def deal(keys: Any, owners: Any, world: int, kinds: Any) -> Any:
    """(distinct keys by owner, their kinds, how often each comes, how many each owner has, the place of every look-up's).

    Keys of one owner keep the order in which they first come.
    """
    size = 16
    while size < 2 * keys.size:
        size *= 2
    shift = np.uint64(64)
    width = size
    while width > 1:
        shift -= np.uint64(1)
        width //= 2
    numbers = np.full(size, -1, np.int32)
    found, owner = np.empty(keys.size, np.int64), np.empty(keys.size, np.int32)
    kind, times = np.empty(keys.size, np.int32), np.zeros(keys.size, np.int32)
    places = np.empty(keys.size, np.int64)
    counts = np.zeros(world, np.int64)
    num_found = 0
    for i in range(keys.size):
        key = keys[i]
        if owners[i] < 0:
            places[i] = -1
            continue
        x = np.uint64(key)
        cell = np.int64(((x ^ (x >> _S29) ^ np.uint64(kinds[i])) * _GOLDEN) >> shift)
        while numbers[cell] >= 0 and (found[numbers[cell]] != key or kind[numbers[cell]] != kinds[i]):
            cell = (cell + 1) & (size - 1)
        if numbers[cell] < 0:
            numbers[cell] = num_found
            found[num_found], kind[num_found], owner[num_found] = key, kinds[i], owners[i]
            counts[owners[i]] += 1
            num_found += 1
        places[i] = numbers[cell]
        times[numbers[cell]] += 1
    starts = np.cumsum(counts) - counts
    by_owner, place_of = np.empty(num_found, np.int64), np.empty(num_found, np.int64)
    kinds_by_owner, times_by_owner = np.empty(num_found, np.int32), np.empty(num_found, np.int32)
    for n in range(num_found):
        place = starts[owner[n]]
        starts[owner[n]] += 1
        by_owner[place], place_of[n] = found[n], place
        kinds_by_owner[place], times_by_owner[place] = kind[n], times[n]
    for i in range(keys.size):
        if places[i] >= 0:
            places[i] = place_of[places[i]]
    return by_owner, kinds_by_owner, times_by_owner, counts, places
