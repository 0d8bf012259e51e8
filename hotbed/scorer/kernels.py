"""Compiled: keys in, rows out, from a bounded cache, else from files; all of it without the GIL.

A row is searched for in the cache, then among changes that are not in place yet (`Overlay`), then in the table's scratch file
if it is marked, then in the file of the model. If none has it, the caller fills in its initial value.

The cache consists of sets of 8 slots; a key maps to one set. A slot counts its uses, up to 15, and every row that enters the
set lowers the counts of the others, so frequently used rows stay. Each slot records the epoch in which it was last known to be
current: while changes are pending, a slot of an earlier epoch is checked against them first.

A lookup has three steps: `find` searches the cache, `read_missing` reads the other rows, `keep` adds them to the cache. The
first and the last change the cache and run under a lock; reading takes longest and runs in parallel. A row in the page cache
is read at once (`RWF_NOWAIT`). For all others the kernel is asked to prefetch the page, so that the disk works on the whole
batch at once, and they are read at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.hash import mix
from hotbed.errors import StoreError
from hotbed.host.intrinsics import copy_bytes, posix_fadvise, preadv2, prefetch, read_fully
from hotbed.host.jit import njit
from hotbed.ops.precision import BF16, FP16
from hotbed.ops.precision.numba import widen

WAYS = 8  # slots of a set; their keys are one cache line
GUEST = 1 << 62  # keys from here on have no row anywhere: the caller fills them in
EMPTY = -1
ABSENT, FP32_FILE, FP16_FILE, BF16_FILE, INT8_FILE = range(5)
_MOST_USES = 15
_AHEAD = 12
_NOWAIT, _WILLNEED = 8, 3
HITS, READ, CHANGED, FIRST, FAULT, FAULT_KEY = range(6)
NUM_COUNTS = 6
LATE, NOWHERE, AGAIN = 1, 2, 3


class RowCache(NamedTuple):
    """S sets of 8 slots; slot = 8 * set + way."""

    keys: NDArray[np.int64]  # [S, 8]
    uses: NDArray[np.uint8]  # [S, 8]
    epochs: NDArray[np.uint8]  # [S, 8]
    rows: NDArray[np.float32]  # [8 S, D]


class RowFiles(NamedTuple):
    """The files of T tables. Key = starts[t] + row of table t."""

    starts: NDArray[np.int64]  # [T + 1]
    models: NDArray[np.int64]  # [T, 5]: handle, kind, offset of weights, offset of scales (int8), rows
    scratch: NDArray[np.int64]  # [T]: handle of a file of float32 rows; -1: none
    mark_starts: NDArray[np.int64]  # [T]: where the marks of a table begin
    sure: NDArray[np.int64]  # [T]: rows from this number on are always in the scratch file
    maps: NDArray[np.int64]  # [T, 3]: addresses of the mapped model file, scratch file and shared file; 0: not mapped
    marks: NDArray[np.uint8]  # one bit a row: it is in the scratch file, or in the shared one
    shared: NDArray[np.int64]  # [T]: handle of a scratch file that other processes read, never written; -1: none
    own: NDArray[np.uint8]  # one bit a row: it is in the scratch file; empty if no file is shared


class Overlay(NamedTuple):
    """Changes that are not in place yet: an open-addressing index, and rows in a separate file."""

    keys: NDArray[np.int64]  # [power of two], or empty
    places: NDArray[np.int32]
    handle: int
    epoch: int


class FetchBuffers(NamedTuple):
    """Memory of one call."""

    vector: NDArray[np.int64]  # [2]: an iovec
    raw: NDArray[np.uint8]  # a row as a file has it
    missing: NDArray[np.int64]  # [L]
    late: NDArray[np.int64]  # [L]
    first: NDArray[np.int64]  # [L]
    same: NDArray[np.int64]  # [L]: for a repeated key, the position of its first occurrence
    status: NDArray[np.uint8]  # [L]: 0 if it was read, else AGAIN or NOWHERE
    counts: NDArray[np.int64]  # [NUM_COUNTS]


@njit(nogil=True, cache=True, inline="always")
def set_of(key: Any, num_sets: Any) -> Any:
    """The set of a key, for any number of sets below 2^31."""
    return np.int64(((mix(np.uint64(key)) >> np.uint64(32)) * np.uint64(num_sets)) >> np.uint64(32))


@njit(nogil=True, cache=True)
def table_of(key: Any, starts: Any) -> Any:
    low, high = 0, starts.shape[0] - 1
    while high - low > 1:  # ends: the span is halved every time
        middle = (low + high) // 2
        if starts[middle] <= key:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def is_marked(files: Any, table: Any, row: Any) -> Any:
    if row >= files.sure[table]:
        return True
    if files.scratch[table] < 0 and files.shared[table] < 0:
        return False
    bit = files.mark_starts[table] + row
    return (files.marks[bit >> 3] >> np.uint8(bit & 7)) & np.uint8(1) == np.uint8(1)


@njit(nogil=True, cache=True)
def scratch_of(files: Any, table: Any, row: Any) -> Any:
    """The handle and the address of the file of a marked row."""
    if files.shared[table] < 0:
        return files.scratch[table], files.maps[table, 1]
    if row < files.sure[table]:
        bit = files.mark_starts[table] + row
        if (files.own[bit >> 3] >> np.uint8(bit & 7)) & np.uint8(1) == np.uint8(1):
            return files.scratch[table], files.maps[table, 1]
    return files.shared[table], files.maps[table, 2]


@njit(nogil=True, cache=True)
def find_change(overlay: Any, key: Any) -> Any:
    """The place of a changed row in its file, or -1."""
    size = overlay.keys.shape[0]
    if size == 0:
        return -1
    at = np.int64(mix(np.uint64(key)) & np.uint64(size - 1))
    for _ in range(size):
        if overlay.keys[at] == key:
            return np.int64(overlay.places[at])
        if overlay.keys[at] == EMPTY:
            return -1
        at = (at + 1) & (size - 1)
    return -1


@njit(nogil=True, cache=True)
def add_changes(keys: Any, first: Any, table_keys: Any, places: Any) -> Any:
    """Key n maps to row first + n from now on, even if it mapped to another; returns the number of new keys."""
    mask, added = table_keys.shape[0] - 1, 0
    for n in range(keys.shape[0]):
        at = np.int64(mix(np.uint64(keys[n])) & np.uint64(mask))
        looked = 0
        while table_keys[at] != keys[n] and table_keys[at] != EMPTY:  # ends: looks are counted
            at = (at + 1) & mask
            looked += 1
            if looked > mask:
                raise StoreError("there are more changed rows than were announced; load the model again")
        if table_keys[at] == EMPTY:
            table_keys[at] = keys[n]
            added += 1
        places[at] = first + n
    return added


@njit(nogil=True, cache=True)
def _read_now(handle: Any, to: Any, size: Any, offset: Any, vector: Any) -> Any:
    """True if the page cache had all of it; else the page is being prefetched."""
    vector[0], vector[1] = to, size
    if preadv2(np.int32(handle), vector.ctypes.data, np.int32(1), offset, np.int32(_NOWAIT)) == size:
        return True
    posix_fadvise(np.int32(handle), offset, size, np.int32(_WILLNEED))
    return False


@njit(nogil=True, cache=True)
def _widen_row(raw: Any, kind: Any, scale: Any, out: Any, i: Any) -> None:
    """A row in the file's precision -> float32."""
    dim = out.shape[1]
    if kind == INT8_FILE:
        for d in range(dim):
            out[i, d] = np.float32(np.int8(raw[d])) * scale
        return
    half = FP16 if kind == FP16_FILE else BF16
    for d in range(dim):
        out[i, d] = widen(np.uint16(raw[2 * d]) | (np.uint16(raw[2 * d + 1]) << np.uint16(8)), half)


