"""The run's own batches -> hits and moved rows of a mean step.

If an epoch has few enough batches, all of them are simulated, and counts are those of the run to the row; later epochs are a
second pass over the same batches with a warm cache. Otherwise the first batches are simulated, and the rest is estimated from a
small epoch (sampled.py): rows missed again, written back, and later epochs. The rows that will be created are the distinct ids
of the dataset, since each is created once. Evaluations between epochs use the cache too, and are left out.

With several ranks one of them is simulated: the keys it owns, of the batches of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.cache import CacheCounts, look_ahead_for, window_length
from hotbed.data.dataset import Dataset, HotRows, num_warm
from hotbed.forecast.replay import LookAhead, Replay, ReplayResult
from hotbed.forecast.sampled import MovedRows, SampledEpoch, moved_between, uses_of
from hotbed.forecast.trace import Trace, TraceSource
from hotbed.ops.shard import Shard

_SUMS = ("keys", "misses", "created", "written_back", "lookups", "from_ssd", "to_ssd", "num_cells")
_BATCHES_DIFFER = 0.015  # of the distinct keys of a batch: those of later batches may be more or fewer


class RowTraffic(NamedTuple):
    """Rows of a mean step of a whole run, on one rank."""

    num_batches: int  # of the run
    num_simulated: int  # of its first epoch
    keys: float  # distinct, window by window
    misses: float
    created: float  # of them, rows never seen before
    written_back: float
    lookups: float
    hit_rate: float  # over distinct keys
    lookup_hit_rate: float
    from_ssd: float = 0.0  # rows
    to_ssd: float = 0.0
    num_cells: int = 0  # of the index, on a CPU, after the batches simulated
    memory_hit_rate: float | None = None  # over rows requested below the device; None without an ssd
    within: float = 0.0  # error bound of the hit rate; 0: exact as far as simulated

    @property
    def copied(self) -> float:
        """Rows that come from below."""
        return max(self.misses - self.created, 0.0)


class RunCourse(NamedTuple):
    """Length and cache settings of a run."""

    num_batches: int  # of an epoch
    epochs: int
    max_steps: int  # 0: no limit
    policy: str
    warmup: float  # share of the slots that are filled before the first step
    ahead: LookAhead


def part_of_rank(trace: Trace, shard: Shard) -> Trace:
    """The part of a trace that one rank owns."""
    if shard.world == 1:
        return trace
    keys = torch.from_numpy(trace.keys)
    return _part(trace, (shard.owner_of(keys) == shard.rank).numpy())


def part_of_tables(trace: Trace, ends: list[int], tables: tuple[int, ...]) -> Trace:
    """The part of a trace that is of some tables; keys of table f are below ends[f]."""
    return _part(trace, np.isin(np.searchsorted(np.array(ends), trace.keys, side="right"), tables))


def _part(trace: Trace, mine: NDArray[np.bool_]) -> Trace:
    ends = np.concatenate([[0], np.cumsum(mine)])
    return Trace(trace.keys[mine], trace.counts[mine], ends[trace.offsets], trace.num_rows)


def hot_of(given: TraceSource, shard: Shard, num_rows: int) -> HotRows:
    """The most frequent rows of one rank."""
    hot = given.hot(num_rows * shard.world)
    mine = (shard.owner_of(torch.from_numpy(hot.keys)) == shard.rank).numpy()
    return hot.only(np.flatnonzero(mine)[:num_rows])


class BatchKnowledge(NamedTuple):
    """What is known of the batches."""

    replay: Replay  # the first batches, as far as they were read
    hot: Callable[[int], HotRows]  # the most frequent rows, up to a number
    num_distinct: int  # rows that the train split uses
    thinned: Callable[[], SampledEpoch]  # for an epoch that was not read to its end


def simulate_run(seen: BatchKnowledge, num_slots: int, course: RunCourse) -> RowTraffic:
    """The cache of the run."""
    steps = course.num_batches * course.epochs
    steps = min(steps, course.max_steps) if course.max_steps else steps
    warm = num_warm(num_slots, course.policy, course.warmup)
    hot = seen.hot(warm) if warm else None
    num_simulated = min(seen.replay.trace.num_batches, steps)
    first = seen.replay.run(num_slots, course.policy, course.ahead, hot=hot, stop=num_simulated, with_cells=True)
    figures = _figures(_without_warming(first.counts, hot))
    one_epoch = min(course.num_batches, steps)
    within, num_cells = 0.0, first.num_cells
    if num_simulated < one_epoch:
        ends = _Ends(num_simulated, one_epoch, steps)
        rest = _estimate_rest(seen, num_slots, course, hot, ends, first)
        total, within = _extrapolated(figures, rest, ends)
        if (
            first.counts.misses < num_slots and not course.ahead.bounded
        ):  # it is not full yet, and the index still grows
            num_cells = max(num_cells, round(rest.cells_per_slot * num_slots))
    else:
        total = figures
        if steps > one_epoch:
            later = seen.replay.run(num_slots, course.policy, course.ahead, hot=hot, epochs=2).counts
            total = [a + (steps - one_epoch) / num_simulated * b for a, b in zip(total, _figures(later))]
    keys, misses, created, written, lookups, missed = total
    return RowTraffic(
        num_batches=steps,
        num_simulated=num_simulated,
        keys=keys / steps,
        misses=misses / steps,
        created=created / steps,
        written_back=written / steps,
        lookups=lookups / steps,
        hit_rate=1 - misses / max(keys, 1),
        lookup_hit_rate=1 - missed / max(lookups, 1),
        num_cells=num_cells,
        within=within,
    )


def with_memory(traffic: RowTraffic, below: RowTraffic) -> RowTraffic:
    """The same over an ssd: `below` is a cache that holds the rows of device and memory together."""
    from_ssd = min(below.copied, traffic.copied)
    rate = 1 - from_ssd / traffic.copied if traffic.copied else 1.0
    return traffic._replace(from_ssd=from_ssd, to_ssd=below.written_back, memory_hit_rate=rate)


def add_traffic(parts: list[RowTraffic]) -> RowTraffic:
    """Several caches as one."""
    first, *others = parts
    if not others:
        return first
    total = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    missed = sum((1 - part.lookup_hit_rate) * part.lookups for part in parts)
    copied = max(total["misses"] - total["created"], 0.0)
    return first._replace(
        **total,
        hit_rate=1 - total["misses"] / max(total["keys"], 1e-9),
        lookup_hit_rate=1 - missed / max(total["lookups"], 1e-9),
        memory_hit_rate=None if first.memory_hit_rate is None else 1 - total["from_ssd"] / max(copied, 1e-9),
        within=max(part.within for part in parts),
    )


def distinct_rows(dataset: Dataset, tables: tuple[int, ...] | None = None) -> int:
    """Rows that the train split uses, of some tables; an estimate of the schema if ids were too many to count."""
    every = enumerate(uses_of(dataset))
    return sum(uses.num_rows for number, uses in every if tables is None or number in tables)


def _without_warming(counts: CacheCounts, hot: HotRows | None) -> CacheCounts:
    """Without the rows that come in before the first batch."""
    if hot is None:
        return counts
    size = hot.keys.shape[0]
    warming = CacheCounts(windows=1, batches=1, keys=size, misses=size, created=size, lookups=size, missed_lookups=size)
    return counts.minus(warming)


def _figures(counts: CacheCounts) -> list[float]:
    return [
        counts.keys, counts.misses, counts.created, counts.written_back, counts.lookups, counts.missed_lookups
    ]  # fmt: skip


class _Ends(NamedTuple):
    """Batches: simulated of the first epoch, trained of it, trained in all."""

    simulated: int
    epoch: int
    run: int


class _SampleResult(NamedTuple):
    """Estimates for all rows from a small epoch."""

    prefix_misses: float  # in the batches that were simulated, for comparison
    rest: MovedRows  # in the rest of the first epoch
    later: MovedRows  # in an epoch after it; nothing where there is none
    error: float  # of the misses
    cells_per_slot: float


def _estimate_rest(
    seen: BatchKnowledge,
    num_slots: int,
    course: RunCourse,
    hot: HotRows | None,
    ends: _Ends,
    first: ReplayResult,
) -> _SampleResult:
    small, ahead = seen.thinned(), _as_far(seen.replay.trace, num_slots, course.ahead)
    stops = [ends.simulated, ends.epoch] + ([2 * ends.epoch] if ends.run > ends.epoch else [])
    prefix, epoch, *more = small.run(num_slots, course.policy, ahead, hot, stops)
    later = more[0] if more else epoch
    rest = moved_between(prefix.counts, epoch.counts, small.share)
    if ends.epoch == course.num_batches:  # every row of train has been created
        rest = rest._replace(made=float(max(seen.num_distinct - first.counts.created, 0)))
    return _SampleResult(
        prefix_misses=prefix.misses,
        rest=rest,
        later=moved_between(epoch.counts, later.counts, small.share),
        error=epoch.error,
        cells_per_slot=epoch.cells_per_slot,
    )


def _as_far(trace: Trace, num_slots: int, ahead: LookAhead) -> LookAhead:
    """The look-ahead of the run's cache, which the few rows of a small batch would not give as well."""
    num_keys = np.diff(trace.offsets)
    far = look_ahead_for(int(num_keys[0]), num_slots, ahead.look_ahead, ahead.bounded)[1]
    return LookAhead(window_length([int(num_keys.mean())] * far, num_slots, ahead.window, ahead.staged), far)


def _extrapolated(figures: list[float], sample: _SampleResult, ends: _Ends) -> tuple[list[float], float]:
    """(sums over the run, error bound of its hit rate), from the simulated batches and a small epoch."""
    keys, misses, created, written, lookups, missed = figures
    scale, epochs_more = ends.epoch / ends.simulated, (ends.run - ends.epoch) / ends.epoch
    rest, later = sample.rest, sample.later
    off = abs(sample.prefix_misses - misses) / max(keys, 1)
    more = [rest.again + rest.made, rest.made, rest.written_back, rest.missed_lookups]
    moved = [a + b for a, b in zip([misses, created, written, missed], more)]
    again = [later.again, 0.0, later.written_back, later.missed_lookups]
    misses, created, written, missed = (a + epochs_more * b for a, b in zip(moved, again))
    every = scale * (1 + epochs_more)
    within = off + 2 * sample.error / max(keys * scale, 1) + _BATCHES_DIFFER * misses / max(keys * every, 1)
    return [keys * every, misses, created, written, lookups * every, missed], within
