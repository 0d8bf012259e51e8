"""The changes of a training batch in the memory of a translator, so that they can be undone and redone.

Ids are translated ahead of training, but a checkpoint, or a loop that is left early, needs the state after the last trained
batch. Small state (Ledger) is kept whole, before and after. For large state a JournalEntry has the changed places and their
previous values; undoing swaps the two, so the entry then holds what redoing needs. The cost depends on what the batches
changed, never on the size of the index.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.host.pages import HUGE_PAGE, Pages, in_pages
from hotbed.ids.counting import CountMinSketch, ExactCounts, SketchChange, swap
from hotbed.ids.index import Entries, IdIndex, Ints, Tables

SEEN, ADMITTED, REJECTED, EXPIRED = range(4)


class Ledger(NamedTuple):
    """The small state after a batch. It is immutable: a change makes a new one."""

    batch: int
    next_row: int  # rows from this one on were never used
    free: Ints  # ascending; those before `head` are in use
    head: int
    quarantined: tuple[tuple[int, Ints], ...]  # (batch in which they expired, rows ascending), oldest first
    counters: Ints  # [T, 4]: SEEN, ADMITTED, REJECTED, EXPIRED

    def take(self, count: int) -> tuple[Ledger, Ints]:
        """Rows for new owners: free ones, the smallest first, then new ones."""
        reused = self.free[self.head : self.head + count]
        new = count - reused.shape[0]
        rows = np.concatenate([reused, np.arange(self.next_row, self.next_row + new)])
        return self._replace(head=self.head + reused.shape[0], next_row=self.next_row + new), rows

    def release(self, until: int) -> tuple[Ledger, Ints]:
        """Free the rows that expired up to batch `until`; returns them, ascending."""
        released = [rows for batch, rows in self.quarantined if batch <= until]
        if not released:
            return self, np.empty(0, dtype=np.int64)
        rows = np.sort(np.concatenate(released))
        free = np.sort(np.concatenate([self.free[self.head :], rows]), kind="stable")  # stable merges sorted runs
        return self._replace(free=free, head=0, quarantined=self.quarantined[len(released) :]), rows

    def counting(self, what: int, tables: Tables, amounts: Ints | None = None) -> Ledger:
        """The ledger with these tables counted, each once or `amounts` times."""
        counters = self.counters.copy()
        more = np.bincount(tables, weights=amounts, minlength=counters.shape[0])
        counters[:, what] += more.astype(np.int64)
        return self._replace(counters=counters)


class RowColumns:
    """Further columns of rows, where a rule needs them: last use (0: none) and score."""

    def __init__(self, capacity: int, *, has_last: bool, has_scores: bool) -> None:
        self.last: NDArray[np.uint32] = Pages((1, capacity if has_last else 0), np.uint32).array
        self.scores: NDArray[np.uint32] = Pages((capacity if has_scores else 0,), np.uint32).array

    @property
    def has_last(self) -> bool:
        return bool(self.last.shape[1])

    @property
    def has_scores(self) -> bool:
        return bool(self.scores.shape[0])

    def num_bytes(self, end: int) -> int:
        return (self.has_last + self.has_scores) * in_pages(4 * end, HUGE_PAGE)


class RowUses(NamedTuple):
    """Last uses and scores of rows, before or after a batch."""

    rows: NDArray[np.uint32]
    last: NDArray[np.uint32]
    scores: NDArray[np.uint32]  # [0] where no rule scores

    def swap(self, columns: RowColumns) -> None:
        """Swap with the columns; each row is here once."""
        swap(columns.last[0], self.rows, self.last, False)
        if self.scores.shape[0]:
            swap(columns.scores, self.rows, self.scores, False)


class CountChange(NamedTuple):
    """Exact counts of pending ids, before and after."""

    tables: Tables
    ids: Ints
    before: Ints
    after: Ints


@dataclass
class Memory:
    """The large state, which entries change, and the shared rows, which stay."""

    index: IdIndex
    columns: RowColumns
    waiting: ExactCounts | None
    sketches: dict[int, CountMinSketch]  # by table
    shared: Ints  # [T]: the row that ids of a table without a row of their own read, or -1


@dataclass
class JournalEntry:
    """One batch; filled step by step in the order of the fields, so that a batch that fails halfway can be undone."""

    before: Ledger
    after: Ledger
    gone: Entries | None = None
    gone_uses: RowUses | None = None
    counted: CountChange | None = None
    sketched: list[tuple[int, SketchChange]] = field(default_factory=list)
    new: Entries | None = None
    uses: RowUses | None = None

    def undo(self, memory: Memory) -> Ledger:
        """The state before the batch; the last step first."""
        if self.uses is not None:
            self.uses.swap(memory.columns)
        if self.new is not None:
            memory.index.remove(self.new.tables, self.new.ids)
        for table, changes in reversed(self.sketched):
            memory.sketches[table].swap(changes, back=True)
        if self.counted is not None and memory.waiting is not None:
            memory.waiting.set(self.counted.tables, self.counted.ids, self.counted.before)
        if self.gone_uses is not None:
            self.gone_uses.swap(memory.columns)
        if self.gone is not None:
            memory.index.insert(*self.gone)
        return self.before

    def redo(self, memory: Memory) -> Ledger:
        """The state after the batch, once it was undone."""
        if self.gone is not None:
            memory.index.remove(self.gone.tables, self.gone.ids)
        if self.gone_uses is not None:
            self.gone_uses.swap(memory.columns)
        if self.counted is not None and memory.waiting is not None:
            memory.waiting.set(self.counted.tables, self.counted.ids, self.counted.after)
        for table, changes in self.sketched:
            memory.sketches[table].swap(changes, back=False)
        if self.new is not None:
            memory.index.insert(*self.new)
        if self.uses is not None:
            self.uses.swap(memory.columns)
        return self.after

    @property
    def num_bytes(self) -> int:
        parts: list[tuple[object, ...]] = [self.gone or (), self.gone_uses or (), self.counted or (), self.new or ()]
        parts += [self.uses or (), *(changes for _, changes in self.sketched)]
        arrays = [array for part in parts for array in part] + [self.before.counters]
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
