"""Translator: ids of a batch -> keys. Ids get rows when they are admitted and lose them when they expire.

    translator = Translator([TableRules(Admit(after=3), Expire(unused_steps=10_000)), TableRules()])
    keys, released = translator.translate(tables, ids, learns=True)     # the next training batch
    translator.trained(1)                                               # batch 1 cannot be undone any more

Training batches are numbered from 1. The result is a pure function of the training batches in their order (and of the time, for
rules that use it): not of threads, of evaluation in between, or of how far ahead batches are translated. New rows are given in
the order of first occurrence, the smallest free row first. `rewound` and `roll_back` go back to the state after any batch that
was not yet reported as trained; see journal.py for the price.

A row that expires stays unused until the first sweep 256 batches later, because records of it may still be on their way. When
it becomes free it is reported as `released`: the caller must forget its record before it uses the keys.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError, StoreError
from hotbed.host.memory import parse_bytes
from hotbed.ids import batch, state
from hotbed.ids.counting import CountMinSketch, ExactCounts
from hotbed.ids.distinct import BatchIds, DistinctIds, KnownRows
from hotbed.ids.index import MAX_ROWS, IdIndex, Ints, Tables
from hotbed.ids.journal import JournalEntry, Ledger, Memory, RowColumns
from hotbed.ids.learn import BatchContext, find, learn
from hotbed.ids.rules import ALWAYS, COUNT, NEVER, SCORE, RuleArrays, TableRules

PADDING = -1
UNKNOWN = -2
MAX_TABLES = 65_536


class TranslatedBatch(NamedTuple):
    """The keys of one batch."""

    keys: Ints  # [L]; PADDING, and outside training UNKNOWN, are not rows
    released: Ints  # rows that are free from this batch on: forget their records before using the keys


class IdCounts(NamedTuple):
    """Counts of the ids of a table in training, since the beginning."""

    seen: int  # lookups, padding left out
    admitted: int  # ids that got a row, each time
    rejected: int  # lookups that read the shared row
    expired: int  # ids that lost their row

    @property
    def rows(self) -> int:
        """Ids that have a row."""
        return self.admitted - self.expired


class Translator:
    """Keys of the dynamic tables of one group. One caller at a time; others wait."""

    def __init__(
        self,
        rules: Sequence[TableRules],
        first_row: int = 0,
        seed: int = 0,
        *,
        capacity: int = MAX_ROWS,
        quarantine: int = 256,
    ) -> None:
        if not 1 <= len(rules) <= MAX_TABLES:
            raise ConfigError(f"dynamic ids: a group has 1 to {MAX_TABLES:,} tables, not {len(rules)}")
        self.rules = tuple(rules)
        self.first_row = first_row
        self.quarantine = quarantine  # training batches
        self._seed = seed & (2**64 - 1)
        self._arrays = RuleArrays(self.rules)
        index = IdIndex(capacity)
        has_scores = bool(np.any(self._arrays.expire == SCORE))
        columns = RowColumns(index.capacity, has_last=bool(np.any(self._arrays.expire != NEVER)), has_scores=has_scores)
        waiting = ExactCounts(capacity) if np.any(self._arrays.admit == COUNT) else None
        shared = np.full(len(self.rules), -1, dtype=np.int64)
        self._memory = Memory(index, columns, waiting, self._new_sketches(), shared)
        empty = np.empty(0, dtype=np.int64)
        self._ledger = Ledger(0, 0, empty, 0, (), np.zeros((len(self.rules), 4), dtype=np.int64))
        self._share_rows()
        self._journal: deque[JournalEntry] = deque()
        self._is_rewound = False
        self.clock: Callable[[int], float] = lambda batch: (
            time.time()
        )  # number of a training batch -> seconds since 1970
        self._lock = threading.RLock()

    def translate(self, tables: Tables, ids: Ints, learns: bool, now: float | None = None) -> TranslatedBatch:
        """Keys of the ids [L] of tables [L]. `learns`: the next training batch. `now`: seconds, for tests."""
        return self.translate_distinct(BatchIds(*self._checked(tables, ids)), learns, now)

    def translate_distinct(
        self, given: BatchIds, learns: bool, now: float | None = None, known: KnownRows | None = None
    ) -> TranslatedBatch:
        """As `translate`, of ids that come once, or not often; keys [E]. `known`: what `look_ahead` found; keys go there."""
        with self._lock:
            if learns:
                rows, released = self._learn(given, known, self.clock(self._ledger.batch + 1) if now is None else now)
            else:
                rows, places = find(self._memory.index, given, known)
                released = np.empty(0, dtype=np.int64)
                otherwise = np.where(self._arrays.admit == ALWAYS, UNKNOWN, self._memory.shared)
                limits = self._arrays.padded, self._arrays.padding
                batch.answer_known(given.tables, given.ids, rows, places, *limits, otherwise)
        if self.first_row:
            rows[rows >= 0] += self.first_row
        return TranslatedBatch(rows, released + self.first_row)

    def look_ahead(self, distinct: DistinctIds, given: BatchIds, rows: Ints) -> KnownRows:
        """The rows [E] of ids as far as they are known, in any thread, while batches are translated; takes no lock."""
        return distinct.look_ahead(self._memory.index, given, rows)

    def trained(self, number: int) -> None:
        """Batches up to this one are trained and will not be undone."""
        with self._lock:
            self._refuse_rewound()
            self._check_number(number, least=0)
            while self._journal and self._journal[0].after.batch <= number:
                self._journal.popleft()

    @contextmanager
    def rewound(self, number: int) -> Iterator[None]:
        """Inside, the state is that after this batch; then it is restored. Other threads wait meanwhile."""
        with self._lock:
            entries = self._entries_after(number)
            for entry in reversed(entries):
                self._ledger = entry.undo(self._memory)
            self._is_rewound = True
            try:
                yield
            finally:
                self._is_rewound = False
                for entry in entries:
                    self._ledger = entry.redo(self._memory)

    def roll_back(self, number: int) -> Ints:
        """Undo the batches after this one for good. Returns the rows that lost their owner: forget their records."""
        with self._lock:
            lost = []
            for entry in reversed(self._entries_after(number)):
                self._ledger = entry.undo(self._memory)
                self._journal.pop()
                if entry.new is not None:
                    lost.append(entry.new.rows)
            return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *lost])) + self.first_row

    @property
    def batch(self) -> int:
        """The number of the training batch translated last."""
        return self._ledger.batch

    @property
    def end(self) -> int:
        """One more than the highest key that was ever given."""
        return self.first_row + self._ledger.next_row

    def __len__(self) -> int:
        """Ids that have a row of their own."""
        return len(self._memory.index)

    @property
    def num_bytes(self) -> int:
        """Host memory of everything, including the journal."""
        memory = self._memory
        parts = [memory.index.num_bytes, memory.columns.num_bytes(memory.index.end), self._ledger.free.nbytes]
        parts += [sketch.cells.nbytes for sketch in memory.sketches.values()]
        parts += [entry.num_bytes for entry in list(self._journal)]
        return sum(parts) + (memory.waiting.num_bytes if memory.waiting is not None else 0)

    def counts(self, table: int, number: int | None = None) -> IdCounts:
        """Counts after all batches, or after this one, which must not be trained yet; costs nothing."""
        with self._lock:
            later = self._entries_after(number) if number is not None else []
            ledger = later[0].before if later else self._ledger
        return IdCounts(*(int(count) for count in ledger.counters[table]))

    def shared_key(self, table: int) -> int:
        """The key of the row that ids of a table share until they are admitted; -1 for a table without admission."""
        row = int(self._memory.shared[table])
        return row + self.first_row if row >= 0 else -1

    def id_of(self, keys: Ints) -> tuple[Tables, Ints]:
        """(tables, ids) of keys; id 0 for a shared row. The owner of an expired row is known until the row is reused.

        Takes no lock: a caller that moves the rows of a batch may ask while later ones are translated.
        """
        return self._memory.index.owners_of(keys - self.first_row)

    def is_live(self, keys: Ints) -> NDArray[np.bool_]:
        """Whether each key belongs to an id or is shared; records of other keys mean nothing."""
        return self._memory.index.is_live(keys - self.first_row)

    def has_row(self, tables: Tables, ids: Ints) -> NDArray[np.bool_]:
        """Whether each (table, id) has a row of its own."""
        with self._lock:
            return np.asarray(self._memory.index.find(tables, ids) >= 0)

    def live_keys(self, chunk: int = 1 << 18) -> Iterator[Ints]:
        """Every live key, ascending."""
        for rows in self._memory.index.rows(chunk, shared=True):
            yield rows + self.first_row

    def sketch_types(self) -> dict[int, np.dtype[Any]]:
        """The type of the cells of every table that counts in a sketch."""
        return {table: sketch.cells.dtype for table, sketch in self._memory.sketches.items()}

    @property
    def num_resting(self) -> int:
        """Rows of expired ids that cannot be reused yet."""
        return sum(rows.shape[0] for _, rows in self._ledger.quarantined)

    def free_rows(self) -> Ints:
        """Keys that were used before and can be reused, ascending."""
        ledger = self._ledger
        return ledger.free[ledger.head :] + self.first_row

    def rows_state(self, keys: Ints) -> dict[str, NDArray[Any]]:
        """Columns of some live keys; [n] each."""
        with self._lock:
            return state.save_rows(self._memory, keys - self.first_row, self.first_row)

    def rest_state(self) -> dict[str, NDArray[Any]]:
        """Everything except the rows."""
        with self._lock:
            return state.save_rest(self._memory, self._ledger, self._arrays.expire, self.first_row)

    def load_state(
        self,
        rows: Iterable[Mapping[str, NDArray[Any]]],
        rest: Mapping[str, NDArray[Any]],
        table_of: Sequence[int] | None = None,
        now: float | None = None,
    ) -> list[str]:
        """Load the results of rows_state (in parts, all live keys) and rest_state; returns what did not carry over, in words.

        table_of[t] is the number of the saved table t here, -1 if it is gone. Rows of tables that expire by another kind of
        rule than before start as if they were used now.
        """
        with self._lock:
            if self._ledger.batch or len(self):
                raise StoreError(
                    "dynamic ids: a state can be loaded once, before the first batch; make a new Translator"
                )
            saved = state.SavedState(rest, table_of, self._arrays, int(time.time() if now is None else now))
            self._memory.index.unshare(self._memory.shared)
            self._ledger = state.load(self._memory, self._arrays, rows, saved)
            self._share_rows()
            return saved.lost

    def check_integrity(self) -> None:
        """Raise AssertionError if a law is broken."""
        with self._lock:
            self._memory.index.check_integrity()
            ledger, index = self._ledger, self._memory.index
            free = ledger.free[ledger.head :]
            waiting = [rows for _, rows in ledger.quarantined]
            idle = np.concatenate([free, *waiting])
            num_shared = int(np.count_nonzero(self._memory.shared >= 0))
            having = state.rows_by_table(index, len(self.rules))
            counted = [self.counts(table).rows for table in range(len(self.rules))]
            assert having.tolist() == counted, f"rows by table {having.tolist()} != admitted - expired {counted}"
            assert np.unique(idle).shape == idle.shape, "a row is free twice, or free and in quarantine"
            assert not index.is_live(idle).any(), "a row that is free or in quarantine has an owner"
            assert len(index) + num_shared + idle.shape[0] == ledger.next_row, (
                f"ids {len(index)} + shared {num_shared} + free {free.shape[0]} + in quarantine "
                f"{idle.shape[0] - free.shape[0]} != rows ever used {ledger.next_row}"
            )

    def _refuse_rewound(self) -> None:
        if self._is_rewound:
            raise StoreError("dynamic ids: inside rewound() the state can be read, not changed; leave it first")

    def _learn(self, given: BatchIds, known: KnownRows | None, now: float) -> tuple[Ints, Ints]:
        self._refuse_rewound()
        if not 1 <= now < 2**32:
            raise ConfigError(f"dynamic ids: the time must be 1 to 2**32 seconds since 1970, not {now}")
        context = BatchContext(self._ledger.batch + 1, int(now), self._seed, self.quarantine, self._trained)
        entry = JournalEntry(self._ledger, self._ledger._replace(batch=context.batch))
        try:
            rows, released = learn(self._memory, self._arrays, entry, context, given, known)
        except BaseException:
            self._ledger = entry.undo(self._memory)
            raise
        self._ledger = entry.after
        self._journal.append(entry)
        return rows, released

    @property
    def _trained(self) -> int:
        """The last batch that cannot be undone."""
        return self._journal[0].before.batch if self._journal else self._ledger.batch

    def _entries_after(self, number: int) -> list[JournalEntry]:
        self._refuse_rewound()
        self._check_number(number, least=self._trained)
        return [entry for entry in self._journal if entry.after.batch > number]

    def _check_number(self, number: int, least: int) -> None:
        if not least <= number <= self._ledger.batch:
            raise StoreError(
                f"dynamic ids: batch {number} is requested; the last one translated is {self._ledger.batch}, and those before "
                f"{least} cannot be undone. Report a batch as trained only when its rows are, and in order."
            )

    def _checked(self, tables: Tables, ids: Ints) -> tuple[Tables, Ints]:
        tables, ids = np.ascontiguousarray(tables), np.ascontiguousarray(ids)
        fits = tables.dtype == np.uint16 and ids.dtype == np.int64 and tables.shape == ids.shape and ids.ndim == 1
        assert fits, (
            f"tables {tables.dtype}{tables.shape} and ids {ids.dtype}{ids.shape} must be uint16 [L] and int64 [L]"
        )
        assert not tables.shape[0] or tables.max() < len(self.rules), f"table {tables.max()} of {len(self.rules)}"
        return tables, ids

    def _new_sketches(self) -> dict[int, CountMinSketch]:
        sketches = {}
        for table, rule in enumerate(self.rules):
            if rule.admission is not None and rule.admission.sketch is not None:
                size = parse_bytes(rule.admission.sketch, "sketch")
                sketches[table] = CountMinSketch(size, rule.admission.after or 1, (self._seed + table) & (2**64 - 1))
        return sketches

    def _share_rows(self) -> None:
        """Give every table with admission its shared row, if it has none yet."""
        for table in np.flatnonzero((self._arrays.admit != ALWAYS) & (self._memory.shared < 0)):
            self._ledger, rows = self._ledger.take(1)
            self._memory.index.share(int(rows[0]), int(table))
            self._memory.shared[table] = rows[0]
