"""Replays the batches of a run through its cache, without rows: when a row came in, left, and was used.

The simulator makes the decisions of training, to the row (forecast/replay.py), so nothing is recorded while training. Whether
that holds for this run is checked at the end: the rows in the replayed cache are compared with those that were in the cache of
the checkpoint. A run that was resumed, or evaluated within epochs, may differ; then the share of rows that agree is reported.

Memory: the distinct keys of one epoch, 20 bytes each, and 14 bytes for every row of the tables.

`NextUse`: the uses of an id so far, and its next use: exact up to the last epoch, by rate after it. Batches are read again, ids
only. The batches of all ranks together are those that one process would read.

`Pass`: the batches of the run up to its checkpoint: epochs, and the evaluations between them. Every pass is read from the data
files in the order of training, ids only. One pass is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.data.dataset import hot_rows, num_warm
from hotbed.data.loader.loader import Loader
from hotbed.forecast.explain.run import OpenRun, RowRequest
from hotbed.forecast.replay import CacheReplay, Replay
from hotbed.forecast.trace import Trace, read_trace
from hotbed.types import Batch

_MOST_WINDOWS_AHEAD = 8  # that may have been planned beyond the checkpoint's step


class RowMove(NamedTuple):
    """A row moves between the cache and the tier below."""

    step: int  # of the first batch of the window; of an evaluation, the step before it
    into_cache: bool
    while_training: bool


@dataclass
class UseCounts:
    """How often a row was looked up."""

    lookups: int = 0
    batches: int = 0
    first_step: int | None = None
    last_step: int | None = None
    evaluation_lookups: int = 0


@dataclass
class History:
    """The history of one row up to the checkpoint."""

    uses: UseCounts = field(default_factory=UseCounts)
    moves: list[RowMove] = field(default_factory=list)
    agreement: float | None = None  # of the rows in the cache with those of the checkpoint; None: there is no cache
    evictions_per_window: float = 0.0
    planned: int = 0  # batches of the open epoch that were planned

    @property
    def admissions(self) -> int:
        return sum(move.into_cache for move in self.moves)

    @property
    def evictions(self) -> int:
        return sum(not move.into_cache for move in self.moves)


@dataclass
class Census:
    """Counts of all rows up to the checkpoint."""

    lookups: NDArray[np.int64]  # [rows]
    admissions: NDArray[np.int64]  # [rows]
    evictions: NDArray[np.int64]  # [rows]
    agreement: float | None = None


class _CacheReplay:
    """The run's cache over its passes; `window` is called for every window with its pass and first batch."""

    def __init__(self, opened: OpenRun) -> None:
        tables = opened.config.tables
        held = opened.cache_of(next(iter(opened.tables)))
        self._opened = opened
        self._ahead = opened.ahead
        self._policy = tables.policy
        self._num_slots = None if held is None else int(held["device"][0])
        self._saved = None if held is None else np.sort(held["device.keys"].numpy().astype(np.int64))
        self.cache: CacheReplay | None = None
        self.agreement: float | None = None
        self.planned = self.windows = self.evictions = 0
        self.warmed = np.zeros(0, np.int32)  # rows that the cache has from the start

    def run(
        self,
        each_pass: Callable[[Pass], None],
        window: Callable[[Pass, int], None] = lambda one, first: None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        for one in passes_of(self._opened):
            each_pass(one)
            if self._num_slots is not None:
                self._pass(one, window)
                done()
        if self.cache is not None and self.agreement is None:
            self.agreement = self._agreement()

    def _pass(self, one: Pass, window: Callable[[Pass, int], None]) -> None:
        replay = Replay(one.trace, every_row=True)
        if self.cache is None:
            assert self._num_slots is not None
            warm = num_warm(self._num_slots, self._policy, self._opened.config.tables.warmup)
            hot = hot_rows(self._opened.dataset, warm) if warm else None
            self.cache = CacheReplay(replay, self._num_slots, self._policy, hot)
            self.warmed = self.cache.rows_here()
        self.cache.continue_with(replay, one.learns)
        first = beyond = 0
        for planned in self.cache.windows(self._ahead):
            window(one, first)
            self.windows += 1
            first = self.planned = planned
            if one.stop is not None and planned >= one.stop:
                self.agreement = self._agreement()
                beyond += 1
                if self.agreement == 1.0 or beyond > _MOST_WINDOWS_AHEAD:
                    break
        self.evictions += self.cache.counts.evictions

    def _agreement(self) -> float:
        assert self.cache is not None
        assert self._saved is not None
        here = np.sort(self.cache.rows_here().astype(np.int64))
        same = np.intersect1d(here, self._saved, assume_unique=True).shape[0]
        return float(same / max(here.shape[0], self._saved.shape[0], 1))


def history_of(opened: OpenRun, key: int) -> History:
    """The history of the row with this key."""
    found, course = History(), _CacheReplay(opened)
    was_here = [False]

    def used(one: Pass) -> None:
        _count_uses(found.uses, one, key)

    def window(one: Pass, first: int) -> None:
        assert course.cache is not None
        here = course.cache.slot_of(key) >= 0
        if course.windows == 0 and key in course.warmed:
            found.moves.append(RowMove(0, True, False))
            was_here[0] = True
        if here != was_here[0]:
            step = one.first_step + (first if one.learns else 0)
            found.moves.append(RowMove(step, here, one.learns))
            was_here[0] = here

    course.run(used, window)
    found.agreement, found.planned = course.agreement, course.planned
    found.evictions_per_window = course.evictions / max(course.windows, 1)
    return found


def census_of(opened: OpenRun) -> Census:
    """Counts of all rows of all tables, by key."""
    num_rows = sum(shape.rows or 0 for shape in opened.tables.values())
    census = Census(np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64))
    course = _CacheReplay(opened)

    def used(one: Pass) -> None:
        if one.learns:
            trace = _trained(one)
            census.lookups += np.bincount(trace.keys, trace.counts, minlength=num_rows).astype(np.int64)

    def done() -> None:
        assert course.cache is not None
        census.admissions += course.cache.missed_rows

    course.run(used, done=done)
    if course.cache is not None:
        census.admissions[course.warmed] += 1
        census.evictions = census.admissions.copy()
        census.evictions[course.cache.rows_here()] -= 1
    census.agreement = course.agreement
    return census


