"""Bags to parts on the CPU, compiled: one pass counts, one writes."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotbed.host.jit import njit


@njit(nogil=True, cache=True)
def _owners(counts: Any) -> Any:
    """The owner of every distinct key, [U]."""
    owners = np.empty(counts.sum(), np.int32)
    place = 0
    for owner in range(counts.size):
        for _ in range(counts[owner]):
            owners[place] = owner
            place += 1
    return owners


@njit(nogil=True, cache=True)
def count_ways(places: Any, starts: Any, table_of_bag: Any, counts: Any, rank: int, num_tables: int) -> Any:
    """[3, T]: distinct keys, lookups and parts of every table, as far as others own them."""
    owners, found = _owners(counts), np.zeros((3, num_tables), np.int64)
    seen, bag_of_owner = np.zeros(owners.size, np.uint8), np.full(counts.size, -1, np.int64)
    for n in range(starts.size - 1):
        table = table_of_bag[n]
        if table < 0:
            continue
        for i in range(starts[n], starts[n + 1]):
            place = places[i]
            if place < 0 or owners[place] == rank:
                continue
            if not seen[place]:
                seen[place] = 1
                found[0, table] += 1
            found[1, table] += 1
            if bag_of_owner[owners[place]] != n:
                bag_of_owner[owners[place]] = n
                found[2, table] += 1
    return found


@njit(nogil=True, cache=True)
def _count(places: Any, starts: Any, in_parts: Any, owners: Any, world: int) -> Any:
    """(whether each distinct key is asked for as a row [U], keys and vectors of each owner [W], lookups that are left)."""
    by_row, bag_of_owner = np.zeros(owners.size, np.uint8), np.full(world, -1, np.int64)
    num_keys, num_vectors, num_left = np.zeros(world, np.int64), np.zeros(world, np.int64), 0
    for n in range(starts.size - 1):
        if not in_parts[n]:
            num_left += starts[n + 1] - starts[n]
        for i in range(starts[n], starts[n + 1]):
            place = places[i]
            if place < 0:
                continue
            owner = owners[place]
            if in_parts[n]:
                num_keys[owner] += 1
                if bag_of_owner[owner] != n:
                    bag_of_owner[owner] = n
                    num_vectors[owner] += 1
                    num_left += 1
            elif not by_row[place]:
                by_row[place] = 1
                num_keys[owner] += 1
                num_vectors[owner] += 1
    return by_row, num_keys, num_vectors, num_left


@njit(nogil=True, cache=True)
def split(places: Any, starts: Any, in_parts: Any, keys: Any, counts: Any) -> Any:
    """(keys by owner, how many for each, vectors of each, slots and sources of the lookups that are left, their starts)."""
    owners = _owners(counts)
    by_row, num_keys, num_vectors, num_left = _count(places, starts, in_parts, owners, counts.size)
    key_at, vector_at = np.cumsum(num_keys) - num_keys, np.cumsum(num_vectors) - num_vectors  # next of each owner
    out, vector_of_place = np.empty(num_keys.sum(), np.int64), np.full(owners.size, -1, np.int64)
    for place in range(owners.size):
        if by_row[place]:
            owner = owners[place]
            out[key_at[owner]], vector_of_place[place] = keys[place], vector_at[owner]
            key_at[owner] += 1
            vector_at[owner] += 1
    slots, source, new_starts = np.empty(num_left, np.int64), np.empty(num_left, np.int64), np.empty_like(starts)
    bag_of_owner, left = np.full(counts.size, -1, np.int64), 0
    for n in range(starts.size - 1):
        new_starts[n] = left
        for i in range(starts[n], starts[n + 1]):
            place = places[i]
            if not in_parts[n]:
                slots[left], source[left] = vector_of_place[place] if place >= 0 else -1, i
                left += 1
            elif place >= 0:
                owner = owners[place]
                out[key_at[owner]] = ~keys[place]
                if bag_of_owner[owner] != n:
                    bag_of_owner[owner] = n
                    out[key_at[owner]] = keys[place]
                    slots[left], source[left] = vector_at[owner], i
                    vector_at[owner] += 1
                    left += 1
                key_at[owner] += 1
    new_starts[-1] = left
    return out, num_keys, num_vectors, slots, source, new_starts
