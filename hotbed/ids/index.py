"""IdIndex: (table, id) to row number and back, for any 64-bit id, in about 22 bytes per id.

Open addressing in buckets of one cache line (cells.py), in 64 shards by hash. A shard that is 85 % full doubles, in its own
piece of address space. Shards differ in size by up to a factor of two, so that they do not reach their limits together:
at any size, growing takes the same small share of every batch, the longest pause is that of one shard, and the memory per id is
the same at 40 and at 80 million ids.

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
from hotbed.ids.kernels import begin_change, end_change

MAX_ROWS = 2**32 - 2
_MAX_LOAD = 0.85
_FIRST_BUCKETS = 32
_HUGE_SHARD = 2 * HUGE_PAGE  # bytes from which a shard uses huge pages: half of the last page is wasted on average
_PARALLEL = 16_384  # below this number of ids a second thread costs more than it gains

Ints = NDArray[np.int64]
Tables = NDArray[np.uint16]


class Entries(NamedTuple):
    """Some ids and their rows; [n] each."""

    tables: Tables
    ids: Ints
    rows: Ints


class IdIndex:
    """The rows of ids. One writer at a time; several threads may call `find` while there is no writer.

    A thread that looks ahead while there may be a writer reads `version` before and after. If it is odd or has changed, what
    was found is void.
    """

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
        self.longest_pause = 0.0  # seconds, of one shard that grew
        self.removals = 0  # calls that removed ids: rows that were found hold until the next
        self._version = np.zeros(1, dtype=np.int64)  # odd while the index changes

    def __len__(self) -> int:
        return int(self._counts.sum())

    @property
    def end(self) -> int:
        """One more than the highest row ever used."""
        return self._end

    @property
    def num_bytes(self) -> int:
        """Memory in use, in whole pages."""
        sizes = [64 * int(count) for count in self._shards[:, 1]]
        buckets = sum(in_pages(size, HUGE_PAGE) if size >= _HUGE_SHARD else in_pages(size) for size in sizes)
        return buckets + in_pages(12 * self._end, HUGE_PAGE) + self._shards.nbytes + 2 * self._counts.nbytes

    def find(self, tables: Tables, ids: Ints, threads: int = 0) -> Ints:
        """The row of every (table, id), -1 if it has none; `threads` 0 uses as many as torch."""
        rows = np.empty(ids.shape[0], dtype=np.int64)
        threads = 1 if ids.shape[0] < _PARALLEL else threads
        in_parallel(kernels.find, *self._arrays(), self._shards, tables, ids, rows, threads=threads)
        return rows

    def insert(self, tables: Tables, ids: Ints, rows: Ints) -> None:
        """Give each (table, id), absent and distinct, its row, which must be free. Inserts all of them, or none and raises."""
        if rows.shape[0]:
            self._check_rows(rows)
        position = 0
        while True:
            counts = self._counts, self._limits
            begin_change(self._version)
            try:
                position, result = kernels.insert(*self._arrays(), self._shards, *counts, tables, ids, rows, position)
                if result < 0:
                    break
                self._grow(result)
            except StoreError:
                self.remove(tables[:position], ids[:position])
                raise
            finally:
                end_change(self._version)
        assert result == kernels.DONE, (
            f"insert: id {ids[position]} of table {tables[position]} has a row, or row {rows[position]} an id, already"
        )

    def remove(self, tables: Tables, ids: Ints) -> Ints:
        """Remove ids, all present and distinct; returns their rows."""
        rows = np.empty(ids.shape[0], dtype=np.int64)
        begin_change(self._version)
        try:
            position, result = kernels.remove(*self._arrays(), self._shards, self._counts, tables, ids, rows, 0)
        finally:
            end_change(self._version)
            self.removals += 1  # last: a lookup that saw ids before they were gone has read the number before
        assert result == kernels.DONE, f"remove: id {ids[position]} of table {tables[position]} has no row"
        return rows

    def share(self, row: int, table: int) -> None:
        """Mark a row as shared by ids of its table."""
        self._check_rows(np.array([row]))
        assert not self.is_live(np.array([row]))[0], f"share: row {row} belongs to word {self._owners[row, 2]}"
        self._owners[row] = (0, 0, SHARED | (table + 1))

    def unshare(self, rows: Ints) -> None:
        """Shared rows are free again; -1 is not a row."""
        self._owners[rows[rows >= 0], 2] = 0

    def owners_of(self, rows: Ints) -> tuple[Tables, Ints]:
        """(table, id) of the present or last owner of rows; id 0 for a shared row."""
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
        """Raise AssertionError with the terms of the broken equation; a few seconds for 50 million ids."""
        words, numbers, owners = self._arrays()
        seen = np.zeros(self._end, dtype=np.uint8)
        for shard in range(NUM_SHARDS):
            first, num_buckets = (int(number) for number in self._shards[shard])
            passed = np.zeros(num_buckets, dtype=np.int64)
            count, fault, bucket = kernels.walk(words, numbers, owners, shard, first, num_buckets, seen, passed)
            assert fault < 0, f"{kernels.FAULTS[fault]}: shard {shard}, bucket {bucket}"
            assert count == self._counts[shard], (
                f"shard {shard}: {count} cells in use != {self._counts[shard]} ids counted"
            )
            assert count <= self._limits[shard], f"shard {shard}: {count} ids > {self._limits[shard]} allowed"
            written = (words[first : first + num_buckets, 1] >> np.uint64(32)).astype(np.int64)
            wrong = np.flatnonzero(written != passed)
            assert not wrong.shape[0], (
                f"shard {shard}, bucket {wrong[0]}: displaced ids counted {written[wrong[0]]} != found {passed[wrong[0]]}"
            )
        in_use = owners[: self._end, 2]
        num_owned = int(np.count_nonzero((in_use != 0) & (in_use < GONE)))
        assert num_owned == int(seen.sum()) == len(self), (
            f"rows owned {num_owned} != cells {seen.sum()} != ids {len(self)}"
        )

    @property
    def shared_arrays(self) -> tuple[Any, Any, Any, Any]:
        """(buckets, owners, shards, version) for lookups while others may change them."""
        return self._words, self._owners, self._shards, self._version

    def _arrays(self) -> tuple[Any, Any, Any]:
        return self._words, self._numbers, self._owners

    def _check_rows(self, rows: Ints) -> None:
        end = int(rows.max()) + 1
        if end > self.capacity:
            raise StoreError(
                f"dynamic ids: row number {end - 1:,} is requested, and a group has at most {self.capacity:,}. "
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
    """Ids that a shard holds before it doubles."""
    return (num_buckets * CELLS * _MAX_LOAD).astype(np.int64)


def _most_buckets(capacity: int) -> int:
    """Buckets of address space of one shard, for 1.5 times an even share of the ids."""
    buckets = HUGE_PAGE // 64
    while buckets * CELLS * _MAX_LOAD < 1.5 * capacity / NUM_SHARDS + 64:
        buckets *= 2
    return 2 * buckets
