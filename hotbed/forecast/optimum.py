"""The fewest misses that any cache could have if it knew the whole trace: the yardstick of every policy.

Belady's rule at batch granularity: every row of a batch is in the cache when the batch is trained, nothing is bypassed, and
when room is needed the rows with the farthest next use leave. Misses are counted over the distinct keys of each batch. There
are no windows and no rows held by batches in flight: training cannot do better, and pays for overlap where it does worse.

A row that stays is represented by the entry of its last use. Entries are in one list per batch of their next use, and a heap
has the farthest list that is not empty, so the work is one sort of the trace and O(log N) per entry.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import BudgetError
from hotbed.forecast.trace import Trace
from hotbed.host.jit import njit
from hotbed.tables.sizing.enough import share_of, with_some_to_spare

_NONE = -1


def optimum(trace: Trace, num_slots: int) -> int:
    """Misses of the clairvoyant cache with `num_slots` slots."""
    return int(optimum_by_batch(trace, num_slots).sum())


def optimum_by_batch(trace: Trace, num_slots: int) -> NDArray[np.int64]:
    """Misses [N] of the clairvoyant cache, batch by batch."""
    check_fits(trace, num_slots)
    batch_of = np.repeat(np.arange(trace.num_batches, dtype=np.int32), np.diff(trace.offsets))
    order = np.argsort(trace.keys, kind="stable")  # the uses of one key are together, in the order of time
    same = trace.keys[order[1:]] == trace.keys[order[:-1]]
    before = np.full(trace.keys.shape[0], _NONE, dtype=np.int64)
    before[order[1:][same]] = order[:-1][same]
    next_batch = np.full(trace.keys.shape[0], trace.num_batches, dtype=np.int32)  # never again: after the last
    next_batch[order[:-1][same]] = batch_of[order[1:][same]]
    misses = np.zeros(trace.num_batches, dtype=np.int64)
    _run(trace.offsets, before, next_batch, num_slots, misses)
    return misses


def check_fits(trace: Trace, num_slots: int) -> None:
    """A BudgetError if a batch has more distinct keys than there are slots."""
    needed = trace.most_keys
    if needed > num_slots:
        least = share_of(needed, trace.num_rows)
        share = share_of(min(with_some_to_spare(needed), trace.num_rows), trace.num_rows)
        spare = f", which leaves some to spare ({least} holds the batches counted)" if least != share else ""
        raise BudgetError(
            f"one batch needs {needed:,} rows at once, but the cache has {num_slots:,} slots. Take --cache {share} of the "
            f"{trace.num_rows:,} rows or more{spare}, or smaller batches (--batch-size).",
            needed,
        )


@njit(nogil=True, cache=True)
def _run(offsets: Any, before: Any, next_batch: Any, num_slots: int, misses: Any) -> None:
    num_batches = misses.size
    head = np.full(num_batches + 1, _NONE, dtype=np.int64)  # of the list of entries next used in batch t
    link = np.full(before.size, _NONE, dtype=np.int64)
    stays = np.zeros(before.size, dtype=np.bool_)
    farthest = [0]  # a heap of -t, for every list t that is not empty and some that are
    farthest.pop()
    num_free = num_slots
    for b in range(num_batches):
        for e in range(offsets[b], offsets[b + 1]):
            if before[e] == _NONE or not stays[before[e]]:
                misses[b] += 1
        head[b] = _NONE  # its rows are in use and cannot leave
        num_leaving = max(misses[b] - num_free, 0)
        num_free -= misses[b] - num_leaving
        while num_leaving > 0:  # ends: each pass removes a row from the cache, or an empty list
            t = -farthest[0]
            if head[t] == _NONE:
                heapq.heappop(farthest)
                continue
            stays[head[t]] = False
            head[t] = link[head[t]]
            num_leaving -= 1
        for e in range(offsets[b], offsets[b + 1]):
            t = int(next_batch[e])
            if head[t] == _NONE:
                heapq.heappush(farthest, -t)
            stays[e], link[e], head[t] = True, head[t], e
