"""How often every row is used in an epoch -> a small epoch with a share of the rows: what a cache does later in a run.

`prepare` counted the ids of train, so the number of uses of each row is known; their places in the epoch are drawn at random,
as shuffling does. A random share of the rows, over all batches, through a cache with the same share of the slots, has the hit
rate of all rows (SHARDS, in space and not in time): the cache fills, and rows become known, as in the whole epoch, for a small
part of its lookups. Order is lost: ids that come in bursts hit more often than forecast here.

Shapes: N batches of an epoch, E epochs, K rows taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.cache import CacheCounts
from hotbed.data.dataset import Dataset, HotRows, count_rows
from hotbed.data.schema import IdFeature
from hotbed.forecast.replay import CacheReplay, LookAhead, Replay
from hotbed.forecast.replay_kernels import IndexSize
from hotbed.forecast.trace import Trace, rows_of
from hotbed.ops.shard import SPREAD, WHOLE, Shard

_SEED = 1
_LEAST_SLOTS = 256  # below this, the size of an index is mostly rounding
_MOST_USES = 8  # of a row in a mean batch; with more it is in every batch anyway, and only takes memory


class FeatureUses(NamedTuple):
    """Uses of the rows of one feature's table in an epoch of train."""

    rows: NDArray[np.int64]
    times: NDArray[np.int64]
    other_rows: int = 0  # that were too many to count, by the schema's estimate
    other_times: int = 0

    @property
    def num_rows(self) -> int:
        return int(self.rows.shape[0]) + self.other_rows


class SampleOptions(NamedTuple):
    """The small epoch to be drawn."""

    num_batches: int  # of an epoch
    epochs: int  # that are drawn
    same_order: bool  # in all of them
    most_lookups: int  # in all of them
    shard: Shard = WHOLE  # the rank that is looked at
    features: tuple[int, ...] | None = None  # numbers of those that are looked at; None: all

    def has(self, feature: int) -> bool:
        return self.features is None or feature in self.features


class SampleCounts(NamedTuple):
    """The work of a small cache so far."""

    counts: CacheCounts  # of the small epoch
    misses: float  # of all rows
    error: float  # standard error of these, from taking a share of the rows
    cells_per_slot: float  # of the index, on a CPU; 0: the cache is too small for an estimate


class SampledEpoch(NamedTuple):
    """A small epoch, and how small."""

    replay: Replay
    keys: NDArray[np.int64]  # [K], ascending: the key of every number
    share: float  # of a rank's rows that are in it

    def run(
        self, num_slots: int, policy: str, ahead: LookAhead, hot: HotRows | None, stops: list[int]
    ) -> list[SampleCounts]:
        """Run it through the cache of a rank once; the counts at each stop, a number of planned batches."""
        kept = None
        if hot is not None:  # numbers stand for keys here
            here = hot.only(np.isin(hot.keys, self.keys, assume_unique=True))
            kept = here._replace(keys=np.searchsorted(self.keys, here.keys))
        slots = self.slots(num_slots)
        cache = CacheReplay(self.replay, slots, policy, kept)
        cache.cells = IndexSize(slots, self.keys.shape[0])
        warmed, found = int(cache.counts.misses), list[SampleCounts]()
        for planned in cache.windows(ahead):
            while len(found) < len(stops) and planned >= stops[len(found)]:
                error = math.sqrt(float(np.square(cache.missed_rows).sum()) * (1 - self.share)) / self.share
                misses = (cache.counts.misses - warmed) / self.share
                cells = cache.cells.num_cells / slots if slots >= _LEAST_SLOTS else 0.0
                found.append(SampleCounts(cache.counts, misses, error, cells))
            if len(found) == len(stops):
                break
        return found

    def slots(self, num_slots: int) -> int:
        """Slots of the small cache that represents one of `num_slots`."""
        return max(round(num_slots * self.share), self.replay.trace.most_keys, 1)


def uses_of(dataset: Dataset) -> Iterator[FeatureUses]:
    """Table by table, rows that are used."""
    num_samples = dataset.schema.splits["train"].rows
    for name, features in dataset.schema.tables.items():
        feature = features[0]
        rows, times = count_rows(feature, dataset.counts(name))
        unknown = sum(one.unlisted_lookups for one in features)
        if not unknown and not any(one.multi for one in features):
            unknown = max(num_samples * len(features) - int(times.sum()), 0)
        if feature.counting == "sketch" and feature.mode in ("hash", "raw"):
            yield FeatureUses(rows, times, max(_estimate(feature, rows) - int(rows.shape[0]), 0), unknown)
        elif unknown and feature.mode == "vocabulary":
            yield FeatureUses(np.concatenate([[0], rows]), np.concatenate([[unknown], times]))
        else:
            yield FeatureUses(rows, times)


