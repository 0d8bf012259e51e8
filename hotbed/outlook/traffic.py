"""The run's own batches in, hits and rows moved of a mean step out.

All batches of an epoch are simulated where they are few enough, and then counts are those of the run to the row. Of more, the
first ones are: misses of the rest are taken as those of the second half that was simulated, and rows that will be made, not
copied, follow from the data set's distinct ids, since each is made once. Later epochs are a second pass over the same batches
with the cache as the first left it. Evaluations between epochs use the cache too, and are left out.

With several ranks one of them is simulated: the keys it owns, of the batches of all.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.cache import CacheCounts
from hotbed.data.dataset import Dataset
from hotbed.plan import Ahead, Replay, Replayed, Trace
from hotbed.plan.frequency import count_rows
from hotbed.plan.given import Given
from hotbed.shard import Shard


class Traffic(NamedTuple):
    """Of a mean step of a whole run, on one rank."""

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
    memory_hit_rate: float | None = None  # over rows asked below the device; None without an ssd

    @property
    def copied(self) -> float:
        """Rows that come from below."""
        return max(self.misses - self.created, 0.0)


class Course(NamedTuple):
    """What a run makes of the batches."""

    num_batches: int  # of an epoch
    epochs: int
    max_steps: int  # 0: no limit
    policy: str
    ahead: Ahead


def owned(trace: Trace, shard: Shard) -> Trace:
    """The part of a trace that one rank owns."""
    if shard.world == 1:
        return trace
    keys = torch.from_numpy(trace.keys)
    mine = (shard.owner_of(keys) == shard.rank).numpy()
    ends = np.concatenate([[0], np.cumsum(mine)])
    return Trace(trace.keys[mine], trace.counts[mine], ends[trace.offsets], trace.num_rows)


def watch(given: Given, replay: Replay, num_slots: int, course: Course, num_distinct: int) -> Traffic:
    """The cache of the run; `num_distinct` rows occur in the train split."""
    steps = course.num_batches * course.epochs
    steps = min(steps, course.max_steps) if course.max_steps else steps
    hot = given.hot(num_slots) if course.policy == "static" else None
    num_simulated = min(replay.trace.num_batches, steps)
    first = replay.run(num_slots, course.policy, course.ahead, hot=hot, stop=num_simulated, with_cells=True)
    counts = _without_warming(first.counts, hot)
    one_epoch = min(course.num_batches, steps)
    total = _carried(first, counts, num_simulated, one_epoch, num_distinct)
    if steps > one_epoch:
        later = replay.run(num_slots, course.policy, course.ahead, hot=hot, epochs=2).counts
        share = (steps - one_epoch) / num_simulated
        total = [a + share * b for a, b in zip(total, _figures(later))]
    keys, misses, created, written, lookups, missed = total
    return Traffic(
        num_batches=steps,
        num_simulated=num_simulated,
        keys=keys / steps,
        misses=misses / steps,
        created=created / steps,
        written_back=written / steps,
        lookups=lookups / steps,
        hit_rate=1 - misses / max(keys, 1),
        lookup_hit_rate=1 - missed / max(lookups, 1),
        num_cells=first.num_cells,
    )


def with_memory(traffic: Traffic, below: Traffic) -> Traffic:
    """The same over an ssd: `below` is a cache that holds what device and memory hold together."""
    from_ssd = min(below.copied, traffic.copied)
    rate = 1 - from_ssd / traffic.copied if traffic.copied else 1.0
    return traffic._replace(from_ssd=from_ssd, to_ssd=below.written_back, memory_hit_rate=rate)


def distinct_rows(dataset: Dataset) -> int:
    """Rows that the train split uses; where ids were too many to count, by the schema's estimate."""
    found = 0
    num_samples = dataset.schema.splits["train"].rows
    for feature in dataset.schema.features:
        rows, times = count_rows(feature, dataset.counts(feature.name))
        unknown = getattr(feature, "unlisted_lookups", 0) or (0 if feature.multi else num_samples - int(times.sum()))
        if getattr(feature, "counting", "exact") == "sketch" and feature.mode in ("hash", "raw"):
            estimate = max(feature.distinct, int(rows.shape[0]))
            found += _occupied(feature.rows, estimate) if feature.mode == "hash" else estimate
        else:
            found += int(rows.shape[0]) + (unknown > 0 and feature.mode == "vocabulary")
    return found


def _occupied(num_rows: int, num_ids: int) -> int:
    """Rows of a table that so many ids fall on, each by chance."""
    return round(-num_rows * math.expm1(num_ids * math.log1p(-1 / max(num_rows, 2))))


def _without_warming(counts: CacheCounts, hot: NDArray[np.int64] | None) -> CacheCounts:
    """Rows that a static cache brings in before the first batch are not of training."""
    if hot is None:
        return counts
    size = hot.shape[0]
    warming = CacheCounts(windows=1, batches=1, keys=size, misses=size, created=size, lookups=size, missed_lookups=size)
    return counts.minus(warming)


def _figures(counts: CacheCounts) -> list[float]:
    return [
        counts.keys, counts.misses, counts.created, counts.written_back, counts.lookups, counts.missed_lookups
    ]  # fmt: skip


def _carried(
    first: Replayed, counts: CacheCounts, num_simulated: int, num_batches: int, num_distinct: int
) -> list[float]:
    """Sums over an epoch (or a part of it), from those of the batches simulated."""
    figures = _figures(counts)
    if num_batches <= num_simulated:
        return [value * num_batches / max(num_simulated, 1) for value in figures]
    keys, misses, created, written, lookups, missed = figures
    tail = num_simulated // 2
    rest = num_batches - num_simulated
    more = rest * float(first.misses[tail:num_simulated].sum()) / max(num_simulated - tail, 1)
    made = min(max(num_distinct - created, 0), more)
    scale = num_batches / num_simulated
    missed_more = missed / max(misses, 1) * more
    return [keys * scale, misses + more, created + made, written + more, lookups * scale, missed + missed_more]
