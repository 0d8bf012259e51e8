"""A job and its chunks, compiled: opened by a caller, taken by it and by the workers of a pool (pool.py) without Python's lock.

A job's kernel is called once for each chunk: kernel(arguments, chunk, scratch). The caller takes chunks itself and leaves when
all are done. Workers join when they wake: a late one finds less to do, and no job waits for a thread that sleeps. A
worker watches for the next job for a while, then sleeps in a futex; a thread that is woken wakes two others.

The block of a pool is an array of 64-bit words shared by all threads:

    NEXT    ticket << 32 | next chunk: a chunk is taken by adding one to the word it was read from, so never of an earlier job
    DONE    chunks that are done
    CALL    what sleepers watch: counts jobs
    ASLEEP  how many watch it
    KERNEL, NUM_CHUNKS, ARGUMENTS  the job itself, written while NEXT says that no chunk is left
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from hotbed.host.intrinsics import (
    call,
    compare_swap,
    fetch_add,
    load_acquire,
    pause,
    sched_yield,
    store_release,
    syscall,
    usleep,
)
from hotbed.host.jit import cfunc, njit

NUM_ARGUMENTS = 16  # words
# words on cache lines of their own where many threads write
NEXT, _DONE, _CALL, _ASLEEP = 0, 8, 16, 24
STOPPED, _KERNEL, _NUM_CHUNKS, _TAKEN, WATCH, HEAD_START, FUTEX = range(32, 39)
_ARGUMENTS = 40
WORDS = _ARGUMENTS + NUM_ARGUMENTS
CLOSED = 0x7FFFFFFF  # as the next chunk: none is left
ALL_DONE, NOT_YET = -1, -2  # instead of a chunk
_LOOKS = 200  # before a caller gives way, at least
_NAP_US, _LONGEST_NAP_US = 50, 1000
_CALLER_LOOKS, _CALLER_NAPS = 200_000, 20_000  # before it is asked whether the workers live: about a second
_WAIT, _WAKE = 128, 129  # operations of a futex, private
_SYSTEM_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
FUTEX_NUMBER = _SYSTEM_CALLS.get(platform.machine(), 0) if sys.platform == "linux" else 0


@njit(nogil=True, cache=True)
def begin(pool: Any) -> Any:
    """The address of the words for the next job's arguments; no chunk can be taken until it runs."""
    ticket = ((load_acquire(pool + 8 * NEXT) >> 32) + 1) << 32
    store_release(pool + 8 * NEXT, ticket | CLOSED)
    return pool + 8 * _ARGUMENTS


@njit(nogil=True, cache=True)
def run(pool: Any, kernel: Any, num_chunks: Any, scratch: Any) -> None:
    """Open the job whose arguments were written after `begin`, help with it and wait for its last chunk."""
    _open(pool, kernel, num_chunks, 0)
    _take(pool, scratch)
    looks, most = 0, max(load_acquire(pool + 8 * WATCH), _LOOKS)
    while load_acquire(pool + 8 * _DONE) < num_chunks:  # ends: a chunk that was taken runs to its end, compiled
        pause()
        looks += 1
        if looks > most:  # more threads than cores: let the one that has the last chunk run
            sched_yield()


@njit(nogil=True, cache=True)
def _open(pool: Any, kernel: Any, num_chunks: Any, own: Any) -> None:
    """Let workers take chunks from number `own` on; those before are the caller's."""
    store_release(pool + 8 * _KERNEL, kernel)
    store_release(pool + 8 * _NUM_CHUNKS, num_chunks)
    store_release(pool + 8 * _DONE, own)
    store_release(pool + 8 * NEXT, ((load_acquire(pool + 8 * NEXT) >> 32) << 32) | own)
    fetch_add(pool + 8 * _CALL, 1)
    if num_chunks > 1:
        _wake(pool)


@njit(nogil=True, cache=True)
def _wake(pool: Any) -> None:
    """Wake two sleepers if there is a chunk for them."""
    left = load_acquire(pool + 8 * _NUM_CHUNKS) - (load_acquire(pool + 8 * NEXT) & 0xFFFFFFFF)
    if left > 0 and load_acquire(pool + 8 * _ASLEEP) > 0 and load_acquire(pool + 8 * FUTEX) > 0:
        syscall(load_acquire(pool + 8 * FUTEX), pool + 8 * _CALL, _WAKE, 2, 0)


