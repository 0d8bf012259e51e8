"""Compiled: keys in, rows out, from a bounded cache, else from files; all of it without the GIL.

Two bits of every row (`Marks`) say which file of its table has it in one version of the model: the file of the model, the
first or the second scratch file, or a scratch file that other processes read too. A row that no file has is filled in by the
caller with its initial value. Marks of a version never change, and neither do the rows they point to: the next version is
written to the scratch file that the row is not in.

The cache consists of sets of 8 slots; a key maps to one set. A slot counts its uses, up to 15, and every row that enters the
set lowers the counts of the others, so frequently used rows stay. A slot records the version in which it was last known to be
current. Right after a new version a slot of the one before is current if its marks are equal in both; `sweep` settles that for
all slots.

A lookup has three steps: `find` searches the cache, `read_missing` reads the other rows, `keep` adds them to the cache. The
first and the last change the cache and run under a lock; reading takes longest and runs in parallel. A row in the page cache
is read at once (`RWF_NOWAIT`). For all others the kernel is asked to prefetch the page, so that the disk works on the whole
batch at once, and they are read at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.host.intrinsics import copy_bytes, load8, posix_fadvise, preadv2, prefetch, read_fully
from hotbed.host.jit import njit
from hotbed.host.splitmix import mix
from hotbed.ops.precision import BF16, FP16
from hotbed.ops.precision.numba import widen

WAYS = 8  # slots of a set; their keys are one cache line
GUEST = 1 << 62  # keys from here on have no row anywhere: the caller fills them in
EMPTY = -1
IN_MODEL, IN_FIRST, IN_SECOND, IN_SHARED = range(4)  # which file of a table has a row
ABSENT, FP32_FILE, FP16_FILE, BF16_FILE, INT8_FILE = range(5)
_MOST_USES = 15
_AHEAD = 12
_NOWAIT, _WILLNEED = 8, 3
HITS, READ, FIRST, FAULT, FAULT_KEY = range(5)
NUM_COUNTS = 5
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
    models: NDArray[np.int64]  # [T, 3]: kind of the model file, offset of weights, offset of scales (int8)
    handles: NDArray[np.int64]  # [T, 4]: of the model file, both scratch files (float32), the shared one; -1: none
    maps: NDArray[np.int64]  # [T, 4]: their addresses; 0: not mapped


class Marks(NamedTuple):
    """Which file has each row, two bits a row, as of one version."""

    bits: NDArray[np.int64]  # [T]: address of the marks of a table, four rows a byte
    counts: NDArray[np.int64]  # [T]: rows that have marks; all others are IN_MODEL


class CurrentMarks(NamedTuple):
    """What decides whether a cached row is current."""

    now: Marks
    before: Marks  # of the version that slots of another epoch were current in
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
def file_of(marks: Any, table: Any, row: Any) -> Any:
    """Which file has a row."""
    if row >= marks.counts[table]:
        return np.int64(IN_MODEL)
    return (np.int64(load8(marks.bits[table] + (row >> 2))) >> (2 * (row & 3))) & 3


@njit(nogil=True, cache=True)
def _has_changed(key: Any, seen: Any, starts: Any) -> Any:
    """Whether the row of a key is another one than before."""
    table = table_of(key, starts)
    row = key - starts[table]
    return file_of(seen.now, table, row) != file_of(seen.before, table, row)


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
def _read_row(files: Any, marks: Any, key: Any, out: Any, i: Any, work: Any, wait: Any) -> Any:
    """out[i] = the row of a key that is not in the cache. Returns 0, LATE (being prefetched), NOWHERE or a fault."""
    size = 4 * out.shape[1]
    to = out.ctypes.data + i * size
    table = table_of(key, files.starts)
    row = key - files.starts[table]
    place = file_of(marks, table, row)
    handle, base = files.handles[table, place], files.maps[table, place]
    kind, at = np.int64(FP32_FILE), np.int64(0)
    if place == IN_MODEL:
        kind, at = files.models[table, 0], files.models[table, 1]
        if kind == ABSENT:
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
        status = _copied(handle, base, raw + aligned, 4, files.models[table, 2] + row * 4, work, True)
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
def _hit(cache: Any, seen: Any, starts: Any, key: Any, out: Any, i: Any) -> Any:
    """Whether the cache has the row; if so, it is copied to out[i]."""
    s = set_of(key, cache.keys.shape[0])
    for way in range(WAYS):
        if cache.keys[s, way] == key:
            if cache.epochs[s, way] != seen.epoch:
                if _has_changed(key, seen, starts):
                    cache.keys[s, way] = EMPTY
                    return False
                cache.epochs[s, way] = seen.epoch
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
def find(keys: Any, out: Any, cache: Any, starts: Any, seen: Any, is_current: Any, work: Any) -> Any:
    """out[i] = the row of keys[i] where the cache has it, zero for padding (-1). A version that is not current has no cache.

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
        elif is_current and _hit(cache, seen, starts, key, out, i):
            work.counts[HITS] += 1
        else:
            work.missing[num_missing] = i
            num_missing += 1
    return num_missing, num_first


@njit(nogil=True, cache=True)
def read_missing(keys: Any, out: Any, files: Any, marks: Any, work: Any, found: Any, seen: Any) -> Any:
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
        status = _read_row(files, marks, keys[i], out, i, work, False)
        if status == LATE:
            work.late[num_late] = i
            num_late += 1
        elif status > NOWHERE or status < 0:
            work.counts[FAULT], work.counts[FAULT_KEY] = status, keys[i]
            return num_first
        work.status[i] = status
    for n in range(num_late):
        i = work.late[n]
        status = _read_row(files, marks, keys[i], out, i, work, True)
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


@njit(nogil=True, cache=True)
def sweep(cache: Any, starts: Any, seen: Any, first: Any, stop: Any) -> None:
    """Empty the slots of some sets whose rows have changed; all others are current."""
    for s in range(first, stop):
        for way in range(WAYS):
            if cache.keys[s, way] != EMPTY and cache.epochs[s, way] != seen.epoch:
                if _has_changed(cache.keys[s, way], seen, starts):
                    cache.keys[s, way] = EMPTY
                else:
                    cache.epochs[s, way] = seen.epoch