@njit(nogil=True, cache=True)
def _read_row(files: Any, overlay: Any, key: Any, out: Any, i: Any, work: Any, wait: Any) -> Any:
    """out[i] = the row of a key that is not in the cache. Returns 0, LATE (being prefetched), NOWHERE or a fault."""
    size = 4 * out.shape[1]
    to = out.ctypes.data + i * size
    place = find_change(overlay, key)
    if place >= 0:
        work.counts[CHANGED] += 1
        if not wait and _read_now(overlay.handle, to, size, place * size, work.vector):
            return 0
        return _as_fault(read_fully(overlay.handle, to, size, place * size)) if wait else 1
    table = table_of(key, files.starts)
    row = key - files.starts[table]
    handle, kind, at = files.models[table, 0], files.models[table, 1], files.models[table, 2]
    base = files.maps[table, 0]
    if is_marked(files, table, row):
        handle, base = scratch_of(files, table, row)
        kind, at = np.int64(FP32_FILE), np.int64(0)
    elif kind == ABSENT:
        return NOWHERE
    if kind == FP32_FILE:
        return _copied(handle, base, to, size, at + row * size, work, wait)
    size = out.shape[1] * (1 if kind == INT8_FILE else 2)
    raw = work.raw.ctypes.data
    status = _copied(handle, base, raw, size, at + row * size, work, wait)
    if status != 0:
        return status
    scale = np.float32(1)
    if kind == INT8_FILE:
        aligned = 4 * out.shape[1]
        status = _copied(handle, base, raw + aligned, 4, files.models[table, 3] + row * 4, work, True)
        if status != 0:
            return status
        scale = work.raw[aligned : aligned + 4].view(np.float32)[0]
    _widen_row(work.raw, kind, scale, out, i)
    return 0


@njit(nogil=True, cache=True)
def _copied(handle: Any, base: Any, to: Any, size: Any, offset: Any, work: Any, wait: Any) -> Any:
    """Copy bytes of a file, from memory if it is mapped. Returns 0, LATE or a fault."""
    if base != 0:
        copy_bytes(to, base + offset, size)
        return 0
    if wait:
        return _as_fault(read_fully(handle, to, size, offset))
    return 0 if _read_now(handle, to, size, offset, work.vector) else LATE