@njit(nogil=True, cache=True)
def _claim(pool: Any) -> Any:
    """The number of a chunk for exclusive use, or -1."""
    while True:  # ends: the next chunk's number grows whenever the swap fails, and there are as many as there are
        word = load_acquire(pool + 8 * NEXT)
        chunk = word & 0xFFFFFFFF
        if chunk >= load_acquire(pool + 8 * _NUM_CHUNKS):
            return -1
        if compare_swap(pool + 8 * NEXT, word, word + 1):
            return chunk


@njit(nogil=True, cache=True)
def _take(pool: Any, scratch: Any) -> None:
    """Do chunks of the open job until none is left."""
    chunk = _claim(pool)
    while chunk >= 0:  # ends: see `_claim`
        call(load_acquire(pool + 8 * _KERNEL), pool + 8 * _ARGUMENTS, chunk, scratch)
        fetch_add(pool + 8 * _DONE, 1)
        chunk = _claim(pool)


@njit(nogil=True, cache=True)
def work(pool: Any, scratch: Any) -> None:
    """The life of a worker."""
    watch = load_acquire(pool + 8 * WATCH)
    while load_acquire(pool + 8 * STOPPED) == 0:  # ends: when the pool is stopped
        jobs = load_acquire(pool + 8 * _CALL)
        _take(pool, scratch)
        looks = 0
        while load_acquire(pool + 8 * _CALL) == jobs and looks < watch:  # ends: looks are counted
            pause()
            looks += 1
        if looks == watch:
            _sleep(pool, jobs)
            _wake(pool)
        else:
            for _ in range(load_acquire(pool + 8 * HEAD_START)):
                pause()


@njit(nogil=True, cache=True)
def _sleep(pool: Any, jobs: Any) -> None:
    """Until there were more jobs than these; where the system has no futex, in naps."""
    futex = load_acquire(pool + 8 * FUTEX)
    fetch_add(pool + 8 * _ASLEEP, 1)
    if futex > 0:
        syscall(futex, pool + 8 * _CALL, _WAIT, jobs & 0xFFFFFFFF, 0)
    else:
        nap = _NAP_US
        while load_acquire(pool + 8 * _CALL) == jobs:  # ends: with the next job, or when the pool is stopped
            usleep(np.uint32(nap))
            nap = min(2 * nap, _LONGEST_NAP_US)
    fetch_add(pool + 8 * _ASLEEP, -1)


@njit(nogil=True, cache=True)
def open_call(pool: Any, kernel: Any, num_chunks: Any) -> None:
    """A job of a kernel without arguments, whose chunk 0 is the caller's: in one call, so that none is left half open."""
    begin(pool)
    _open(pool, kernel, num_chunks, 1)


@njit(nogil=True, cache=True)
def next_own(pool: Any) -> Any:
    """A chunk for the caller, which counts as done from now on; else ALL_DONE, or NOT_YET after a second of waiting."""
    chunk = _claim(pool)
    if chunk >= 0:
        fetch_add(pool + 8 * _DONE, 1)
        return chunk
    return ALL_DONE if settle(pool) else NOT_YET


@njit(nogil=True, cache=True)
def settle(pool: Any) -> bool:
    """Close the job; True once no thread works on a chunk of it, False after a second."""
    word = load_acquire(pool + 8 * NEXT)
    while (word & 0xFFFFFFFF) != CLOSED:  # ends: the word changes only when a chunk is taken
        if compare_swap(pool + 8 * NEXT, word, word | CLOSED):
            store_release(pool + 8 * _TAKEN, word & 0xFFFFFFFF)
        word = load_acquire(pool + 8 * NEXT)
    taken = load_acquire(pool + 8 * _TAKEN)
    for n in range(_CALLER_LOOKS + _CALLER_NAPS):
        if load_acquire(pool + 8 * _DONE) >= taken:
            return True
        if n < _CALLER_LOOKS:
            pause()
        else:
            usleep(np.uint32(_NAP_US))
    return False


@njit(nogil=True, cache=True)
def wake_all(pool: Any) -> None:
    """After STOPPED was set."""
    fetch_add(pool + 8 * _CALL, 1)
    if load_acquire(pool + 8 * FUTEX) > 0:
        syscall(load_acquire(pool + 8 * FUTEX), pool + 8 * _CALL, _WAKE, 1 << 20, 0)


def kernel_address(function: Callable[..., Any]) -> int:
    """Compile function(arguments, chunk, scratch), three addresses or numbers, as the kernel of a job. Keep the result."""
    compiled = cfunc(types.void(*(types.int64,) * 3), function)
    _kernels.append(compiled)
    return int(compiled.address)


_kernels: list[Any] = []  # they must live as long as their addresses
