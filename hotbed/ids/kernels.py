"""The index in Numba: find, insert, remove and grow, for whole batches, without the GIL.

An id that is not in a processor cache costs two waits for memory: for its bucket and for its row's owner. Both are prefetched
some ids ahead, so the waits of a dozen ids overlap. The speed of these functions comes from that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotbed.host.intrinsics import fence, load_acquire, prefetch, store_release
from hotbed.host.jit import njit
from hotbed.ids.cells import (
    CELLS,
    GONE,
    ONE,
    PASSED,
    SHARED,
    bucket_of,
    has_passed,
    hash_of,
    id_of_owner,
    is_live,
    lowest,
    matches,
    owns,
    put,
    shard_of,
    tag_of,
    without_lowest,
)

DONE = -1  # result of insert and remove: all ids are in place
CONFLICT = -2  # the id at this position is present (insert) or absent (remove), or its row is in use

FAULTS = (  # what `walk` can find
    "a cell has a tag that its id does not have",
    "a cell stands in a shard that its id does not belong to",
    "a cell names a row that does not belong to one id",
    "two cells name the same row",
    "an id is behind a bucket that counts no displaced ids",
)

_RING = 32  # ids between the prefetch of the bucket and the comparison
_HALF_RING = 16  # ids between the prefetch of the owner and the comparison
_MASK = np.uint64(_RING - 1)


@njit(nogil=True, cache=True)
def begin_change(version: Any) -> None:
    """The version is odd from now on, also where a change before was left half way."""
    store_release(version.ctypes.data, (load_acquire(version.ctypes.data) + 1) | 1)
    fence()


@njit(nogil=True, cache=True)
def end_change(version: Any) -> None:
    """The version is even again, and another one."""
    store_release(version.ctypes.data, (load_acquire(version.ctypes.data) + 1) & -2)


@njit(nogil=True, cache=True, inline="always")
def _search(
    words: Any, numbers: Any, owners: Any, first: Any, num_buckets: Any, hash_: Any, table: Any, id_: Any
) -> Any:
    """(bucket, cell) of an id, or (0, CELLS)."""
    tag = tag_of(hash_)
    bucket = np.uint64(first) + bucket_of(hash_, num_buckets)
    for _ in range(num_buckets):
        near, far = matches(words, bucket, tag)
        while near or far:  # ends: one match less every time
            cell = lowest(near, far)
            if owns(owners, np.uint64(numbers[bucket, np.uint64(4) + cell]), table, id_):
                return bucket, cell
            near, far = without_lowest(near, far)
        if not has_passed(words, bucket):
            break
        bucket += ONE
        if bucket == np.uint64(first) + np.uint64(num_buckets):
            bucket = np.uint64(first)
    return np.uint64(0), np.uint64(CELLS)


@njit(nogil=True, cache=True)
def find(
    thread: int, num_threads: int, words: Any, numbers: Any, owners: Any, shards: Any, tables: Any, ids: Any, rows: Any
) -> None:
    """rows[i] = row of (tables[i], ids[i]), or -1; shards [S, 2] are first bucket and number of buckets."""
    hashes, homes = np.empty(_RING, dtype=np.uint64), np.empty(_RING, dtype=np.uint64)
    start, stop = ids.shape[0] * thread // num_threads, ids.shape[0] * (thread + 1) // num_threads
    for i in range(start, stop + _RING):
        if i < stop:
            hash_ = hash_of(tables[i], ids[i])
            shard = shard_of(hash_)
            home = np.uint64(shards[shard, 0]) + bucket_of(hash_, shards[shard, 1])
            prefetch(words, home, 0)
        old = i - _HALF_RING
        if start <= old < stop:
            place = np.uint64(old) & _MASK
            near, far = matches(words, homes[place], tag_of(hashes[place]))
            if near or far:
                prefetch(owners, numbers[homes[place], np.uint64(4) + lowest(near, far)], 0)
        last = i - _RING
        if last >= start:
            place = np.uint64(last) & _MASK
            shard = shard_of(hashes[place])
            bucket, cell = _search(
                words, numbers, owners, shards[shard, 0], shards[shard, 1], hashes[place], tables[last], ids[last]
            )
            rows[last] = -1 if cell == np.uint64(CELLS) else np.int64(numbers[bucket, np.uint64(4) + cell])
        if i < stop:
            place = np.uint64(i) & _MASK
            hashes[place], homes[place] = hash_, home


@njit(nogil=True, cache=True)
def insert(
    words: Any,
    numbers: Any,
    owners: Any,
    shards: Any,
    counts: Any,
    limits: Any,
    tables: Any,
    ids: Any,
    rows: Any,
    start: int,
) -> Any:
    """Insert from position `start` on; (position, DONE), or where it stopped and the shard that must grow, or CONFLICT."""
    for i in range(start, min(start + _RING, ids.shape[0])):
        _ask(words, shards, tables[i], ids[i])
    for i in range(start, ids.shape[0]):
        if i + _RING < ids.shape[0]:
            _ask(words, shards, tables[i + _RING], ids[i + _RING])
            prefetch(owners, rows[i + _RING], 0)
        table, id_, row = tables[i], ids[i], np.uint64(rows[i])
        hash_ = hash_of(table, id_)
        shard = shard_of(hash_)
        if counts[shard] >= limits[shard]:
            return i, np.int64(shard)
        first, num_buckets = shards[shard, 0], shards[shard, 1]
        _, cell = _search(words, numbers, owners, first, num_buckets, hash_, table, id_)
        if cell != np.uint64(CELLS) or is_live(owners[row, 2]):
            return i, CONFLICT
        put(words, numbers, first, num_buckets, hash_, row)
        counts[shard] += 1
        bits = np.uint64(id_)
        owners[row, 0], owners[row, 1] = np.uint32(bits & np.uint64(0xFFFFFFFF)), np.uint32(bits >> np.uint64(32))
        owners[row, 2] = np.uint32(table) + np.uint32(1)
    return ids.shape[0], DONE


@njit(nogil=True, cache=True, inline="always")
def _ask(words: Any, shards: Any, table: Any, id_: Any) -> None:
    hash_ = hash_of(table, id_)
    shard = shard_of(hash_)
    prefetch(words, np.uint64(shards[shard, 0]) + bucket_of(hash_, shards[shard, 1]), 0)


@njit(nogil=True, cache=True)
def remove(
    words: Any, numbers: Any, owners: Any, shards: Any, counts: Any, tables: Any, ids: Any, rows: Any, start: int
) -> Any:
    """Remove ids and report their rows; (position, DONE), or (position, CONFLICT) at an id that is absent."""
    for i in range(start, ids.shape[0]):
        if i + _RING < ids.shape[0]:
            _ask(words, shards, tables[i + _RING], ids[i + _RING])
        hash_ = hash_of(tables[i], ids[i])
        shard = shard_of(hash_)
        first, num_buckets = np.uint64(shards[shard, 0]), np.uint64(shards[shard, 1])
        bucket, cell = _search(words, numbers, owners, first, num_buckets, hash_, tables[i], ids[i])
        if cell == np.uint64(CELLS):
            return i, CONFLICT
        row = np.uint64(numbers[bucket, np.uint64(4) + cell])
        words[bucket, cell >> np.uint64(3)] &= ~(np.uint64(0xFF) << ((cell & np.uint64(7)) << np.uint64(3)))
        passed = first + bucket_of(hash_, num_buckets)
        while passed != bucket:  # ends: it passes every bucket of the shard
            words[passed, 1] -= PASSED
            passed += ONE
            if passed == first + num_buckets:
                passed = first
        counts[shard] -= 1
        owners[row, 2] |= np.uint32(GONE)
        rows[i] = np.int64(row)
    return ids.shape[0], DONE


@njit(nogil=True, cache=True)
def rows_of_shard(words: Any, numbers: Any, first: int, num_buckets: int, rows: Any) -> int:
    """All rows of a shard in bucket order, and how many."""
    found = 0
    for bucket in range(first, first + num_buckets):
        for cell in range(CELLS):
            if (words[bucket, cell >> 3] >> np.uint64(8 * (cell & 7))) & np.uint64(0xFF):
                rows[found] = numbers[bucket, 4 + cell]
                found += 1
    return found


@njit(nogil=True, cache=True)
def spread(words: Any, numbers: Any, owners: Any, first: int, num_buckets: int, rows: Any) -> None:
    """Empty a shard and place these rows in it. In bucket order they fall from front to back."""
    for bucket in range(first, first + num_buckets):
        for word in range(8):
            words[bucket, word] = 0
    for i in range(rows.shape[0]):
        if i + _RING < rows.shape[0]:
            prefetch(owners, rows[i + _RING], 0)
        row = np.uint64(rows[i])
        put(words, numbers, first, num_buckets, hash_of(owners[row, 2] - np.uint32(1), id_of_owner(owners, row)), row)


@njit(nogil=True, cache=True)
def live_rows(owners: Any, start: int, stop: int, shared: Any, out: Any) -> int:
    """Rows of start..stop-1 that belong to an id, into `out`; how many. With `shared`, shared rows too."""
    count = 0
    for row in range(start, stop):
        if is_live(owners[row, 2]) and (shared or owners[row, 2] < np.uint32(SHARED)):
            out[count] = row
            count += 1
    return count


@njit(nogil=True, cache=True)
def walk(
    words: Any, numbers: Any, owners: Any, shard: int, first: int, num_buckets: int, seen: Any, passed: Any
) -> Any:
    """(cells in use, number of the fault (of FAULTS) or -1, its bucket); `seen` marks rows, `passed` counts displaced ids."""
    count = 0
    for bucket in range(num_buckets):
        for cell in range(CELLS):
            tag = (words[first + bucket, cell >> 3] >> np.uint64(8 * (cell & 7))) & np.uint64(0xFF)
            if tag == np.uint64(0):
                continue
            count += 1
            row = np.int64(numbers[first + bucket, 4 + cell])
            if row >= seen.shape[0] or owners[row, 2] == 0 or owners[row, 2] >= np.uint32(GONE):
                return count, 2, bucket
            hash_ = hash_of(owners[row, 2] - np.uint32(1), id_of_owner(owners, row))
            if tag_of(hash_) != tag:
                return count, 0, bucket
            if shard_of(hash_) != np.uint64(shard):
                return count, 1, bucket
            if seen[row]:
                return count, 3, bucket
            seen[row] = 1
            home = np.int64(bucket_of(hash_, num_buckets))
            while home != bucket:  # ends: it passes every bucket of the shard
                if (words[first + home, 1] >> np.uint64(32)) == np.uint64(0):
                    return count, 4, bucket
                passed[home] += 1
                home = (home + 1) % num_buckets
    return count, -1, 0
