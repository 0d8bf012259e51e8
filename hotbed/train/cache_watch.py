"""The tables' running counters in, what the cache did in an interval of training out.

Counters only rise. An interval is the difference of two readings, less what happened beside training (evaluations and
checkpoints use the cache too). A run that goes on begins with the rows that were in the cache, but knows less of the batches
ahead, so these numbers, like all that a clock says, are not quite those of a run that never stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from hotbed.cache import CacheCounts

PER_BATCH = ("keys", "misses", "created", "evictions", "written_back", "bytes_in", "bytes_out")


class Counting(Protocol):
    """Tables, as far as this file needs them."""

    def counters(self) -> CacheCounts:
        """All that happened so far, summed over groups; zeros without a cache."""


class CacheWatch:
    """Reads the counters at the ends of intervals."""

    def __init__(self, tables: Counting) -> None:
        self._tables = tables
        self._before = tables.counters()  # what is not of the open interval: the past, and all that ran beside training

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What the cache does meanwhile is not training."""
        began = self._tables.counters()
        try:
            yield
        finally:
            self._before = self._before.plus(self._tables.counters().minus(began))

    def interval(self, seconds: float) -> dict[str, Any] | None:
        """Close an interval of so many seconds of training; None when no batch was planned in it.

        hit_rate is over the distinct keys of windows, lookup_hit_rate over look-ups, stall_share over the seconds. The
        others are means over the batches planned, a few of which may train only after the interval's end.
        """
        now = self._tables.counters()
        done, self._before = now.minus(self._before), now
        if done.batches <= 0:
            return None
        return {
            "batches": done.batches,
            "hit_rate": done.hit_rate,
            "lookup_hit_rate": max(done.lookup_hit_rate, 0.0),  # the last windows' misses may be counted a moment later
            **{name: getattr(done, name) / done.batches for name in PER_BATCH},
            "stall_share": min(done.stall_seconds / seconds, 1.0) if seconds > 0 else None,
        }
