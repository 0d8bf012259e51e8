"""The batches of a run through its cache again, without rows: when a row came in, left, and was used.

The simulator decides as training did, to the row (plan/replay.py), so nothing is recorded while training. Whether that holds
for this run is checked at the end: the rows in the replayed cache are held against those that the checkpoint says were in the
cache. A run that was resumed, or evaluated within epochs, may differ; then the share of rows that agree is told.

Memory: the distinct keys of one epoch, 20 bytes each, and 14 bytes for every row of the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.dataset import hot_keys
from hotbed.forecast.explain.passes import Pass, passes_of
from hotbed.forecast.explain.run import Opened
from hotbed.forecast.replay import CacheReplay, Replay
from hotbed.forecast.trace import Trace

_MOST_WINDOWS_AHEAD = 8  # of the checkpoint's step, that may have been planned by then


class Move(NamedTuple):
    """A row between the cache and what is below it."""

    step: int  # of the first batch of the window; of an evaluation, the step before it
    into_cache: bool
    while_training: bool


@dataclass
class Uses:
    """How often a row was looked up."""

    lookups: int = 0
    batches: int = 0
    first_step: int | None = None
    last_step: int | None = None
    evaluation_lookups: int = 0


@dataclass
class History:
    """Of one row, up to the checkpoint."""

    uses: Uses = field(default_factory=Uses)
    moves: list[Move] = field(default_factory=list)
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
    """Of all rows, up to the checkpoint."""

    lookups: NDArray[np.int64]  # [rows]
    admissions: NDArray[np.int64]  # [rows]
    evictions: NDArray[np.int64]  # [rows]
    agreement: float | None = None


class _Course:
    """The run's cache over its passes; `window` is told of every window: pass, first batch, batches planned."""

    def __init__(self, opened: Opened) -> None:
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
        self.warmed = np.zeros(0, np.int32)  # rows that a static cache had from its start

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
            hot = np.zeros(0, np.int64)
            if self._policy == "static":
                hot = hot_keys(self._opened.dataset, self._num_slots or 0)[: self._num_slots]
            assert self._num_slots is not None
            self.cache = CacheReplay(replay, self._num_slots, self._policy, hot)
            self.warmed = self.cache.rows_here()
        self.cache.turn_to(replay, one.learns)
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


def history_of(opened: Opened, key: int) -> History:
    """Of the row with this key."""
    found, course = History(), _Course(opened)
    was_here = [False]

    def used(one: Pass) -> None:
        _count_uses(found.uses, one, key)

    def window(one: Pass, first: int) -> None:
        assert course.cache is not None
        here = course.cache.slot_of(key) >= 0
        if course.windows == 0 and key in course.warmed:
            found.moves.append(Move(0, True, False))
            was_here[0] = True
        if here != was_here[0]:
            step = one.first_step + (first if one.learns else 0)
            found.moves.append(Move(step, here, one.learns))
            was_here[0] = here

    course.run(used, window)
    found.agreement, found.planned = course.agreement, course.planned
    found.evictions_per_window = course.evictions / max(course.windows, 1)
    return found


def census_of(opened: Opened) -> Census:
    """Of all rows of all tables, by key."""
    num_rows = sum(shape.rows or 0 for shape in opened.tables.values())
    census = Census(np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64))
    course = _Course(opened)

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
    """The batches that were trained, without those that were read ahead."""
    end = int(one.trace.offsets[one.num_trained])
    trace = one.trace
    return trace._replace(
        keys=trace.keys[:end], counts=trace.counts[:end], offsets=trace.offsets[: one.num_trained + 1]
    )


def _count_uses(uses: Uses, one: Pass, key: int) -> None:
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
