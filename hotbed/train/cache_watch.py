"""The tables' running counters in, what the cache did in an interval of training out.

Counters only rise. An interval is the difference of two readings, less what happened beside training (evaluations and
checkpoints use the cache too). A run that goes on begins with an empty cache, so these numbers, like all that a clock
says, are not those of a run that never stopped.
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
        self._before = self._counts()
        self._beside: dict[str, float] = {}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What the cache does meanwhile is not training."""
        before = self._counts()
        try:
            yield
        finally:
            spent = _less(self._counts(), before)
            self._beside = {name: self._beside.get(name, 0) + value for name, value in spent.items()}

    def interval(self, seconds: float) -> dict[str, Any] | None:
        """Close an interval of so many seconds of training; None when no batch was planned in it.

        hit_rate is over the distinct keys of windows, lookup_hit_rate over look-ups, stall_share over the seconds. The
        others are means over the batches planned, a few of which may train only after the interval's end.
        """
        now = self._counts()
        done = _less(_less(now, self._before), self._beside)
        self._before, self._beside = now, {}
        if done["batches"] <= 0:
            return None
        return {
            "batches": done["batches"],
            "hit_rate": _share(done["hits"], done["keys"]),
            "lookup_hit_rate": _share(done["lookups"] - done["missed_lookups"], done["lookups"]),
            **{name: done[name] / done["batches"] for name in PER_BATCH},
            "stall_share": _share(done["stall_seconds"], seconds),
        }

    def _counts(self) -> dict[str, float]:
        return self._tables.counters()._asdict()


def _less(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def _share(part: float, whole: float) -> float | None:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else None
