"""A trace in, what a cache would do with it out: hits, misses, evictions, to the row those of training.

The very Cache and policies that train run here, on the CPU and without rows, so nothing has to be kept in agreement but the
order of events: some batches are known, then the next window is planned. Bytes and waiting are not known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.cache import (
    DEFAULT_POLICY,
    MOST_AHEAD,
    Arrival,
    Cache,
    CacheCounts,
    CachePlan,
    make_policy,
    window_length,
)
from hotbed.errors import ConfigError
from hotbed.ops.index import AHEAD_BITS
from hotbed.plan.optimum import check_fits
from hotbed.plan.trace import Trace


def simulate(
    trace: Trace,
    num_slots: int,
    policy: str = DEFAULT_POLICY,
    *,
    window: int | None = None,
    look_ahead: int | None = None,
    hot: NDArray[np.int64] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> CacheCounts:
    """What training on the trace counts.

    Args:
        trace: the batches.
        num_slots: rows that fit in the cache.
        policy: which rows stay.
        window: batches planned together, at most; None is what `hotbed.prefetch` chooses.
        look_ahead: batches known in advance; None is what `hotbed.prefetch` chooses, 0 the plain loop, which knows none.
        hot: keys that are told to the policy, ascending; they are brought in first and counted as one batch, as in training.
        progress: called with the number of batches planned.
    """
    if look_ahead is not None and not 0 <= look_ahead <= MOST_AHEAD:
        raise ConfigError(f"look_ahead is {look_ahead}; it can be 0 to {MOST_AHEAD}.")
    if window is not None and not 1 <= window <= AHEAD_BITS:
        raise ConfigError(f"window is {window}; it can be 1 to {AHEAD_BITS}.")
    check_fits(trace, num_slots)
    run = _Run(trace, num_slots, policy, np.zeros(0, np.int64) if hot is None else hot)
    if look_ahead == 0:
        run.plain(progress)
    else:
        run.ahead(window, None if look_ahead is None else max(look_ahead, window or 1), progress)
    return run.counts


class _Run:
    """One cache and what it has done."""

    def __init__(self, trace: Trace, num_slots: int, policy: str, hot: NDArray[np.int64]) -> None:
        self.counts = CacheCounts()
        self._trace = trace
        self._cache = Cache(num_slots, make_policy(policy), torch.device("cpu"))
        # by key; of a large table only the pages that are used take memory
        self._written = np.zeros(trace.num_rows, dtype=np.bool_)  # the store holds the row
        self._missed = np.zeros(trace.num_rows, dtype=np.bool_)  # in this window
        if hot.shape[0]:
            self._cache.keep(torch.from_numpy(hot))
            plan = self._cache.plan([self._cache.arrive_at_once(torch.from_numpy(hot), None)], False)
            self._count(plan, num_batches=1, lookups=hot.shape[0], missed_lookups=plan.num_misses)

    def plain(self, progress: Callable[[int], None]) -> None:
        """Every batch when it comes."""
        for number in range(self._trace.num_batches):
            arrival = self._cache.arrive_at_once(self._keys(number), None)
            self._take_note([number], self._cache.plan([arrival], True))
            progress(number + 1)

    def ahead(self, window: int | None, given: int | None, progress: Callable[[int], None]) -> None:
        """Window after window; before one is planned, as many batches are known as the first one asked for."""
        cache, num_batches = self._cache, self._trace.num_batches
        waiting: deque[Arrival] = deque()
        known = planned = 0
        look_ahead = 1
        while planned < num_batches:
            while len(waiting) < look_ahead and known < num_batches:
                waiting.append(cache.arrive(self._keys(known), None))
                known += 1
                if known == 1:
                    look_ahead = cache.look_ahead(waiting[0].num_keys, given)
            length = window_length([arrival.num_keys for arrival in waiting], cache.num_slots, window)
            self._take_note(
                range(planned, planned + length), cache.plan([waiting.popleft() for _ in range(length)], True)
            )
            planned += length
            progress(planned)

    def _keys(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self._trace.batch(number))

    def _take_note(self, batches: Sequence[int], plan: CachePlan) -> None:
        """Count one window; every row of a batch is looked up as often as the trace says."""
        trace, misses = self._trace, plan.miss_keys.numpy()
        self._missed[misses] = True
        lookups = missed_lookups = 0
        for number in batches:
            times = trace.counts[trace.offsets[number] : trace.offsets[number + 1]]
            lookups += int(times.sum())
            missed_lookups += int(times[self._missed[trace.batch(number)]].sum())
        self._missed[misses] = False
        self._count(plan, len(batches), lookups, missed_lookups)

    def _count(self, plan: CachePlan, num_batches: int, lookups: int, missed_lookups: int) -> None:
        num_written = int(self._written[plan.miss_keys.numpy()].sum())
        self._written[plan.victim_keys.numpy()] = True
        self.counts = self.counts.plus(
            CacheCounts(
                windows=1,
                batches=num_batches,
                keys=plan.num_keys,
                hits=plan.num_hits,
                misses=plan.num_misses,
                created=plan.num_misses - num_written,
                evictions=plan.num_evictions,
                written_back=plan.num_victims,
                lookups=lookups,
                missed_lookups=missed_lookups,
            )
        )
