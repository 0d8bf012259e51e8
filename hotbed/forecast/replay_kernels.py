"""One window of a cache, compiled, over rows that are numbered without gaps: hits and misses, scores, new slots.

The decisions are those of hotbed/cache. Next uses come from the whole trace instead of bits of batches ahead, so nothing is
hashed or swept: state is read slot by slot in order. Slots in use are the first ones; a freed slot is reused immediately.

Shapes: E entries of the trace, D distinct rows, S slots, M misses of a window.

`IndexSize`: how large the index of a cache grows on a CPU, where rows in slots and rows of batches ahead each have a cell. It
follows `CacheIndex.make_room`: which cells are live, which of them the cache has counted, and when the table grows. Its
final size is that of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.cache.index import CELLS_PER_SLOT, FULL, GROWTH
from hotbed.host.jit import njit
from hotbed.ops.index import UNIT, WAYS, ScoreFunction
from hotbed.ops.index.victims import aged, compiled_score, used_again

_ABSENT = -1  # slot of a row that has none; -2 - m: it is miss m of this window
HELD = 0x7FFFFFFF  # score of a slot that the window uses
HITS, MISSES, MISSED_LOOKUPS, CREATED, EVICTIONS, WRITTEN, USED = range(7)  # places in the numbers of a window


@njit(nogil=True, cache=True)
def number_next(rows: Any, offsets: Any, num_rows: int, next_batch: Any) -> None:
    """For every entry the batch of the next use of its row; the number of batches if there is none."""
    num_batches = offsets.size - 1
    seen = np.full(num_rows, num_batches, dtype=np.int32)
    for b in range(num_batches - 1, -1, -1):
        for e in range(offsets[b], offsets[b + 1]):
            next_batch[e] = seen[rows[e]]
            seen[rows[e]] = b


@njit(nogil=True, cache=True)
def collect(
    rows: Any, times: Any, next_batch: Any, offsets: Any, first: int, end: int, clock: int, half: int, train: Any,
    slot_of: Any, last: Any, uses: Any, nxt: Any, used_in: Any, dirty: Any, misses: Any, numbers: Any,
) -> None:  # fmt: skip
    """Batches first to end - 1, with the clock before them: mark hits, list misses [3, M]."""
    since = clock + 1
    for b in range(first, end):
        clock += 1
        for e in range(offsets[b], offsets[b + 1]):
            row = rows[e]
            slot = slot_of[row]
            if slot >= 0:
                if last[slot] < since:
                    numbers[HITS] += 1
                uses[slot] = used_again(uses[slot], clock - last[slot], half)
                last[slot], nxt[slot], used_in[slot] = clock, next_batch[e], b
                dirty[slot] |= train
                continue
            if slot == _ABSENT:
                slot = -2 - numbers[MISSES]
                slot_of[row] = slot
                misses[0, numbers[MISSES]] = row
                numbers[MISSES] += 1
            misses[1, -2 - slot], misses[2, -2 - slot] = next_batch[e], b
            numbers[MISSED_LOOKUPS] += times[e]


@cache
def score_kernel(scoring: ScoreFunction) -> Callable[..., Any]:
    """The scores of slots under a policy, compiled from the policy's own function."""
    tag, value = compiled_score(*scoring[:2])

    @njit(name=f"kernel_{tag}", nogil=True, cache=True)
    def kernel(
        last: Any, uses: Any, nxt: Any, used_in: Any, hot: Any, step: int, stride: int, known: int, clock: int,
        since: int, half: int, out: Any,
    ) -> None:  # fmt: skip
        begun = step * stride  # batches from here on belong to a step that is not past
        for s in range(out.size):
            if last[s] >= since:
                out[s] = HELD
                continue
            next_use = 0
            if known > 0 and used_in[s] >= begun:
                next_use = 1
            elif nxt[s] < known:
                next_use = 1 + nxt[s] // stride - step
            age = clock - last[s]
            out[s] = value(next_use, np.int64(aged(uses[s], age, half)), age, np.int64(hot[s]))

    return kernel


@njit(nogil=True, cache=True)
def assign(
    misses: Any, clock: int, train: Any, victims: Any, hot_rows: Any, slot_of: Any, row_in: Any, last: Any, uses: Any,
    nxt: Any, used_in: Any, dirty: Any, hot: Any, stored: Any, numbers: Any,
) -> None:  # fmt: skip
    """Misses take free slots, then those of the victims, which are rows."""
    taken = 0
    for m in range(numbers[MISSES]):
        row = misses[0, m]
        slot = numbers[USED]
        if slot < row_in.size:
            numbers[USED] += 1
        else:
            victim = victims[taken]
            taken += 1
            slot = slot_of[victim]
            slot_of[victim] = _ABSENT
            numbers[EVICTIONS] += 1
            if dirty[slot]:
                stored[victim] = 1
                numbers[WRITTEN] += 1
        numbers[CREATED] += 1 - stored[row]
        slot_of[row], row_in[slot], last[slot], uses[slot], dirty[slot] = slot, row, clock, UNIT, train
        nxt[slot], used_in[slot], hot[slot] = misses[1, m], misses[2, m], hot_rows[row]


class IndexSize:
    """The cells of the index of one cache."""

    def __init__(self, num_slots: int, num_rows: int) -> None:
        self.num_cells = _rounded(CELLS_PER_SLOT * num_slots)
        self._ahead = np.zeros(num_rows, dtype=np.int16)  # batches ahead that use a row
        self._live = self._usual = 0
        self._open: list[tuple[int, int]] = []  # (new cells, lookups) of arrivals that are not counted
        self._ready = 0  # of them, those whose counts are known
        self._begun = False

    def arrive(self, rows: NDArray[np.int32], num_lookups: int, slot_of: NDArray[np.int32]) -> None:
        """A batch is known."""
        self._make_room(num_lookups)
        new = int(((self._ahead[rows] == 0) & (slot_of[rows] == -1)).sum())
        self._ahead[rows] += 1
        self._open.append((new, num_lookups))
        self._ready += not self._begun  # the first is waited for: it determines the look-ahead
        self._begun = True

    def forget(self, rows: NDArray[np.int32], slot_of: NDArray[np.int32]) -> None:
        """A batch is past; its rows that are in no slot lose their cells."""
        self._ahead[rows] -= 1
        self._live -= int(((self._ahead[rows] == 0) & (slot_of[rows] == -1)).sum())

    def leave(self, rows: NDArray[np.int64]) -> None:
        """Victims: those that no batch ahead uses lose their cells."""
        self._live -= int((self._ahead[rows] == 0).sum())

    def planned(self) -> None:
        """A window is planned, and all counts are known."""
        self._ready = len(self._open)

    def _make_room(self, num_lookups: int) -> None:
        pending = sum(lookups for _, lookups in self._open)
        usual = 2 * self._usual * (len(self._open) + 1) if self._usual else pending + num_lookups
        self._count(self._ready)
        if self._live + usual <= FULL * self.num_cells and self._live + pending + num_lookups <= self.num_cells:
            return
        self._count(len(self._open))
        if self._live + num_lookups > FULL * self.num_cells:
            self.num_cells = _rounded(int((self._live + num_lookups) / FULL * GROWTH))

    def _count(self, number: int) -> None:
        for new, _ in self._open[:number]:
            self._live += new
            self._usual = max(new, self._usual - self._usual // 8)
        del self._open[:number]
        self._ready = 0


def _rounded(num_cells: int) -> int:
    return max(1, -(-num_cells // WAYS)) * WAYS
