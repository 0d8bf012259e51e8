"""Places of records -> the records, every one verified: sorted, neighbours joined, read by threads that need no GIL.

A read is a job of a pool (host/pool.py) whose workers never watch for work, because there are more of them than cores. A caller
takes chunks itself and wakes two workers, each of which wakes two more. A job that comes from the page cache is done before
many are awake; one that waits for the disk soon has them all in `pread`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError
from hotbed.host.intrinsics import (
    SHORT,
    compare_swap,
    copy_bytes,
    load64,
    load_acquire,
    load_unsigned,
    read_fully,
    store64,
)
from hotbed.host.jit import njit
from hotbed.host.jobs import begin, kernel_address, run
from hotbed.host.pool import Pool, shared
from hotbed.store.ssd.format import HEADER_BYTES, MAX_RECORD_BYTES
from hotbed.store.ssd.kernels import checksum, plan_runs
from hotbed.store.ssd.scan import damaged, truncated, unreadable
from hotbed.store.ssd.segments import Segments

NUM_THREADS = 32
LONGEST_RUN = 1 << 16  # bytes read at once
GAP = 2048  # bytes between two records that are cheaper to read than to skip
DAMAGED = -2  # a fault in addition to SHORT and an errno

_RUNS, _OFFSETS, _ROWS, _KEYS, _OUT, _STRIDE, _NUM_BYTES, _NUM_RUNS = range(8)  # arguments of the job
_FAILED, _FAULT, _WHERE = range(8, 11)  # the first failure: its kind and its record
_CHUNK = 4  # runs


class Fault(NamedTuple):
    """The first failure: an errno, SHORT or DAMAGED, and the position of the record."""

    kind: int
    record: int


@njit(nogil=True, cache=True)
def _fail(job: Any, kind: Any, record: Any) -> None:
    if compare_swap(job + 8 * _FAILED, 0, 1):
        store64(job + 8 * _FAULT, kind)
        store64(job + 8 * _WHERE, record)


@njit(nogil=True, cache=True)
def _read_run(job: Any, number: Any, scratch: Any) -> None:
    """One read, then every wanted record of it is checked and copied to its row."""
    at = load64(job + 8 * _RUNS) + 32 * number
    handle, seed, first, stop = load64(at), load_unsigned(at + 8), load64(at + 16), load64(at + 24)
    offsets, rows, keys = load64(job + 8 * _OFFSETS), load64(job + 8 * _ROWS), load64(job + 8 * _KEYS)
    out, stride, num_bytes = load64(job + 8 * _OUT), load64(job + 8 * _STRIDE), load64(job + 8 * _NUM_BYTES)
    start = load64(offsets + 8 * first)
    fault = read_fully(handle, scratch, load64(offsets + 8 * (stop - 1)) + stride - start, start)
    if fault != 0:
        _fail(job, fault, first)
        return
    for i in range(first, stop):
        offset, row = load64(offsets + 8 * i), load64(rows + 8 * i)
        record = scratch + (offset - start)
        good = checksum(seed, (offset - HEADER_BYTES) // stride, record, stride) == load_unsigned(record + 8)
        if not good or load64(record) != load64(keys + 8 * row):
            _fail(job, DAMAGED, i)
            return
        copy_bytes(out + row * num_bytes, record + 16, num_bytes)


def _read_chunk(job: Any, chunk: Any, scratch: Any) -> None:
    for number in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, load64(job + 8 * _NUM_RUNS))):
        if load_acquire(job + 8 * _FAILED) == 0:
            _read_run(job, number, scratch)


@cache
def _read_kernel() -> int:
    return kernel_address(_read_chunk)


@njit(nogil=True, cache=True)
def _read(
    pool: Any, scratch: Any, kernel: Any, runs: Any, offsets: Any, rows: Any, keys: Any, out: Any, stride: Any
) -> Any:
    """(failed, kind, record), of a Fault."""
    job = begin(pool)
    store64(job + 8 * _RUNS, runs.ctypes.data)
    store64(job + 8 * _OFFSETS, offsets.ctypes.data)
    store64(job + 8 * _ROWS, rows.ctypes.data)
    store64(job + 8 * _KEYS, keys.ctypes.data)
    store64(job + 8 * _OUT, out.ctypes.data)
    store64(job + 8 * _STRIDE, stride)
    store64(job + 8 * _NUM_BYTES, out.shape[1] * 4)
    store64(job + 8 * _NUM_RUNS, runs.shape[0])
    store64(job + 8 * _FAILED, 0)
    run(pool, kernel, (runs.shape[0] + _CHUNK - 1) // _CHUNK, scratch)
    return load64(job + 8 * _FAILED), load64(job + 8 * _FAULT), load64(job + 8 * _WHERE)


def reading_pool() -> Pool:
    """The reading threads of this process; each has memory for the longest record."""
    return shared("hotbed-ssd", NUM_THREADS - 1, watch=0, scratch_bytes=MAX_RECORD_BYTES)


def read_runs(
    runs: NDArray[np.int64],
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64],
    keys: NDArray[np.int64],
    out: NDArray[np.float32],
    stride: int,
) -> Fault | None:
    """Read runs [_, 4] = (file, seed, first, stop) of records: out[rows[i]] is the one at offsets[i], of key keys[rows[i]].

    `out` must be of whole rows; no two records share a row.
    """
    failed, kind, record = reading_pool().call(_read, _read_kernel(), runs, offsets, rows, keys, out, stride)
    return Fault(int(kind), int(record)) if failed else None


class RecordPlaces(NamedTuple):
    """Where the records of some keys are at one moment."""

    places: NDArray[np.int64]
    positions: NDArray[np.int64]  # of their keys among those asked for
    missing: NDArray[np.int64]  # positions of keys without a record, or of those that are expected
    files: tuple[NDArray[np.int64], NDArray[np.int64]]  # descriptors and seeds by slot


def read_records(
    segments: Segments, found: RecordPlaces, rows: NDArray[np.int64], keys: NDArray[np.int64], out: NDArray[np.float32]
) -> int:
    """out[rows[i]] = the record at places[i], verified to be that of keys[rows[i]]: the bytes read."""
    order = np.argsort(found.places)
    places, rows = found.places[order], rows[order]
    offsets, runs = np.empty(places.size, dtype=np.int64), np.empty((places.size, 3), dtype=np.int64)
    num_runs = plan_runs(places, segments.stride, HEADER_BYTES, GAP, LONGEST_RUN, offsets, runs)
    slots, first, stop = runs[:num_runs].T
    jobs = np.stack([found.files[0][slots], found.files[1][slots], first, stop], axis=1)
    fault = read_runs(jobs, offsets, rows, keys, out, segments.stride)
    if fault is not None:
        segment = segments.all[int(places[fault.record] >> 32)]
        assert segment is not None, "a segment went while it was read"
        raise _in_words(fault, segment.path, int(offsets[fault.record]), int(keys[rows[fault.record]]))
    return int((offsets[stop - 1] + segments.stride - offsets[first]).sum())


def _in_words(fault: Fault, path: Path, offset: int, key: int) -> StoreError:
    if fault.kind == DAMAGED:
        return damaged(path, offset, key)
    if fault.kind == SHORT:
        return truncated(path, offset)
    return unreadable(path, offset, fault.kind)