@njit(nogil=True, cache=True, inline="always")
def _as_fault(fault: Any) -> Any:
    """A fault that no other result equals: errnos from 1000 on, SHORT below 0."""
    return fault if fault <= 0 else 1000 + fault


@njit(nogil=True, cache=True)
def _hit(cache: Any, overlay: Any, key: Any, out: Any, i: Any) -> Any:
    """Whether the cache has the row; if so, it is copied to out[i]."""
    s = set_of(key, cache.keys.shape[0])
    for way in range(WAYS):
        if cache.keys[s, way] == key:
            if cache.epochs[s, way] != overlay.epoch:
                if find_change(overlay, key) >= 0:
                    cache.keys[s, way] = EMPTY
                    return False
                cache.epochs[s, way] = overlay.epoch
            if cache.uses[s, way] < _MOST_USES:
                cache.uses[s, way] += np.uint8(1)
            slot = WAYS * s + way
            for d in range(out.shape[1]):
                out[i, d] = cache.rows[slot, d]
            return True
    return False


@njit(nogil=True, cache=True)
def _keep(cache: Any, epoch: Any, key: Any, out: Any, i: Any) -> None:
    """Put a row into its set; it replaces the least used one."""
    s = set_of(key, cache.keys.shape[0])
    victim: Any = 0
    least: Any = 256
    for way in range(WAYS):
        uses = np.int64(cache.uses[s, way]) if cache.keys[s, way] != EMPTY else -1
        if uses < least:
            victim, least = way, uses
        if cache.uses[s, way] > 0:
            cache.uses[s, way] -= np.uint8(1)
    cache.keys[s, victim] = key
    cache.uses[s, victim] = np.uint8(1)
    cache.epochs[s, victim] = epoch
    slot = WAYS * s + victim
    for d in range(out.shape[1]):
        cache.rows[slot, d] = out[i, d]


@njit(nogil=True, cache=True)
def find(keys: Any, out: Any, cache: Any, overlay: Any, work: Any) -> Any:
    """out[i] = the row of keys[i] where the cache has it, zero for padding (-1).

    The number of other positions, in work.missing, and of those that have no row anywhere, in work.first.
    """
    num_missing = num_first = 0
    for i in range(keys.shape[0]):
        if i + _AHEAD < keys.shape[0]:
            prefetch(cache.keys, set_of(keys[i + _AHEAD], cache.keys.shape[0]), 0)
        key = keys[i]
        if key < 0:
            out[i, :] = 0
        elif key >= GUEST:
            work.first[num_first] = i
            num_first += 1
        elif _hit(cache, overlay, key, out, i):
            work.counts[HITS] += 1
        else:
            work.missing[num_missing] = i
            num_missing += 1
    return num_missing, num_first


@njit(nogil=True, cache=True)
def read_missing(keys: Any, out: Any, files: Any, overlay: Any, work: Any, found: Any, seen: Any) -> Any:
    """out[i] = the row of keys[i] from files, for the positions that `find` listed; returns the size of work.first.

    A repeated key is read once: `seen` [power of two], filled with -1, holds the first position of each key. The outcome of
    each position is in work.status. A fault is in work.counts: an errno or SHORT, and the key.
    """
    num_missing, num_first = found
    num_late, mask = 0, seen.shape[0] - 1
    for n in range(num_missing):
        i = work.missing[n]
        at = np.int64(mix(np.uint64(keys[i])) & np.uint64(mask))
        while seen[at] >= 0 and keys[seen[at]] != keys[i]:  # ends: half of the places are free
            at = (at + 1) & mask
        if seen[at] >= 0:
            work.status[i], work.same[i] = AGAIN, seen[at]
            continue
        seen[at] = i
        status = _read_row(files, overlay, keys[i], out, i, work, False)
        if status == LATE:
            work.late[num_late] = i
            num_late += 1
        elif status > NOWHERE or status < 0:
            work.counts[FAULT], work.counts[FAULT_KEY] = status, keys[i]
            return num_first
        work.status[i] = status
    for n in range(num_late):
        i = work.late[n]
        status = _read_row(files, overlay, keys[i], out, i, work, True)
        if status != 0:
            work.counts[FAULT], work.counts[FAULT_KEY] = status, keys[i]
            return num_first
        work.status[i] = 0
    for n in range(num_missing):
        i = work.missing[n]
        source = work.same[i] if work.status[i] == AGAIN else i
        if work.status[source] == NOWHERE:
            work.first[num_first] = i
            num_first += 1
        elif source != i:
            out[i, :] = out[source, :]
            work.counts[HITS] += 1
        else:
            work.counts[READ] += 1
    return num_first


@njit(nogil=True, cache=True)
def keep(keys: Any, out: Any, cache: Any, epoch: Any, work: Any, num_missing: Any) -> None:
    """Add the rows that were read to the cache, except those that another thread has added in the meantime."""
    for n in range(num_missing):
        i = work.missing[n]
        if work.status[i] == 0:
            s, there = set_of(keys[i], cache.keys.shape[0]), False
            for way in range(WAYS):
                there |= cache.keys[s, way] == keys[i]
            if not there:
                _keep(cache, epoch, keys[i], out, i)
