"""Who leaves a cache on the CPU, at the price of the batch and not of the cache.

    direct     all slots are ranked and the lowest taken: where a window uses an eighth of them or more
    in line    the lowest quarter of the slots stands in a line, cut into buckets by rank; a window takes whole buckets from its
               front, and what it used stands in line again afterwards. All slots are ranked when the line comes to its end

Both take the slots with the lowest (score, key), to the row: a line is exact because the order of two slots that nothing
happens to stays as it is. What changes a slot's place is known without a search:

    it was used, or its row came    the slots of the last windows get a new place before the next one is taken
    a batch ahead will use it       its score can only rise: noticed when it is about to be taken, and it moves back
    its count is halved with age    at a multiple of the half-life: slots that come to one are listed by batch (`_list_aging`)

Scores shift with time, all alike; so those of a line are worked out as of the moment at which it was formed.

Shapes: S slots, B buckets, N places in line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.host.intrinsics import prefetch, trailing_zeros
from hotbed.host.jit import digest_of, njit
from hotbed.host.pool import in_parallel, threads_for
from hotbed.ops.index import UNIT, ScoreFunction, WindowClock

_AHEAD = 16  # slots between asking for a cache line and reading it
_BUCKETS = 256
_NOWHERE = -1  # bucket of a slot that is not in line
_STEPS, _FEW = 2048, 64  # in which ranks are counted, and as many as are sorted instead
_SAMPLED = 4096  # slots whose ranks say where the buckets end
_SHARE = 4  # a line holds one slot in this many when it is formed, and has places for twice as many
_DIRECT = 8  # slots for each key of a window, up to which all are ranked
LINE_BYTES = 10  # of a line, for each slot, at most; where that is not enough all slots are ranked instead
_LINE_CONSTANT = 28 * _BUCKETS  # bytes of it, whatever the number of slots
_FREE_RANK = np.int64(-0x80000000) << np.int64(32)


@njit(nogil=True, inline="always")
def _where(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


@njit(nogil=True, cache=True, inline="always")
def aged(uses: Any, age: Any, half: Any) -> Any:
    """A count after some batches without use; most were used lately, and a division takes as long as all the rest."""
    return uses if age < half else uses >> min(age // half, 31)


@njit(nogil=True, cache=True, inline="always")
def used_again(uses: Any, age: Any, half: Any) -> Any:
    """A count after one more use."""
    return max(aged(uses, age, half), 1) + UNIT


@njit(nogil=True, cache=True, inline="always")
def _bucket_of(ends: Any, rank: Any) -> Any:
    """The first bucket whose end is above a rank; as many as there are: none."""
    low, high = 0, ends.size
    while low < high:  # ends: the span is halved
        middle = (low + high) // 2
        if rank < ends[middle]:
            high = middle
        else:
            low = middle + 1
    return low


@njit(nogil=True, cache=True)
def _list_aging(last: Any, clock: int, far: int, half: int, oldest: int) -> Any:
    """(starts [far + 1], slots): those that come to a multiple of the half-life, or the oldest age, in 1 to `far` batches."""
    starts = np.zeros(far + 2, dtype=np.int64)
    for s in range(last.size):
        age = clock - last[s]
        first, second = half - age % half, oldest - age
        if first <= far:
            starts[first + 1] += 1
        if 0 < second <= far and second != first:
            starts[second + 1] += 1
    for n in range(1, far + 2):
        starts[n] += starts[n - 1]
    slots, at = np.empty(starts[far + 1], dtype=np.int32), starts.copy()
    for s in range(last.size):
        age = clock - last[s]
        first, second = half - age % half, oldest - age
        if first <= far:
            slots[at[first]] = s
            at[first] += 1
        if 0 < second <= far and second != first:
            slots[at[second]] = s
            at[second] += 1
    return starts[1:], slots


@njit(nogil=True, cache=True)
def _lowest(ranks: Any, found: Any, counts: Any, out: Any) -> Any:
    """The slots of the lowest ranks, in no order, as many as `out` has room for; how many there are.

    ranks and found [S] hold counts[t] of them from where thread t's share begins; they are used up. Ranks are counted by their
    distance from the lowest, in 2,048 steps; those of the step in which the last one falls are counted again.
    """
    total = 0
    for t in range(counts.size):
        start = ranks.size * t // counts.size
        for i in range(start, start + counts[t]):
            ranks[total], found[total] = ranks[i], found[i]
            total += 1
    at, lengths = 0, np.empty(_STEPS, dtype=np.int64)
    while total > out.size - at:  # ends: those of the lowest and of the highest step are never all that are left
        low, high = ranks[0], ranks[0]
        for i in range(total):
            low, high = min(low, ranks[i]), max(high, ranks[i])
        if total <= _FEW or low == high:
            order = np.argsort(ranks[:total])
            for i in range(out.size - at):
                out[at + i] = found[order[i]]
            return out.size
        shift = np.uint64(0)
        while np.uint64(high - low) >> shift >= np.uint64(_STEPS):  # ends: shift grows
            shift += np.uint64(1)
        lengths[:] = 0
        for i in range(total):
            lengths[np.uint64(ranks[i] - low) >> shift] += 1
        last, below = np.uint64(0), at
        while below + lengths[last] <= out.size:  # ends: all of them are more than there is room for
            below += lengths[last]
            last += np.uint64(1)
        num_close = 0
        for i in range(total):
            step = np.uint64(ranks[i] - low) >> shift
            if step < last:
                out[at] = found[i]
                at += 1
            elif step == last:
                ranks[num_close], found[num_close] = ranks[i], found[i]
                num_close += 1
        total = num_close
    total = min(total, out.size - at)
    out[at : at + total] = found[:total]
    return at + total


class _Kernels(NamedTuple):
    """The compiled kernels of one policy."""

    rank_all: Callable[..., Any]
    sample: Callable[..., Any]
    line_up: Callable[..., Any]
    take: Callable[..., Any]


@cache
def compiled_score(name: str, function: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """(tag, score) of a policy; the tag is for the names of kernels that call the score."""
    tag = f"{name}_{digest_of(function)}"
    bound = ScoreFunction(name, function, half_life=0).bind({"where": _where})
    return tag, njit(bound, name=f"score_{tag}", nogil=True)


@cache
def _kernels(name: str, function: Callable[..., Any]) -> _Kernels:
    """The kernels for a policy's score; half-life and oldest age are arguments."""
    tag, score = compiled_score(name, function)

    @njit(name=f"rank_of_{tag}", nogil=True, inline="always")
    def rank_of(s: Any, cell: Any, last: Any, uses: Any, keys: Any, future: Any, now: Any) -> Any:
        """(score, low half of the key) in one number; now: next bit, steps and clock of the line, clock, half-life, oldest."""
        next_bit, steps, formed, clock, half, oldest = now[0], now[1], now[2], now[3], now[4], now[5]
        c = cell[s]
        if c < 0:
            return _FREE_RANK | s
        bits = np.int64(future[c])
        ahead = bits & 0x3FFFFFFF
        ahead = ((ahead >> next_bit) | (ahead << (30 - next_bit))) & 0x3FFFFFFF
        next_use = np.int64(trailing_zeros(np.uint64(ahead))) + 1 + steps if ahead else 0
        age = np.int64(clock - last[s])
        as_of_then = np.int64(formed - last[s]) if oldest <= 0 or age < oldest else np.int64(oldest)
        value = np.int64(score(next_use, np.int64(aged(uses[s], age, half)), as_of_then, (bits >> 30) & 1))
        return (value << 32) | (keys[c] & 0xFFFFFFFF)

    @njit(name=f"rank_all_{tag}", nogil=True, cache=True)
    def rank_all(
        thread: int, num_threads: int, cell: Any, last: Any, uses: Any, keys: Any, future: Any, since: int, now: Any,
        ranks: Any, found: Any, counts: Any,
    ) -> None:  # fmt: skip
        """The slots of a thread's share that may be taken, with their ranks, from where its share begins; how many.

        Two passes: a branch on `last` is often guessed wrong.
        """
        start, stop = cell.size * thread // num_threads, cell.size * (thread + 1) // num_threads
        end = start
        for s in range(start, stop):
            found[end] = s
            end += (cell[s] < 0) | (last[s] < since)
        lines, futures = keys.reshape(-1, 1), future.reshape(-1, 1)
        for i in range(start, end):
            soon = cell[found[min(i + _AHEAD, end - 1)]]
            if soon >= 0:
                prefetch(lines, soon, 0)
                prefetch(futures, soon, 0)
            ranks[i] = rank_of(found[i], cell, last, uses, keys, future, now)
        counts[thread] = end - start

    @njit(name=f"sample_{tag}", nogil=True, cache=True)
    def sample(cell: Any, last: Any, uses: Any, keys: Any, future: Any, since: int, now: Any, every: int) -> Any:
        """The ranks of every k-th slot, those that may be taken."""
        ranks, count = np.empty(cell.size // every + 1, dtype=np.int64), 0
        for s in range(0, cell.size, every):
            if cell[s] < 0 or last[s] < since:
                ranks[count] = rank_of(s, cell, last, uses, keys, future, now)
                count += 1
        return ranks[:count]

    @njit(name=f"line_up_{tag}", nogil=True, cache=True)
    def line_up(
        slots: Any, cell: Any, last: Any, uses: Any, keys: Any, future: Any, since: int, now: Any,
        ends: Any, heads: Any, lengths: Any, bucket: Any, places: Any, num_places: int,
    ) -> int:  # fmt: skip
        """Give slots the places of their ranks, or none; how many places are taken, -1 where there are too few."""
        lines, futures = keys.reshape(-1, 1), future.reshape(-1, 1)
        states, counts, cells = last.reshape(-1, 1), uses.reshape(-1, 1), cell.reshape(-1, 1)
        for i in range(slots.size):
            if i + 2 * _AHEAD < slots.size:
                soon, sooner = slots[i + 2 * _AHEAD], slots[i + _AHEAD]
                prefetch(cells, soon, 0)
                prefetch(states, soon, 0)
                prefetch(counts, soon, 0)
                if cell[sooner] >= 0 and last[sooner] < since:
                    prefetch(lines, cell[sooner], 0)
                    prefetch(futures, cell[sooner], 0)
            s = slots[i]
            if cell[s] >= 0 and last[s] >= since:
                bucket[s] = _NOWHERE  # used by this window: it comes again after it
                continue
            b = _bucket_of(ends, rank_of(s, cell, last, uses, keys, future, now))
            if b == ends.size:
                bucket[s] = _NOWHERE
            elif bucket[s] != b:
                if num_places == places.shape[0]:
                    return -1
                places[num_places, 0], places[num_places, 1] = s, heads[b]
                heads[b], bucket[s] = num_places, b
                lengths[b] += 1
                num_places += 1
        return num_places

    @njit(name=f"take_{tag}", nogil=True, cache=True)
    def take(
        out: Any, in_order: bool, cell: Any, last: Any, uses: Any, keys: Any, future: Any, since: int, now: Any,
        ends: Any, heads: Any, lengths: Any, bucket: Any, places: Any,
    ) -> int:  # fmt: skip
        """The slots at the front of the line; how many there were, at most as many as `out` has room for."""
        taken, most = 0, lengths.sum()
        ranks, at = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int32)
        for b in range(ends.size):
            place, count = heads[b], 0
            heads[b], lengths[b] = -1, 0
            while place >= 0:  # ends: places of one bucket do not form a ring
                s, following = places[place, 0], places[place, 1]
                if bucket[s] == b:
                    bucket[s] = _NOWHERE
                    if cell[s] < 0 or last[s] < since:
                        rank = rank_of(s, cell, last, uses, keys, future, now)
                        to = _bucket_of(ends, rank)
                        if to <= b:
                            ranks[count], at[count] = rank, place
                            count += 1
                        elif to < ends.size:  # a batch ahead will use it: it moves back, place and all
                            places[place, 1], heads[to], bucket[s] = heads[to], place, to
                            lengths[to] += 1
                place = following
            if in_order or taken + count > out.size:
                at[:count] = at[:count][np.argsort(ranks[:count])]
            if taken + count > out.size:  # the others of the last bucket stay in it
                for i in range(out.size - taken, count):
                    place = at[i]
                    places[place, 1], heads[b], bucket[places[place, 0]] = heads[b], place, b
                    lengths[b] += 1
                count = out.size - taken
            for i in range(count):
                out[taken + i] = places[at[i], 0]
            taken += count
            if taken == out.size:
                break
        return taken

    return _Kernels(rank_all, sample, line_up, take)


