"""Many reads in flight: a list of runs of records -> rows in place, every one verified, by threads that need no GIL.

Threads of one process sleep in a futex inside compiled code. A caller opens a job, takes chunks of it itself, and wakes two
workers, each of which wakes two more: a job that comes from the page cache is done before many are awake, one that waits for
the disk has them all in `pread` at once. Unlike the threads that copy memory (ops/move/pool.py) they never watch for work:
there are more of them than cores. Where the system has no futex the caller reads alone.

A job is a block of 64-bit words; see ops/move/pool.py for how a chunk is taken.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hotbed.host.intrinsics import (
    compare_swap,
    copy_bytes,
    fetch_add,
    load_acquire,
    load_unsigned,
    pause,
    read_fully,
    sched_yield,
    store_release,
    syscall,
)
from hotbed.ops.move import pool as crew
from hotbed.store.ssd.format import HEADER_BYTES, MAX_RECORD_BYTES
from hotbed.store.ssd.kernels import checksum

NUM_THREADS = 32
LONGEST_RUN = 1 << 16  # bytes read at once
GAP = 2048  # bytes between two records that are cheaper to read along than to skip
DAMAGED = -2  # what can be wrong beside SHORT and an errno

_STOP = 1
_NEXT, _DONE, _CALL, _ASLEEP = 0, 8, 16, 24  # words on cache lines of their own where many threads write
_OP, _RUNS, _OFFSETS, _ROWS, _KEYS, _OUT, _STRIDE, _NUM_BYTES, _NUM_RUNS, _NUM_CHUNKS = range(32, 42)
_FAILED, _FAULT, _WHERE = 48, 49, 50  # who fails first says why and at which record
_WORDS = 64
_CLOSED = 0x7FFFFFFF
_CHUNK = 4  # runs
_LOOKS = 200  # before a caller that waits gives way
_WAIT, _WAKE = 128, 129


class Fault(NamedTuple):
    """What went wrong first: an errno, SHORT or DAMAGED, and the position of the record."""

    kind: int
    record: int


@njit(nogil=True, cache=True)
def _fail(job: Any, kind: Any, record: Any) -> None:
    if compare_swap(job + 8 * _FAILED, 0, 1):
        store_release(job + 8 * _FAULT, kind)
        store_release(job + 8 * _WHERE, record)


@njit(nogil=True, cache=True)
def _read_run(job: Any, run: Any, scratch: Any) -> None:
    """One read, then every wanted record of it is checked and copied to its row."""
    at = load_acquire(job + 8 * _RUNS) + 32 * run
    handle, seed = np.int64(load_unsigned(at)), load_unsigned(at + 8)
    first, stop = np.int64(load_unsigned(at + 16)), np.int64(load_unsigned(at + 24))
    offsets, rows, keys = load_acquire(job + 8 * _OFFSETS), load_acquire(job + 8 * _ROWS), load_acquire(job + 8 * _KEYS)
    out, stride, num_bytes = (
        load_acquire(job + 8 * _OUT),
        load_acquire(job + 8 * _STRIDE),
        load_acquire(job + 8 * _NUM_BYTES),
    )
    start = np.int64(load_unsigned(offsets + 8 * first))
    fault = read_fully(handle, scratch, np.int64(load_unsigned(offsets + 8 * (stop - 1))) + stride - start, start)
    if fault != 0:
        _fail(job, fault, first)
        return
    for i in range(first, stop):
        offset, row = np.int64(load_unsigned(offsets + 8 * i)), np.int64(load_unsigned(rows + 8 * i))
        record = scratch + (offset - start)
        good = checksum(seed, (offset - HEADER_BYTES) // stride, record, stride) == load_unsigned(record + 8)
        if not good or load_unsigned(record) != load_unsigned(keys + 8 * row):
            _fail(job, DAMAGED, i)
            return
        copy_bytes(out + row * num_bytes, record + 16, num_bytes)


@njit(nogil=True, cache=True)
def _take(job: Any, scratch: Any) -> None:
    """Do chunks of the open job until none is left."""
    while True:  # ends: the next chunk's number grows whenever the swap fails, and there are as many as there are
        word = load_acquire(job + 8 * _NEXT)
        chunk = word & 0xFFFFFFFF
        if chunk >= load_acquire(job + 8 * _NUM_CHUNKS):
            return
        if compare_swap(job + 8 * _NEXT, word, word + 1):
            for run in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, load_acquire(job + 8 * _NUM_RUNS))):
                if load_acquire(job + 8 * _FAILED) == 0:
                    _read_run(job, run, scratch)
            fetch_add(job + 8 * _DONE, 1)


@njit(nogil=True, cache=True)
def _work(job: Any, futex: Any, scratch: Any) -> None:
    """The life of a worker."""
    while load_acquire(job + 8 * _OP) != _STOP:  # ends: when the readers are stopped
        call = load_acquire(job + 8 * _CALL)
        _take(job, scratch)
        fetch_add(job + 8 * _ASLEEP, 1)
        syscall(futex, job + 8 * _CALL, _WAIT, call & 0xFFFFFFFF, 0)
        fetch_add(job + 8 * _ASLEEP, -1)
        _wake(job, futex, 2)


@njit(nogil=True, cache=True)
def _wake(job: Any, futex: Any, count: Any) -> None:
    """Wake sleepers while there is a chunk for them."""
    left = load_acquire(job + 8 * _NUM_CHUNKS) - (load_acquire(job + 8 * _NEXT) & 0xFFFFFFFF)
    if left > 0 and load_acquire(job + 8 * _ASLEEP) > 0:
        syscall(futex, job + 8 * _CALL, _WAKE, count, 0)


@njit(nogil=True, cache=True)
def _open(job: Any, runs: Any, offsets: Any, rows: Any, keys: Any, out: Any, stride: Any) -> None:
    """Write down a job while nobody can take a chunk of it, then let them."""
    ticket = ((load_acquire(job + 8 * _NEXT) >> 32) + 1) << 32
    store_release(job + 8 * _NEXT, ticket | _CLOSED)
    store_release(job + 8 * _RUNS, runs.ctypes.data)
    store_release(job + 8 * _OFFSETS, offsets.ctypes.data)
    store_release(job + 8 * _ROWS, rows.ctypes.data)
    store_release(job + 8 * _KEYS, keys.ctypes.data)
    store_release(job + 8 * _OUT, out.ctypes.data)
    store_release(job + 8 * _STRIDE, stride)
    store_release(job + 8 * _NUM_BYTES, out.shape[1] * 4)
    store_release(job + 8 * _NUM_RUNS, runs.shape[0])
    store_release(job + 8 * _NUM_CHUNKS, (runs.shape[0] + _CHUNK - 1) // _CHUNK)
    store_release(job + 8 * _DONE, 0)
    store_release(job + 8 * _FAILED, 0)
    store_release(job + 8 * _FAULT, 0)
    store_release(job + 8 * _NEXT, ticket)


@njit(nogil=True, cache=True)
def _run(
    job: Any, futex: Any, scratch: Any, runs: Any, offsets: Any, rows: Any, keys: Any, out: Any, stride: Any
) -> None:
    """Open a job, help with it and wait for its last chunk: one call, so that nothing comes between and leaves it open."""
    _open(job, runs, offsets, rows, keys, out, stride)
    num_chunks = load_acquire(job + 8 * _NUM_CHUNKS)
    fetch_add(job + 8 * _CALL, 1)
    if num_chunks > 1:
        _wake(job, futex, 2)
    _take(job, scratch)
    looks = 0
    while (
        load_acquire(job + 8 * _DONE) < num_chunks
    ):  # ends: who has taken a chunk reads it, and counts it also if that fails
        pause()
        looks += 1
        if looks > _LOOKS:
            sched_yield()


@njit(nogil=True, cache=True)
def _stop(job: Any, futex: Any) -> None:
    store_release(job + 8 * _OP, _STOP)
    fetch_add(job + 8 * _CALL, 1)
    syscall(futex, job + 8 * _CALL, _WAKE, 1 << 20, 0)


class Readers:
    """The threads of one process that read; callers take turns."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_workers = num_threads - 1 if crew.AVAILABLE else 0
        self._words = np.zeros(_WORDS + 8, dtype=np.int64)
        self._job = -(-self._words.ctypes.data // 64) * 64
        self._first = (self._job - self._words.ctypes.data) // 8
        self._words[self._first] = _CLOSED
        self._scratch = [np.empty(MAX_RECORD_BYTES, dtype=np.uint8)]  # one for each thread; memory comes when used
        self._workers: list[threading.Thread] = []
        self._turn = threading.Lock()
        self.process = os.getpid()
        atexit.register(self.stop)

    def read(
        self,
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
        with self._turn:
            self._ready()
            scratch = self._scratch[0].ctypes.data
            _run(self._job, crew._FUTEX, scratch, runs, offsets, rows, keys, out, stride)
            words = self._words[self._first :]
            return Fault(int(words[_FAULT]), int(words[_WHERE])) if words[_FAILED] else None

    def _ready(self) -> None:
        while len(self._workers) < self._num_workers:
            self._scratch.append(np.empty(MAX_RECORD_BYTES, dtype=np.uint8))
            arguments = (self._job, crew._FUTEX, self._scratch[-1].ctypes.data)
            worker = threading.Thread(target=_work, args=arguments, name="hotbed-ssd", daemon=True)
            self._workers.append(worker)  # before it starts: an interrupt must not leave one that nobody stops
            worker.start()

    def stop(self) -> None:
        """Let the workers go; they are in compiled code and must not outlive the interpreter."""
        if self._workers and self.process == os.getpid():
            with self._turn:
                _stop(self._job, crew._FUTEX)
                crew.join(self._workers)
        self._workers.clear()
        atexit.unregister(self.stop)


_the_readers: Readers | None = None
_making = threading.Lock()


def readers() -> Readers:
    """Those of this process; a forked child has none of its parent's threads."""
    global _the_readers  # noqa: PLW0603  one set per process
    with _making:
        if _the_readers is None or _the_readers.process != os.getpid():
            _the_readers = Readers()
        return _the_readers
