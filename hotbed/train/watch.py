"""The tables' running counters in, what a line of metrics.jsonl says of cache, tiers and ids out.

times   what a mean step was spent on (hotbed.telemetry.clock), and how many batches were ready when one was requested
memory  bytes of the process, and of the device where there is one
cache   what the cache did in the interval (CacheWatch), where there is one
tiers   what memory and ssd below it did in the interval, and what they hold, where there is an ssd
ids     counts of the ids of every table with dynamic ids, since the run began

Counters of tiers begin at zero in every process, so a run that was stopped and resumed has other ones. Ids are state of
training: they are saved with it and are those of a run that never stopped, to the digit.

Counters of the cache only rise. An interval is the difference of two readings, less what happened outside training (evaluations
and checkpoints use the cache too). A run that resumes begins with the rows that were in the cache, but knows less of the
batches ahead, so these numbers, like all that a clock says, are not quite those of a run that never stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hotbed.cache import CacheCounts
from hotbed.host.memory import resident_memory
from hotbed.ids import IdCounts
from hotbed.parallel.world import ALONE, World
from hotbed.store.counts import TierCounts, Tiers
from hotbed.telemetry.clock import StepClock
from hotbed.telemetry.observer import Record

CACHE_PER_BATCH = ("keys", "misses", "created", "evictions", "written_back", "bytes_in", "bytes_out")
Ids = dict[str, dict[str, int]]  # counts by name, by table
PER_BATCH = (
    "from_memory",
    "from_ssd",
    "to_ssd",
    "bytes_from_memory",
    "bytes_read",
    "bytes_written",
    "bytes_compacted",
    "ahead",
    "waits",
)


class CountingTables(Protocol):
    """Tables, as far as this file needs them."""

    def counters(self) -> CacheCounts:
        """All that happened so far, summed over groups; zeros without a cache."""


class CacheWatch:
    """Reads the counters at the ends of intervals."""

    def __init__(self, tables: CountingTables) -> None:
        self._tables = tables
        self._before = (
            tables.counters()
        )  # what is not of the open interval: the past, and all that ran outside training

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What the cache does meanwhile is not training."""
        began = self._tables.counters()
        try:
            yield
        finally:
            self._before = self._before.plus(self._tables.counters().minus(began))

    def interval(self, seconds: float) -> dict[str, Any] | None:
        """Close an interval of `seconds` of training; None when no batch was planned in it.

        hit_rate is over the distinct keys of windows, lookup_hit_rate over lookups, stall_share over the seconds. The
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
            **{name: getattr(done, name) / done.batches for name in CACHE_PER_BATCH},
            "stall_share": min(done.stall_seconds / seconds, 1.0) if seconds > 0 else None,
        }


class ReportingTables(CountingTables, Protocol):
    """Tables, as far as this file needs them."""

    clock: StepClock

    @property
    def device(self) -> torch.device:
        """Where the rows are looked up."""

    def tiers(self) -> Tiers | None:
        """Counts of memory and ssd, summed over groups; None without an ssd."""

    def id_counts(self) -> dict[str, IdCounts]:
        """Counts of every table with dynamic ids."""


class Watch:
    """Reads the counters at the ends of intervals."""

    def __init__(self, tables: ReportingTables, world: World = ALONE) -> None:
        self._tables, self._world = tables, world
        self.ids: Ids | None = None  # of all ranks, as the last line reported them
        self._cache = CacheWatch(tables)
        self._before = self._counts()  # what is not of the open interval
        self._trained = TierCounts()  # of the intervals that are closed
        self._times = tables.clock.reading()

    def begin(self) -> None:
        """Training starts now; what the clock has seen before is not of it."""
        self._tables.clock.leave()
        self._tables.clock.back()
        self._times = self._tables.clock.reading()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens meanwhile is not training."""
        began, clock = self._counts(), self._tables.clock
        clock.leave()
        then = clock.reading()
        try:
            with self._cache.aside():
                yield
        finally:
            self._times = self._times.plus(clock.reading().minus(then))
            clock.back()
            self._before = self._before.plus(self._counts().minus(began))

    def line(self, seconds: float) -> Record:
        """Close an interval of `seconds` of training: what there is to report of it."""
        cache, tiers = self._cache.interval(seconds), self._tables.tiers()
        now = self._tables.clock.reading()
        times, self._times = now.minus(self._times).line(), now
        found: Record = {} if times is None else {"times": times}
        found["memory"] = memory_now(self._tables.device)
        found |= {} if cache is None else {"cache": cache}
        if tiers is not None:
            done, self._before = tiers.counts.minus(self._before), tiers.counts
            self._trained = self._trained.plus(done)
            if cache is not None:
                means = {name: getattr(done, name) / cache["batches"] for name in PER_BATCH}
                found["tiers"] = {"memory_hit_rate": _hit_rate(done, tiers), **means, **_standing(tiers)}
        self.ids = ids_of(self._tables, self._world)
        return {**found, "ids": self.ids} if self.ids else found

    def tiers(self) -> dict[str, Any] | None:
        """For the summary: the demand of training on the tiers in this process, and how they stand; None without an ssd."""
        tiers = self._tables.tiers()
        if tiers is None:
            return None
        demand = {name: getattr(self._trained, name) for name in PER_BATCH}
        return {"memory_hit_rate": _hit_rate(self._trained, tiers), **demand, **_standing(tiers)}

    def _counts(self) -> TierCounts:
        tiers = self._tables.tiers()
        return TierCounts() if tiers is None else tiers.counts


def ids_of(tables: ReportingTables, world: World = ALONE) -> Ids | None:
    """Counts since the run began and rows now, by table, of all ranks; None where no table has dynamic ids."""
    mine = {name: {**counts._asdict(), "rows": counts.rows} for name, counts in tables.id_counts().items()}
    if not mine or world.size == 1:
        return mine or None
    ranks = world.gather(mine)
    return {name: {count: sum(one[name][count] for one in ranks) for count in mine[name]} for name in mine}


def memory_now(device: torch.device) -> dict[str, int | None]:
    """Bytes; the peak is since the process began."""
    found: dict[str, int | None] = {"resident_bytes": resident_memory()}
    if device.type == "cuda":
        found["device_bytes"] = torch.cuda.memory_allocated(device)
        found["device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def _hit_rate(counts: TierCounts, tiers: Tiers) -> float | None:
    """Over rows requested from the store; None where memory is the cache, or nothing was requested."""
    return counts.from_memory / counts.requested if counts.requested and tiers.sizes.memory_slots else None


def _standing(tiers: Tiers) -> dict[str, Any]:
    """What the process has written so far, evaluations and checkpoints too, and sizes now."""
    counts, sizes = tiers
    return {
        "wear": counts.bytes_written,
        "compactions": counts.compactions,
        **sizes._asdict(),
        "live_share": sizes.live_share,
        "resident_bytes": resident_memory(),
    }
