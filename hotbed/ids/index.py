"""IdIndex: (table, id) to row number and back, for any 64-bit id, in about 22 bytes an id.

Open addressing in buckets of one cache line (cells.py), in 64 shards by hash. A shard that is 85 % full doubles, in its own
piece of address space. Shards differ in size by up to a factor of two, so that they do not come to their limit together:
whatever the size, growing takes the same small share of every batch, the longest pause is one shard's, and the memory per id
is the same at 40 as at 80 million ids.

Row numbers come from the caller. Owners are compared in full: two ids never share a row, whatever their hashes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError
from hotbed.host.pages import HUGE_PAGE, Pages, in_pages
from hotbed.host.pool import in_parallel
from hotbed.ids import kernels
from hotbed.ids.cells import CELLS, GONE, NUM_SHARDS, SHARED, TABLE
from hotbed.ids.integrity import check_integrity

MAX_ROWS = 2**32 - 2
_MAX_LOAD = 0.85
_FIRST_BUCKETS = 32
_HUGE_SHARD = 2 * HUGE_PAGE  # bytes from which a shard is kept in huge pages: half of the last one is wasted on average
_PARALLEL = 16_384  # ids below which a second thread costs more than it brings

Ints = NDArray[np.int64]
Tables = NDArray[np.uint16]


class Entries(NamedTuple):
    """Some ids and their rows; [n] each."""

    tables: Tables
    ids: Ints
    rows: Ints


class IdIndex:
    """The rows of ids. Not for two writers at once; finding may go on in several threads while nobody writes."""

    def __init__(self, capacity: int = MAX_ROWS) -> None:
        self.capacity = min(capacity, MAX_ROWS)
        self._region = _most_buckets(self.capacity)
        self._buckets = Pages((NUM_SHARDS * self._region, 8), np.uint64, huge=False)
        self._words: NDArray[np.uint64] = self._buckets.array
        self._numbers = self._words.view(np.uint32)
        self._owners: NDArray[np.uint32] = Pages((self.capacity, 3), np.uint32).array
        self._counts = np.zeros(NUM_SHARDS, dtype=np.int64)
        self._shards = np.zeros((NUM_SHARDS, 2), dtype=np.int64)  # first bucket, number of buckets
        self._shards[:, 0] = np.arange(NUM_SHARDS) * self._region
        self._shards[:, 1] = _staggered(_FIRST_BUCKETS)
        self._limits = _limits(self._shards[:, 1])
        self._end = 0  # all rows ever used are below
        self.longest_pause = 0.0  # seconds for which one shard grew

    def __len__(self) -> int:
        return int(self._counts.sum())

    @property
    def end(self) -> int:
        """One more than the highest row ever used."""
        return self._end

    @property
    def num_bytes(self) -> int:
        """Memory in use, whole pages."""
        sizes = [64 * int(count) for count in self._shards[:, 1]]
        buckets = sum(in_pages(size, HUGE_PAGE) if size >= _HUGE_SHARD else in_pages(size) for size in sizes)
        return buckets + in_pages(12 * self._end, HUGE_PAGE) + self._shards.nbytes + 2 * self._counts.nbytes

    def find(self, tables: Tables, ids: Ints, threads: int = 0) -> Ints:
        """The row of every (table, id), -1 where there is none; `threads` 0 takes as many as torch."""
        rows = np.empty(ids.shape[0], dtype=np.int64)
        threads = 1 if ids.shape[0] < _PARALLEL else threads
        in_parallel(kernels.find, *self._arrays(), self._shards, tables, ids, rows, threads=threads)
        return rows

    def insert(self, tables: Tables, ids: Ints, rows: Ints) -> None:
        """Give each (table, id), absent and distinct, its row, which nobody has. All of them, or an error and none."""
        if rows.shape[0]:
            self._check_rows(rows)
        position = 0
        while True:
            counts = self._counts, self._limits
            position, result = kernels.insert(*self._arrays(), self._shards, *counts, tables, ids, rows, position)
            if result < 0:
                break
            try:
                self._grow(result)
            except StoreError:
                self.remove(tables[:position], ids[:position])
                raise
        assert result == kernels.DONE, (
            f"insert: id {ids[position]} of table {tables[position]} has a row, or row {rows[position]} an id, already"
        )

    def remove(self, tables: Tables, ids: Ints) -> Ints:
        """Take ids out, all present and distinct; the rows they had."""
        rows = np.empty(ids.shape[0], dtype=np.int64)
        position, result = kernels.remove(*self._arrays(), self._shards, self._counts, tables, ids, rows, 0)
        assert result == kernels.DONE, f"remove: id {ids[position]} of table {tables[position]} has no row"
        return rows

    def share(self, row: int, table: int) -> None:
        """Mark a row as one of no single id of its table."""
        self._check_rows(np.array([row]))
        assert not self.is_live(np.array([row]))[0], f"share: row {row} belongs to word {self._owners[row, 2]}"
        self._owners[row] = (0, 0, SHARED | (table + 1))

    def unshare(self, rows: Ints) -> None:
        """Shared rows belong to nobody again; -1 is no row."""
        self._owners[rows[rows >= 0], 2] = 0

    def owners_of(self, rows: Ints) -> tuple[Tables, Ints]:
        """(table, id) of rows that belong to somebody, or did last; id 0 for a shared row."""
        owners = self._owners[rows]
        ids = owners[:, 0].astype(np.uint64) | (owners[:, 1].astype(np.uint64) << np.uint64(32))
        return ((owners[:, 2] & np.uint32(TABLE)) - np.uint32(1)).astype(np.uint16), ids.view(np.int64)

    def is_live(self, rows: Ints) -> NDArray[np.bool_]:
        """Whether each row belongs to an id or is shared."""
        inside = rows < self._end
        words = self._owners[np.where(inside, rows, 0), 2]
        return np.asarray(inside & (words != 0) & (words & np.uint32(GONE) == 0))

    def is_shared(self, rows: Ints) -> NDArray[np.bool_]:
        return np.asarray(self._owners[rows, 2] >= SHARED)

    def rows(self, chunk: int = 1 << 18, *, shared: bool = False) -> Iterator[Ints]:
        """Every row that belongs to an id, ascending."""
        for start in range(0, self._end, chunk):
            out = np.empty(min(chunk, self._end - start), dtype=np.int64)
            count = kernels.live_rows(self._owners, start, start + out.shape[0], shared, out)
            if count:
                yield out[:count]

    def items(self, chunk: int = 1 << 18) -> Iterator[Entries]:
        """Every id with its row, rows ascending."""
        for rows in self.rows(chunk):
            yield Entries(*self.owners_of(rows), rows)

    @property
    def owners(self) -> NDArray[np.uint32]:
        """[capacity, 3] for kernels that go over rows: id (low, high half), and the table's word (cells.py)."""
        return self._owners

    def check_integrity(self) -> None:
        """Raise AssertionError if a law of the index is broken."""
        check_integrity(self)

    def _arrays(self) -> tuple[Any, Any, Any]:
        return self._words, self._numbers, self._owners

    def _check_rows(self, rows: Ints) -> None:
        end = int(rows.max()) + 1
        if end > self.capacity:
            raise StoreError(
                f"dynamic ids: row number {end - 1:,} is asked for, and a group has at most {self.capacity:,}. "
                "Let fewer ids have rows (Admit), let unused ones go (Expire), or put tables into groups of other widths."
            )
        self._end = max(self._end, end)

    def _grow(self, shard: int) -> None:
        start = time.perf_counter()
        first, old = self._shards[shard]
        new = 2 * int(old)
        if new > self._region:
            raise StoreError(
                f"dynamic ids: shard {shard} of {NUM_SHARDS} holds {self._counts[shard]:,} of {len(self):,} ids and has no "
                f"room for more. A capacity of {self.capacity:,} rows is too small, or the ids were made to "
                "collide: give it a larger one, or hash the ids with a secret before they come here."
            )
        rows = np.empty(self._counts[shard], dtype=np.uint32)
        kernels.rows_of_shard(self._words, self._numbers, first, old, rows)
        if 64 * new >= _HUGE_SHARD:
            self._buckets.renew(64 * int(first), in_pages(64 * new, HUGE_PAGE))
        kernels.spread(*self._arrays(), first, new, rows)
        self._shards[shard, 1] = new
        self._limits = _limits(self._shards[:, 1])
        self.longest_pause = max(self.longest_pause, time.perf_counter() - start)


def _staggered(num_buckets: int) -> Ints:
    """Sizes of the shards, spread evenly in proportion from num_buckets to twice as many."""
    return np.floor(num_buckets * 2 ** (np.arange(NUM_SHARDS) / NUM_SHARDS)).astype(np.int64)


def _limits(num_buckets: Ints) -> Ints:
    """How many ids a shard holds before it doubles."""
    return (num_buckets * CELLS * _MAX_LOAD).astype(np.int64)


def _most_buckets(capacity: int) -> int:
    """Address space of one shard: an even share of the ids and half as much again, doubled up to there."""
    buckets = HUGE_PAGE // 64
    while buckets * CELLS * _MAX_LOAD < 1.5 * capacity / NUM_SHARDS + 64:
        buckets *= 2
    return 2 * buckets
