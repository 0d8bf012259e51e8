"""A trace -> what a cache does with it, window by window: the decisions of the cache that trains, from the whole trace.

Rows are numbered without gaps once, and every entry gets the next use of its row; any number of caches can then run over the
trace. Decisions are those of hotbed/cache, to the row (tests/forecast/test_simulate.py compares them): the policies are the
same functions, and slots with equal scores leave in the order of their keys. The cache learns next uses from bits of batches
ahead; here they come from the trace: 11 to 175 million lookups a second on one core instead of 3 to 20.

Memory: 8 bytes per entry and 26 per slot; 9 bytes per row that occurs, and 5 for every row of the tables while they are
numbered (above 2**27 rows they are sorted instead).

Shapes: N batches, E distinct keys of all batches, batch by batch, D distinct keys, S slots.

`simulate`: a trace -> hits, misses and evictions of one cache, equal to those of training. To run several caches over one
trace, make a Replay of it first. Bytes and waiting times are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.cache import (
    DEFAULT_POLICY,
    MOST_AHEAD,
    CacheCounts,
    bounded_cells,
    look_ahead_for,
    make_policy,
    window_length,
)
from hotbed.data.dataset import HotRows
from hotbed.errors import ConfigError
from hotbed.forecast import replay_kernels as kernels
from hotbed.forecast.optimum import check_fits
from hotbed.forecast.replay_kernels import IndexSize
from hotbed.forecast.trace import Trace
from hotbed.ops.index import AHEAD_BITS, MOST_USES

_MOST_NUMBERED = 1 << 27  # rows of tables that are numbered by an array
_SAMPLED = 2048  # slots whose scores show how low those of the victims are


class ReplayResult(NamedTuple):
    """The work of one cache."""

    counts: CacheCounts
    misses: NDArray[np.int64]  # [N], those of a window are at its first batch
    created: NDArray[np.int64]  # [N], likewise
    missed_rows: NDArray[np.int64]  # [D], misses of every row, in the order of Replay.keys
    num_cells: int = 0  # of the index at the end, on a CPU, if requested


class LookAhead(NamedTuple):
    """Batches planned together at most, and batches known in advance; None: as `hotbed.prefetch` chooses."""

    window: int | None = None
    look_ahead: int | None = None  # 0 is the plain loop, without look-ahead
    bounded: bool = False  # the cache is a budget in bytes, which limits the batches in its index
    staged: int | None = None  # rows of a window that may be on their way; None: not limited


AUTOMATIC = LookAhead()


class Replay:
    """A prepared trace; `every_row`: rows that do not occur are numbered too, so that several traces agree."""

    def __init__(self, trace: Trace, *, every_row: bool = False) -> None:
        self.trace = trace
        if every_row:
            self.keys, self.rows = np.arange(trace.num_rows), trace.keys.astype(np.int32)
        else:
            self.keys, self.rows = _numbered(trace.keys, trace.num_rows)
        self._next = np.empty(self.rows.shape[0], dtype=np.int32)
        kernels.number_next(self.rows, trace.offsets, self.keys.shape[0], self._next)
        sums = np.concatenate([[0], np.cumsum(trace.counts, dtype=np.int64)])
        self._lookups = sums[trace.offsets[1:]] - sums[trace.offsets[:-1]]  # [N]
        self._num_keys: list[int] = np.diff(trace.offsets).tolist()

    def run(
        self,
        num_slots: int,
        policy: str,
        ahead: LookAhead = AUTOMATIC,
        *,
        hot: HotRows | None = None,
        epochs: int = 1,
        stop: int | None = None,
        with_cells: bool = False,
        progress: Callable[[int], None] = lambda done: None,
    ) -> ReplayResult:
        """Run the trace through one cache `epochs` times; figures are those of the last epoch, of its first `stop` batches.

        `hot` are rows that are brought in first, as one batch that is counted.
        """
        check_fits(self.trace, num_slots)
        cache = CacheReplay(self._knowing(hot), num_slots, policy, hot)
        if with_cells and not ahead.bounded:
            cache.cells = IndexSize(num_slots, cache.missed_rows.shape[0])
        for _ in range(epochs - 1):
            cache.pass_over(ahead, lambda done: None)
            cache.reset_counts()
        cache.pass_over(ahead, progress, stop)
        num_cells = bounded_cells(num_slots, "cpu") if ahead.bounded else 0
        num_cells = num_cells if cache.cells is None else cache.cells.num_cells
        return ReplayResult(cache.counts, cache.misses, cache.created, cache.missed_rows, num_cells)

    def rows_of(self, number: int) -> NDArray[np.int32]:
        """The rows of a batch."""
        return self.rows[self.trace.offsets[number] : self.trace.offsets[number + 1]]

    def _knowing(self, hot: HotRows | None) -> Replay:
        """The same trace with a number for each of these rows, also if it is never looked up."""
        every = self.keys if hot is None else np.union1d(self.keys, hot.keys)
        if every.shape[0] == self.keys.shape[0]:
            return self
        other = copy(self)
        other.keys, other.rows = every, np.searchsorted(every, self.keys).astype(np.int32)[self.rows]
        return other


class CacheReplay:
    """One cache over a trace."""

    def __init__(self, replay: Replay, num_slots: int, policy: str, hot: HotRows | None) -> None:
        self.num_slots = num_slots
        self._replay = replay
        self._policy = make_policy(policy)
        self._score = kernels.score_kernel(self._policy)
        num_rows = replay.keys.shape[0]
        self._slot_of = np.full(num_rows, -1, dtype=np.int32)
        self._stored = np.zeros(num_rows, dtype=np.uint8)
        self._hot_rows = np.zeros(num_rows, dtype=np.uint8)
        self._row_in, self._last, self._uses, self._nxt, self._used_in = (
            np.zeros(num_slots, dtype=np.int32) for _ in range(5)
        )
        self._dirty, self._hot = np.zeros(num_slots, dtype=np.uint8), np.zeros(num_slots, dtype=np.uint8)
        self._scores = np.empty(num_slots, dtype=np.int32)
        self._listed = np.empty((3, 0), dtype=np.int32)
        self._used = self._clock = 0
        self._num_batches = replay.trace.num_batches
        self.cells: IndexSize | None = None
        self.learns = True
        self.reset_counts()
        if hot is not None and hot.keys.shape[0]:
            self._warm(np.searchsorted(replay.keys, hot.keys).astype(np.int32), hot.uses)

    def continue_with(self, replay: Replay, learns: bool) -> None:
        """Continue with other batches, whose rows have the same numbers; batches that do not learn leave rows clean."""
        self._replay, self._num_batches, self.learns = replay, replay.trace.num_batches, learns
        self.reset_counts()

    def slot_of(self, row: int) -> int:
        """The slot of a row; -1: none."""
        return int(self._slot_of[row])

    def rows_here(self) -> NDArray[np.int32]:
        """The rows in the cache, in no order."""
        return self._row_in[: self._used].copy()

    def reset_counts(self) -> None:
        """Reset the counts; rows stay in the cache."""
        self.counts = CacheCounts()
        self.misses, self.created = (np.zeros(self._num_batches, dtype=np.int64) for _ in range(2))
        self.missed_rows = np.zeros(self._slot_of.shape[0], dtype=np.int64)

    def pass_over(self, ahead: LookAhead, progress: Callable[[int], None], stop: int | None = None) -> None:
        """Run the whole trace, window after window, or its first `stop` batches."""
        for planned in self.windows(ahead):
            progress(planned)
            if planned >= (stop or self._num_batches):
                return

    def windows(self, ahead: LookAhead) -> Iterator[int]:
        """Plan window after window; yields the number of planned batches."""
        plain, num_keys, num_slots = ahead.look_ahead == 0, self._replay._num_keys, self.num_slots
        stride, known = 1, 0
        if self._used:
            self._set_first_uses()
        if not plain and num_keys:
            given = None if ahead.look_ahead is None else max(ahead.look_ahead, ahead.window or 1)
            stride, known = look_ahead_for(num_keys[0], num_slots, given, ahead.bounded)
        planned = arrived = 0
        while planned < self._num_batches:
            length = 1
            if not plain:
                waiting = num_keys[planned : planned + min(known, AHEAD_BITS)]
                length = window_length(waiting, num_slots, ahead.window, ahead.staged)
            if self.cells is not None:
                arrived = self._arrive(arrived, min(planned + max(known, 1), self._num_batches))
            self._plan(planned, planned + length, stride, 0 if plain else min(planned + known, self._num_batches))
            if self.cells is not None:
                for past in range(planned // stride * stride, (planned + length) // stride * stride):
                    self.cells.forget(self._replay.rows_of(past), self._slot_of)
                self.cells.planned()
            planned += length
            yield planned

    def _arrive(self, first: int, end: int) -> int:
        """Batches become known; returns how many are."""
        assert self.cells is not None
        for number in range(first, end):
            self.cells.arrive(self._replay.rows_of(number), int(self._replay._lookups[number]), self._slot_of)
        return max(first, end)

    def _plan(self, first: int, end: int, stride: int, known: int) -> None:
        replay, numbers = self._replay, np.zeros(7, dtype=np.int64)
        trace = replay.trace
        num_entries = int(trace.offsets[end] - trace.offsets[first])
        if self._listed.shape[1] < num_entries:
            self._listed = np.empty((3, num_entries + num_entries // 4), dtype=np.int32)
        numbers[kernels.USED] = self._used
        half, train = self._policy.half_life, np.uint8(self.learns)
        kernels.collect(
            replay.rows, trace.counts, replay._next, trace.offsets, first, end, self._clock, half, train,
            self._slot_of, self._last, self._uses, self._nxt, self._used_in, self._dirty, self._listed, numbers,
        )  # fmt: skip
        since, self._clock = self._clock + 1, self._clock + end - first
        self._let_in(since, train, numbers, (end // stride, stride, known))
        num_misses = int(numbers[kernels.MISSES])
        self.misses[first], self.created[first] = num_misses, numbers[kernels.CREATED]
        self.missed_rows[self._listed[0, :num_misses]] += 1
        self._count(numbers, end - first, int(replay._lookups[first:end].sum()))

    def _let_in(self, since: int, train: Any, numbers: NDArray[np.int64], future: tuple[int, int, int]) -> None:
        """Misses come, victims leave."""
        num_leaving = int(numbers[kernels.MISSES]) - (self.num_slots - self._used)
        victims = np.empty(0, dtype=np.int64)
        if num_leaving > 0:
            state = (self._last, self._uses, self._nxt, self._used_in, self._hot)
            used = slice(0, self._used)
            self._score(
                *(part[used] for part in state), *future, self._clock, since, self._policy.half_life, self._scores[used]
            )
            victims = _lowest(self._scores[used], self._row_in, num_leaving)
            if self.cells is not None:
                self.cells.leave(victims)
        kernels.assign(
            self._listed, self._clock, train, victims, self._hot_rows, self._slot_of, self._row_in, self._last,
            self._uses, self._nxt, self._used_in, self._dirty, self._hot, self._stored, numbers,
        )  # fmt: skip
        self._used = int(numbers[kernels.USED])

    def _warm(self, rows: NDArray[np.int32], uses: NDArray[np.int64]) -> None:
        """Bring in hot rows, as a batch that is not trained."""
        self._hot_rows[rows] = 1
        self._listed = np.empty((3, rows.shape[0]), dtype=np.int32)
        self._listed[0], self._listed[1], self._listed[2] = rows, self._num_batches, -1
        self._clock += 1
        numbers = np.zeros(7, dtype=np.int64)
        numbers[kernels.MISSES] = numbers[kernels.MISSED_LOOKUPS] = rows.shape[0]
        self._let_in(self._clock, np.uint8(0), numbers, (0, 1, 0))
        self._uses[self._slot_of[rows]] = np.minimum(uses, MOST_USES)
        self._count(numbers, 1, rows.shape[0])

    def _set_first_uses(self) -> None:
        """Set the first uses of rows that are in the cache before the first batch."""
        first = np.full(self._slot_of.shape[0], self._num_batches, dtype=np.int32)
        offsets = self._replay.trace.offsets
        batch_of = np.repeat(np.arange(self._num_batches, dtype=np.int32), np.diff(offsets))
        first[self._replay.rows[::-1]] = batch_of[::-1]
        self._nxt[: self._used] = first[self._row_in[: self._used]]
        self._used_in[: self._used] = -1

    def _count(self, numbers: NDArray[np.int64], num_batches: int, lookups: int) -> None:
        hits, misses, missed_lookups, created, evictions, written, _ = numbers.tolist()
        self.counts = self.counts.plus(
            CacheCounts(
                windows=1,
                batches=num_batches,
                keys=hits + misses,
                hits=hits,
                misses=misses,
                created=created,
                evictions=evictions,
                written_back=written,
                lookups=lookups,
                missed_lookups=missed_lookups,
            )
        )


def _lowest(scores: NDArray[np.int32], row_in: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """The rows [count] in the slots with the lowest (score, row), in no order; a sample bounds their scores."""
    limit = kernels.HELD - 1
    if scores.shape[0] > 2 * _SAMPLED:
        sample = np.sort(scores[:: scores.shape[0] // _SAMPLED])
        near = int(1.1 * count / scores.shape[0] * sample.shape[0]) + 16
        limit = min(limit, int(sample[min(near, sample.shape[0] - 1)]))
    found = np.flatnonzero(scores <= limit)
    if found.shape[0] < count:
        found = np.flatnonzero(scores < kernels.HELD)
    ranks = scores[found].astype(np.int64) << 32 | row_in[found]
    return np.partition(ranks, count - 1)[:count] & 0xFFFFFFFF


def _numbered(keys: NDArray[np.int64], num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """(distinct keys ascending [D], the place of every key in them [E])."""
    if num_rows > _MOST_NUMBERED:
        distinct, place = np.unique(keys, return_inverse=True)
        return distinct, place.astype(np.int32)
    seen = np.zeros(num_rows, dtype=np.bool_)
    seen[keys] = True
    number = np.cumsum(seen, dtype=np.int32)
    number -= 1
    return np.flatnonzero(seen), number[keys]


def simulate(
    trace: Trace | Replay,
    num_slots: int,
    policy: str = DEFAULT_POLICY,
    *,
    window: int | None = None,
    look_ahead: int | None = None,
    hot: HotRows | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> CacheCounts:
    """The counts of training on the trace.

    Args:
        trace: the batches.
        num_slots: rows that fit in the cache.
        policy: which rows stay.
        window: batches planned together, at most; None: as `hotbed.prefetch` chooses.
        look_ahead: batches known in advance; None: as `hotbed.prefetch` chooses; 0: the plain loop, without look-ahead.
        hot: rows that are brought in first and counted as one batch, as in training; the static policy keeps them.
        progress: called with the number of batches planned.
    """
    if look_ahead is not None and not 0 <= look_ahead <= MOST_AHEAD:
        raise ConfigError(f"look_ahead is {look_ahead}; it can be 0 to {MOST_AHEAD}.")
    if window is not None and not 1 <= window <= AHEAD_BITS:
        raise ConfigError(f"window is {window}; it can be 1 to {AHEAD_BITS}.")
    replay = trace if isinstance(trace, Replay) else Replay(trace)
    return replay.run(num_slots, policy, LookAhead(window, look_ahead), hot=hot, progress=progress).counts
