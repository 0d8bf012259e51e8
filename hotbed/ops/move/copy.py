"""Rows copied on the host by threads that never need the GIL, so that a copy is as quick as the memory and not as Python.

A copy is a job of the pool (host/pool.py), in chunks of 128 KiB. On 16 cores (host of an H200) 24,000 rows of 528 bytes, sorted
and out of the caches, are gathered in 0.33 ms and 100,000 in 1.06 ms, scattered in 0.27 and 0.93; a caller after 2 ms of
silence waits 0.07 ms more. By Python threads, which take the GIL in turn, the same gathers took 1.7 and 2.1 ms.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from hotbed.host.intrinsics import copy_bytes, load64, prefetch_far, store64
from hotbed.host.jit import njit
from hotbed.host.jobs import begin, kernel_address, run
from hotbed.host.pool import Pool, shared

GATHER, SCATTER = 0, 1
_OP, _RECORDS, _ROWS, _PACKED, _NUM_ROWS, _NUM_BYTES, _CHUNK = range(7)  # arguments of the job
_WATCH = 1500  # looks before a worker sleeps: about 0.1 ms
# Cache lines asked for before the first of them is read, into the second level: a core waits for 16 lines on their way to the
# first at most. 39,000 rows of 528 bytes by 12 threads of an H200's host, gathered and scattered, ms: 36 lines into the first
# level 0.53 and 0.50, 72 lines 0.46 and 0.46, 72 into the second 0.43 and 0.42, 144 0.45 and 0.44.
LINES_AHEAD = 72
_CHUNK_BYTES = 1 << 17


def _copy_chunk(arguments: Any, chunk: Any, scratch: Any) -> None:
    """packed[i] = records[rows[i]] for the rows of one chunk, or the other way round."""
    records, rows, packed = (
        load64(arguments + 8 * _RECORDS),
        load64(arguments + 8 * _ROWS),
        load64(arguments + 8 * _PACKED),
    )
    num_bytes, size = load64(arguments + 8 * _NUM_BYTES), load64(arguments + 8 * _CHUNK)
    scatters = load64(arguments + 8 * _OP) == SCATTER
    first = chunk * size
    stop = min(first + size, load64(arguments + 8 * _NUM_ROWS))
    ahead = 1 + LINES_AHEAD // (1 + num_bytes // 64)
    asked = first
    for i in range(first, stop):
        while asked < min(i + ahead + 1, stop):  # ends: asked grows
            place = records + load64(rows + 8 * asked) * num_bytes
            for line in range(0, num_bytes, 64):
                prefetch_far(place + line)
            asked += 1
        place = records + load64(rows + 8 * i) * num_bytes
        if scatters:
            copy_bytes(place, packed + i * num_bytes, num_bytes)
        else:
            copy_bytes(packed + i * num_bytes, place, num_bytes)


@cache
def copy_kernel() -> int:
    """For `copy_rows`; compiled at its first call and then kept on disk."""
    return kernel_address(_copy_chunk)


@njit(nogil=True, cache=True)
def copy_rows(
    pool: Any,
    scratch: Any,
    kernel: Any,
    op: Any,
    records: Any,
    rows: Any,
    packed: Any,
    num_rows: Any,
    num_bytes: Any,
) -> None:
    """packed[i] = records[rows[i]] (GATHER) or the other way round (SCATTER); addresses of C-contiguous arrays."""
    size = max(1, _CHUNK_BYTES // max(num_bytes, 32))  # of single bytes, 4,096
    arguments = begin(pool)
    store64(arguments + 8 * _OP, op)
    store64(arguments + 8 * _RECORDS, records)
    store64(arguments + 8 * _ROWS, rows)
    store64(arguments + 8 * _PACKED, packed)
    store64(arguments + 8 * _NUM_ROWS, num_rows)
    store64(arguments + 8 * _NUM_BYTES, num_bytes)
    store64(arguments + 8 * _CHUNK, size)
    run(pool, kernel, (num_rows + size - 1) // size, scratch)


def copy_pool(num_workers: int) -> Pool:
    """A pool for compiled code that copies rows on its own, apart from the one of `move_rows`."""
    return Pool("hotbed-rows", num_workers, watch=_WATCH)


def move_rows(op: int, records: int, rows: int, packed: int, num_rows: int, num_bytes: int) -> None:
    """`copy_rows` by the threads of this process."""
    if num_rows > 0:
        pool = shared("hotbed-rows", watch=_WATCH)
        pool.call(copy_rows, copy_kernel(), op, records, rows, packed, num_rows, num_bytes)