def draw_small_epoch(dataset: Dataset, wanted: SampleOptions) -> SampledEpoch:
    """A small epoch of a rank's rows, or several in a row."""
    some = (uses for number, uses in enumerate(uses_of(dataset)) if wanted.has(number))
    num_lookups = sum(int(uses.times.sum()) + uses.other_times for uses in some) * wanted.epochs
    share = min(1.0, wanted.most_lookups * wanted.shard.world / max(num_lookups, 1))
    rng = np.random.default_rng(_SEED)
    keys, times = _taken(dataset, share, wanted, rng)
    places = np.repeat(np.arange(keys.shape[0]), times)
    batches = rng.integers(0, wanted.num_batches, places.shape[0])
    parts = []
    for epoch in range(wanted.epochs):
        if epoch and not wanted.same_order:
            batches = rng.integers(0, wanted.num_batches, places.shape[0])
        parts.append((batches + epoch * wanted.num_batches) * keys.shape[0] + places)
    entries, counts = np.unique(np.concatenate(parts), return_counts=True)
    ends = np.arange(wanted.epochs * wanted.num_batches + 1) * keys.shape[0]
    trace = Trace(
        entries % max(keys.shape[0], 1), counts.astype(np.int32), np.searchsorted(entries, ends), keys.shape[0]
    )
    return SampledEpoch(Replay(trace, every_row=True), keys, share)


class MovedRows(NamedTuple):
    """Moves of all rows of a rank, between two batches."""

    again: float  # misses of rows that were in the cache before
    made: float
    written_back: float
    missed_lookups: float


def moved_between(before: CacheCounts, after: CacheCounts, share: float) -> MovedRows:
    """From counts of a small epoch."""
    done = after.minus(before)
    figures = (done.misses - done.created, done.created, done.written_back, done.missed_lookups)
    return MovedRows(*(figure / share for figure in figures))


def _taken(
    dataset: Dataset, share: float, wanted: SampleOptions, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(keys [K], uses of each [K]) of a rank; rows that were too many to count have keys above all others.

    Of the rows of a table in the order of their uses every k-th is taken, so that the uses of the sample hardly depend on
    chance: a third of the error of a random draw (criteo-like, caches of 0.5 %).
    """
    keys, times = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    num_rows = rows_of(dataset)
    base, above = 0, sum(num_rows)
    others, shard = [], wanted.shard
    owners = [owner for _, owner in shard.tables] or [SPREAD] * len(num_rows)
    for number, (uses, rows) in enumerate(zip(uses_of(dataset), num_rows)):
        if not wanted.has(number):
            base += rows
            continue
        order = np.argsort(-uses.times, kind="stable")
        if shard.world > 1:
            order = order[(shard.owner_of(torch.from_numpy(base + uses.rows[order])) == shard.rank).numpy()]
        steps = np.floor(np.arange(order.shape[0] + 1) * share + rng.random())
        taken = np.sort(order[np.diff(steps) > 0])
        keys.append(base + uses.rows[taken])
        times.append(np.minimum(uses.times[taken], _MOST_USES * wanted.num_batches))
        part = 1 / shard.world if owners[number] == SPREAD else float(owners[number] == shard.rank)
        count = round(uses.other_rows * share * part)
        if count:
            mean = uses.other_times / uses.other_rows
            others.append(np.floor(mean + rng.random(count)).astype(np.int64))
        base += rows
    keys.append(above + np.arange(sum(part.shape[0] for part in others)))
    return np.concatenate(keys), np.concatenate([*times, *others])


def _estimate(feature: IdFeature, rows: NDArray[np.int64]) -> int:
    estimate = max(feature.distinct, int(rows.shape[0]))
    return _occupied(feature.rows, estimate) if feature.mode == "hash" else estimate


def _occupied(num_rows: int, num_ids: int) -> int:
    """Rows of a table that are hit by `num_ids` random ids."""
    return round(-num_rows * math.expm1(num_ids * math.log1p(-1 / max(num_rows, 2))))