class Line:
    """The line of one cache; empty until it is needed."""

    def __init__(self, num_slots: int, clock: int, step: int) -> None:
        self.clock, self.step = clock, step  # at which it was formed
        self.ends = np.empty(0, dtype=np.int64)  # [B]: ranks below the last are in line
        self.heads = np.full(_BUCKETS, -1, dtype=np.int32)  # [B]: the first place of each bucket
        self.lengths = np.zeros(_BUCKETS, dtype=np.int64)  # [B]: places of it, also of slots that have left
        self.bucket = np.full(num_slots, _NOWHERE, dtype=np.int16)  # [S]
        self.places = np.empty((2 * num_slots // _SHARE + _BUCKETS, 2), dtype=np.int32)  # [N, 2]: slot, next place
        self.num_places = 0
        self.starts, self.turning = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)  # see _list_aging
        self.turned = clock  # slots that turned up to here have their places

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        parts = (self.ends, self.heads, self.lengths, self.bucket, self.places, self.starts, self.turning)
        return sum(part.nbytes for part in parts)


class Victims:
    """Chooses the slots that are taken, for one cache."""

    def __init__(self, num_slots: int, scoring: ScoreFunction, in_order: bool) -> None:
        self._num_slots, self.scoring = num_slots, scoring
        self._in_order = in_order  # the lowest first, which matters where a tier below sees them one after the other
        self._line: Line | None = None
        self._used: list[NDArray[np.int32]] = []  # slots that need a new place

    @property
    def num_bytes(self) -> int:
        """Bytes of the line."""
        return 0 if self._line is None else self._line.num_bytes

    def reset(self) -> None:
        """Scores have changed, and no notice was given."""
        self._line = None
        self._used.clear()

    def note(self, slots: NDArray[np.int32]) -> None:
        """These slots were used or filled, or a batch that used them is past; negative ones are not there."""
        if self._line is not None:
            self._used.append(slots)

    @property
    def has_line(self) -> bool:
        """Whether `note` is of use."""
        return self._line is not None

    def choose(self, state: tuple[Any, ...], moment: WindowClock, count: int) -> NDArray[np.int64]:
        """[count] slots, the lowest in rank; state = cell, last, uses, keys, future of the index.

        Free ones go first, and never one that was used at `moment.since` or later.
        """
        is_small = 4 * self._num_slots < _LINE_CONSTANT + 8 * self.scoring.half_life
        if self._line is None and (is_small or self._num_slots <= _DIRECT * moment.num_keys):
            return self._choose_directly(state, moment, count)
        if self._line is not None and self._catch_up(state, moment):
            out = np.empty(count, dtype=np.int64)
            if self._take(state, moment, out) == count:
                return out
        if self._form(state, moment):
            out = np.empty(count, dtype=np.int64)
            if self._take(state, moment, out) == count:
                return out
        self.reset()
        return self._choose_directly(state, moment, count)

    def _now(self, moment: WindowClock) -> NDArray[np.int64]:
        scoring, line = self.scoring, self._line
        steps, formed = (0, moment.clock) if line is None else (moment.step - line.step, line.clock)
        return np.array(
            [moment.next_bit, steps, formed, moment.clock, scoring.half_life, scoring.oldest], dtype=np.int64
        )

    def _choose_directly(self, state: tuple[Any, ...], moment: WindowClock, count: int) -> NDArray[np.int64]:
        size, threads = self._num_slots, threads_for(16 * self._num_slots)
        ranks, found, counts = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(threads, np.int64)
        kernel = _kernels(*self.scoring[:2]).rank_all
        in_parallel(kernel, *state, moment.since, self._now(moment), ranks, found, counts, threads=threads)
        out = np.empty(count, np.int64)
        if not self._in_order:
            return out[: _lowest(ranks, found, counts, out)]
        shares = [slice(size * t // threads, size * t // threads + num) for t, num in enumerate(counts.tolist())]
        ranks, found = (np.concatenate([part[share] for share in shares]) for part in (ranks, found))
        return found[np.argsort(ranks)[:count]]

    def _form(self, state: tuple[Any, ...], moment: WindowClock) -> bool:
        """All slots are ranked; a quarter stands in line, in buckets that a sample of them gives. False: it is too long."""
        self._used.clear()
        self._line = line = Line(self._num_slots, moment.clock, moment.step)
        now, scoring, kernels = self._now(moment), self.scoring, _kernels(*self.scoring[:2])
        ranks = kernels.sample(*state, moment.since, now, max(1, self._num_slots // _SAMPLED))
        ranks.sort()
        line.ends = ranks[np.arange(1, _BUCKETS + 1) * ranks.size // (_SHARE * _BUCKETS)] if ranks.size else ranks
        far = max(1, scoring.half_life // 2)
        line.starts, line.turning = _list_aging(state[1], moment.clock, far, scoring.half_life, scoring.oldest)
        if line.num_bytes > LINE_BYTES * self._num_slots:
            return False
        self._line_up(state, moment, np.arange(self._num_slots, dtype=np.int32))
        return True

    def _catch_up(self, state: tuple[Any, ...], moment: WindowClock) -> bool:
        """Give new places to slots that need one; False where a new line is needed."""
        line = self._line
        assert line is not None, "there is a line"
        if moment.clock - line.clock >= line.starts.size or moment.step < line.step:
            return False
        first, stop = line.starts[line.turned - line.clock], line.starts[moment.clock - line.clock]
        line.turned = moment.clock
        used, self._used = self._used, []
        return all(self._line_up(state, moment, slots) for slots in (*used, line.turning[first:stop]))

    def _line_up(self, state: tuple[Any, ...], moment: WindowClock, slots: NDArray[np.int32]) -> bool:
        """False where there are too few places."""
        line = self._line
        assert line is not None, "there is a line"
        parts = (line.ends, line.heads, line.lengths, line.bucket, line.places, line.num_places)
        num_places = _kernels(*self.scoring[:2]).line_up(slots, *state, moment.since, self._now(moment), *parts)
        line.num_places = max(num_places, line.num_places)
        return bool(num_places >= 0)

    def _take(self, state: tuple[Any, ...], moment: WindowClock, out: NDArray[np.int64]) -> int:
        line = self._line
        assert line is not None, "there is a line"
        parts = (line.ends, line.heads, line.lengths, line.bucket, line.places)
        return int(
            _kernels(*self.scoring[:2]).take(out, self._in_order, *state, moment.since, self._now(moment), *parts)
        )