def _trained(one: Pass) -> Trace:
    """The batches that were trained, without those read ahead."""
    end = int(one.trace.offsets[one.num_trained])
    trace = one.trace
    return trace._replace(
        keys=trace.keys[:end], counts=trace.counts[:end], offsets=trace.offsets[: one.num_trained + 1]
    )


def _count_uses(uses: UseCounts, one: Pass, key: int) -> None:
    trace = _trained(one)
    entries = np.flatnonzero(trace.keys == key)
    lookups = int(trace.counts[entries].sum())
    if not one.learns:
        uses.evaluation_lookups += lookups
    elif entries.shape[0]:
        batches = np.searchsorted(trace.offsets, entries, side="right") - 1
        steps = one.first_step + batches
        uses.lookups += lookups
        uses.batches += int(entries.shape[0])
        uses.first_step = int(steps[0]) if uses.first_step is None else uses.first_step
        uses.last_step = int(steps[-1])


class NextUse(NamedTuple):
    """When a row is looked up next."""

    step: int | None  # exact; None: in no batch that is left
    every: float | None  # steps between two uses so far; None: it was never used


def uses_of(opened: OpenRun, request: RowRequest) -> UseCounts:
    """Up to the checkpoint."""
    uses = UseCounts()
    for step, lookups in _lookups(opened, request, 0, opened.step):
        if lookups:
            uses.lookups += lookups
            uses.batches += 1
            uses.first_step = step if uses.first_step is None else uses.first_step
            uses.last_step = step
    return uses


def next_use_of(opened: OpenRun, request: RowRequest, uses: UseCounts) -> NextUse:
    """Read the remaining batches until the row is used."""
    every = opened.step / uses.batches if uses.batches else None
    coming = _lookups(opened, request, opened.step, opened.last_step)
    with closing(coming):
        return NextUse(next((step for step, lookups in coming if lookups), None), every)


def _lookups(opened: OpenRun, request: RowRequest, done: int, end: int) -> Generator[tuple[int, int], None, None]:
    """(step, lookups of the row) for the steps after `done`, up to `end`."""
    data, features = opened.config.data, opened.dataset.schema.tables[request.table]
    loader = Loader(
        opened.dataset, "train", batch_size=data.batch_size, shuffle=data.shuffle, seed=opened.config.train.seed
    )
    singles = [one.name for one in opened.dataset.schema.features if not one.multi]

    def count(batch: Batch) -> int:
        parts = [
            batch.bags[one.name].values if one.multi else batch.ids[:, singles.index(one.name)] for one in features
        ]
        values, hashed = torch.cat(parts), features[0].mode == "hash" and request.row is not None
        return int(((values.remainder(features[0].rows) if hashed else values) == request.id).sum())

    step = done
    while step < end:
        epoch, first = divmod(step, opened.num_batches)
        with closing(loader.id_batches(epoch, first)) as batches:
            for batch in batches:
                step += 1
                yield step, count(batch)
                if step == end:
                    return


class Pass(NamedTuple):
    """Batches that were read in one pass."""

    trace: Trace
    learns: bool  # an epoch of training; else an evaluation
    first_step: int  # of its first batch; of an evaluation, the step before it
    stop: int | None = None  # batches that were trained; None: all

    @property
    def num_trained(self) -> int:
        return self.trace.num_batches if self.stop is None else self.stop


def passes_of(opened: OpenRun) -> Iterator[Pass]:
    """In the order of the run, up to its checkpoint."""
    every, num_batches = opened.config.train.eval_every, opened.num_batches
    held_out = opened.dataset.schema.splits.get("valid")
    evaluates = held_out is not None and held_out.rows > 0
    for epoch in range(opened.epoch):
        yield Pass(opened.trace(epoch), True, 1 + epoch * num_batches)
        step = (epoch + 1) * num_batches
        due = step % every == 0 if every else True
        if evaluates and due and step <= opened.evaluated_step:
            yield Pass(_evaluation(opened), False, step)
    if opened.batch:
        first = 1 + opened.epoch * num_batches
        yield Pass(opened.trace(opened.epoch, opened.batch), True, first, opened.batch)


def doubts(opened: OpenRun) -> list[str]:
    """Events that the passes leave out and that may have changed the cache."""
    found = []
    if opened.config.train.eval_every and opened.dataset.schema.splits.get("valid"):
        found.append("evaluations within an epoch (train.eval_every) are left out")
    if opened.config.train.checkpoint_every:
        found.append("batches that were ready when a checkpoint was taken (train.checkpoint_every) were planned twice")
    return found


def _evaluation(opened: OpenRun) -> Trace:
    return read_trace(opened.dataset, batch_size=opened.config.data.eval_batch_size, split="valid")
