"""The ids of a batch without most repeats: which ids there are, how often each comes, and which lookup means which.

In: spans, the ids of one feature each, where they are in host memory. Out: E entries (table, id, how often, where first), and
for every lookup the number of its entry. A batch of 426,000 Zipf ids has 50,000 to 80,000 distinct ones: what follows, finding
the rows of ids, works on entries. All of it is a function of the batch alone, so any thread may do it ahead of time.

A span is cut into pieces, and each piece finds its own distinct ids in a table that fits a core's cache. An id that comes in
two pieces has two entries: the code that gives rows to new ids counts them together (`learn.py`).

Shapes: L lookups, E entries, P spans, C pieces, T tables.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from hotbed.host.intrinsics import (
    as_pointer,
    copy_bytes,
    fence,
    load32,
    load64,
    load_acquire,
    pause,
    prefetch_line,
    store32,
    store64,
)
from hotbed.host.jit import njit
from hotbed.host.jobs import begin, kernel_address, run
from hotbed.host.pool import num_threads, shared
from hotbed.host.splitmix import GOLDEN
from hotbed.ids.cells import NUM_SHARDS
from hotbed.ids.index import IdIndex, Ints, Tables
from hotbed.ids.kernels import find

ADDRESS, STEP, LENGTH, TABLE, FIRST, STRIDE = range(6)  # of a span: where its values are; where its lookups stand
_OUT, _FOUND, _START = 6, 7, 8  # of a piece: its first lookup among the numbers, its entries, and where they begin
_PIECE_WORDS = 9
_PIECE = 1 << 15  # lookups at most
_CELLS_BYTES = 8 * _PIECE  # of the table of a piece, half empty
_CHUNK = 2048  # entries that one thread looks for at a time
_MOST_WORKERS = 7
_WATCH = 1500  # looks before a worker sleeps: about 0.1 ms
_TRIES, _PAUSES = 4, 2000  # of a chunk that is looked for while the index changes; pauses in between
_AHEAD = 48  # values between asking for one and reading it
_S29 = np.uint64(29)
_PIECES, _NUMBERS, _ROUGH, _DISTANCE, _IDS, _COUNTS, _FIRSTS, _TABLES = range(8)  # arguments of jobs over pieces
_WANTED, _OF_TABLES, _NUM_WANTED, _ROWS, _BUCKETS, _NUM_BUCKETS, _OWNERS, _NUM_OWNERS, _SHARDS, _VERSION = range(10)


class BatchIds(NamedTuple):
    """Ids of a batch, of which some may come twice."""

    tables: Tables  # [E]
    ids: Ints  # [E]
    counts: Ints | None = None  # [E]: lookups of each; None: one
    firsts: Ints | None = None  # [E]: position of the first; None: they stand in order
    totals: Ints | None = None  # [T]: lookups of each table; None: not counted


class KnownRows(NamedTuple):
    """Rows that were found ahead of time; their user may write to them."""

    rows: Ints  # [E]; -1 says nothing: the id may have come since, or could not be looked up
    of: IdIndex
    removals: int  # of the index, before it was looked at
    is_whole: bool  # every entry has one

    def holds(self, index: IdIndex) -> bool:
        """Whether every row is still that of its id: an id keeps its row until it is removed."""
        return index is self.of and index.removals == self.removals


class Pieces(NamedTuple):
    """The pieces of one batch, numbered; `rough` holds entries that are not joined yet."""

    words: NDArray[np.int64]  # [C, 9]
    rough: NDArray[np.int64]  # [3, L]
    num_entries: int


class DistinctIds:
    """Works for one thread, and keeps what it needs between batches. `name`: of its threads; others wait for the same ones."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rough = np.empty((3, 0), dtype=np.int64)

    def number(self, spans: NDArray[np.int64], numbers: NDArray[np.int32]) -> Pieces:
        """The entry of every lookup, span after span, into numbers [L]; spans [P, 6]."""
        num_lookups = numbers.shape[0]
        if self._rough.shape[1] < num_lookups:
            self._rough = np.empty((3, num_lookups), dtype=np.int64)
        pieces = _cut(spans)
        count = self._call(_number, _piece_kernel(), pieces, numbers, self._rough)
        return Pieces(pieces, self._rough, int(count))

    def gather(self, pieces: Pieces, numbers: NDArray[np.int32], num_tables: int) -> BatchIds:
        """The entries of pieces that were just numbered."""
        count = pieces.num_entries
        tables = np.empty(count, dtype=np.uint16)
        ids, counts, firsts = (np.empty(count, dtype=np.int64) for _ in range(3))
        self._call(_join, _join_kernel(), pieces.words, numbers, pieces.rough, tables, ids, counts, firsts)
        totals = np.zeros(num_tables, dtype=np.int64)
        np.add.at(totals, pieces.words[:, TABLE], pieces.words[:, LENGTH])
        return BatchIds(tables, ids, counts, firsts, totals)

    def look_ahead(self, index: IdIndex, batch: BatchIds, rows: Ints) -> KnownRows:
        """Into rows [E] the row of each entry, while another thread may change the index."""
        removals = index.removals  # first: what is removed meanwhile is noticed
        self._call(_find, _find_kernel(), batch.tables, batch.ids, rows, *index.shared_arrays)
        return KnownRows(rows, index, removals, bool((rows >= 0).all()))

    def _call(self, compiled: Any, *arguments: Any) -> Any:
        workers = max(0, min(_MOST_WORKERS, num_threads() // 2))
        pool = shared(self._name, workers, watch=_WATCH, scratch_bytes=_CELLS_BYTES)
        return pool.call(compiled, *arguments)


@njit(nogil=True, cache=True)
def _cut(spans: Any) -> Any:
    """[C, 9]: spans in pieces, none longer than _PIECE."""
    count = 0
    for p in range(spans.shape[0]):
        count += (spans[p, LENGTH] + _PIECE - 1) // _PIECE
    pieces = np.zeros((count, _PIECE_WORDS), dtype=np.int64)
    c, out = 0, 0
    for p in range(spans.shape[0]):
        length = spans[p, LENGTH]
        parts = (length + _PIECE - 1) // _PIECE
        for part in range(parts):
            first, stop = length * part // parts, length * (part + 1) // parts
            pieces[c, ADDRESS] = spans[p, ADDRESS] + 8 * spans[p, STEP] * first
            pieces[c, STEP], pieces[c, LENGTH] = spans[p, STEP], stop - first
            pieces[c, TABLE] = spans[p, TABLE]
            pieces[c, FIRST] = spans[p, FIRST] + spans[p, STRIDE] * first
            pieces[c, STRIDE] = spans[p, STRIDE]
            pieces[c, _OUT] = out + first
            c += 1
        out += length
    return pieces


@njit(nogil=True, cache=True)
def spread(spans: Any, numbers: Any, of_entry: Any, of_lookup: Any) -> None:
    """of_lookup[position] = of_entry[number of its entry], for the lookups of all spans [P, 6]."""
    k = 0
    for p in range(spans.shape[0]):
        first, stride = spans[p, FIRST], spans[p, STRIDE]
        for i in range(spans[p, LENGTH]):
            of_lookup[first + stride * i] = of_entry[numbers[k]]
            k += 1


def _number_piece(arguments: Any, chunk: Any, scratch: Any) -> None:
    """Number the distinct ids of a piece from 0, in the order in which they come."""
    piece = load64(arguments + 8 * _PIECES) + 8 * _PIECE_WORDS * chunk
    values, step, length = load64(piece + 8 * ADDRESS), 8 * load64(piece + 8 * STEP), load64(piece + 8 * LENGTH)
    first, stride, out = load64(piece + 8 * FIRST), load64(piece + 8 * STRIDE), load64(piece + 8 * _OUT)
    numbers = load64(arguments + 8 * _NUMBERS) + 4 * out
    rough, distance = load64(arguments + 8 * _ROUGH) + 8 * out, load64(arguments + 8 * _DISTANCE)
    size, bits = 16, 4
    while size < 2 * length:  # ends: it doubles
        size *= 2
        bits += 1
    shift = np.uint64(64 - bits)
    for pair in range(size // 2):
        store64(scratch + 8 * pair, -1)
    found: Any = 0
    for i in range(length):
        prefetch_line(
            values + step * (i + _AHEAD)
        )  # where columns are pages apart the processor does not prefetch; beyond the end it is void
        id_ = load64(values + step * i)
        word = np.uint64(id_)
        cell: Any = np.int64(((word ^ (word >> _S29)) * GOLDEN) >> shift)
        number: Any = np.int64(load32(scratch + 4 * cell))
        while number >= 0 and load64(rough + 8 * number) != id_:  # ends: half of the cells are free
            cell = (cell + 1) & (size - 1)
            number = np.int64(load32(scratch + 4 * cell))
        if number < 0:
            number = found
            found += 1
            store32(scratch + 4 * cell, np.int32(number))
            store64(rough + 8 * number, id_)
            store64(rough + distance + 8 * number, 0)
            store64(rough + 2 * distance + 8 * number, first + stride * i)
        times = rough + distance + 8 * number
        store64(times, load64(times) + 1)
        store32(numbers + 4 * i, np.int32(number))
    store64(piece + 8 * _FOUND, found)


def _join_piece(arguments: Any, chunk: Any, scratch: Any) -> None:
    """Put the entries of a piece in their places, and let its lookups know."""
    piece = load64(arguments + 8 * _PIECES) + 8 * _PIECE_WORDS * chunk
    length, table, out = load64(piece + 8 * LENGTH), load64(piece + 8 * TABLE), load64(piece + 8 * _OUT)
    found, start = load64(piece + 8 * _FOUND), load64(piece + 8 * _START)
    rough, distance = load64(arguments + 8 * _ROUGH) + 8 * out, load64(arguments + 8 * _DISTANCE)
    for part in range(3):
        target = load64(arguments + 8 * (_IDS + part)) + 8 * start
        copy_bytes(target, rough + part * distance, 8 * found)
    tables = carray(as_pointer(load64(arguments + 8 * _TABLES) + 2 * start), (found,), np.uint16)
    for e in range(found):
        tables[e] = table
    numbers = carray(as_pointer(load64(arguments + 8 * _NUMBERS) + 4 * out), (length,), np.int32)
    offset = np.int32(start)
    for i in range(length):
        numbers[i] += offset


def _find_chunk(arguments: Any, chunk: Any, scratch: Any) -> None:
    """The rows of some entries. What was read while the index changed is not used."""
    first = chunk * _CHUNK
    size = min(_CHUNK, load64(arguments + 8 * _NUM_WANTED) - first)
    tables = carray(as_pointer(load64(arguments + 8 * _OF_TABLES) + 2 * first), (size,), np.uint16)
    ids = carray(as_pointer(load64(arguments + 8 * _WANTED) + 8 * first), (size,), np.int64)
    rows = carray(as_pointer(load64(arguments + 8 * _ROWS) + 8 * first), (size,), np.int64)
    buckets, num_buckets = load64(arguments + 8 * _BUCKETS), load64(arguments + 8 * _NUM_BUCKETS)
    words = carray(as_pointer(buckets), (num_buckets, 8), np.uint64)
    numbers = carray(as_pointer(buckets), (num_buckets, 16), np.uint32)
    owners = carray(as_pointer(load64(arguments + 8 * _OWNERS)), (load64(arguments + 8 * _NUM_OWNERS), 3), np.uint32)
    shards = carray(as_pointer(load64(arguments + 8 * _SHARDS)), (NUM_SHARDS, 2), np.int64)
    version = load64(arguments + 8 * _VERSION)
    for _ in range(_TRIES):
        before = load_acquire(version)
        if before & 1 == 0:
            find(0, 1, words, numbers, owners, shards, tables, ids, rows)
            fence()
            if load_acquire(version) == before:
                return
        for _ in range(_PAUSES):
            pause()
    for e in range(size):
        rows[e] = -1


@cache
def _piece_kernel() -> int:
    return kernel_address(_number_piece)


@cache
def _join_kernel() -> int:
    return kernel_address(_join_piece)


@cache
def _find_kernel() -> int:
    return kernel_address(_find_chunk)


@njit(nogil=True, cache=True)
def _number(pool: Any, scratch: Any, kernel: Any, pieces: Any, numbers: Any, rough: Any) -> int:
    """Number every piece; how many entries there are."""
    arguments = begin(pool)
    store64(arguments + 8 * _PIECES, pieces.ctypes.data)
    store64(arguments + 8 * _NUMBERS, numbers.ctypes.data)
    store64(arguments + 8 * _ROUGH, rough.ctypes.data)
    store64(arguments + 8 * _DISTANCE, 8 * rough.shape[1])
    run(pool, kernel, pieces.shape[0], scratch)
    count = 0
    for c in range(pieces.shape[0]):
        pieces[c, _START] = count
        count += pieces[c, _FOUND]
    return count


@njit(nogil=True, cache=True)
def _join(
    pool: Any, scratch: Any, kernel: Any, pieces: Any, numbers: Any, rough: Any, tables: Any, ids: Any, counts: Any,
    firsts: Any,
) -> None:  # fmt: skip
    arguments = begin(pool)
    store64(arguments + 8 * _PIECES, pieces.ctypes.data)
    store64(arguments + 8 * _NUMBERS, numbers.ctypes.data)
    store64(arguments + 8 * _ROUGH, rough.ctypes.data)
    store64(arguments + 8 * _DISTANCE, 8 * rough.shape[1])
    store64(arguments + 8 * _IDS, ids.ctypes.data)
    store64(arguments + 8 * _COUNTS, counts.ctypes.data)
    store64(arguments + 8 * _FIRSTS, firsts.ctypes.data)
    store64(arguments + 8 * _TABLES, tables.ctypes.data)
    run(pool, kernel, pieces.shape[0], scratch)


@njit(nogil=True, cache=True)
def _find(
    pool: Any, scratch: Any, kernel: Any, tables: Any, ids: Any, rows: Any, words: Any, owners: Any, shards: Any,
    version: Any,
) -> None:  # fmt: skip
    arguments = begin(pool)
    store64(arguments + 8 * _WANTED, ids.ctypes.data)
    store64(arguments + 8 * _OF_TABLES, tables.ctypes.data)
    store64(arguments + 8 * _NUM_WANTED, ids.shape[0])
    store64(arguments + 8 * _ROWS, rows.ctypes.data)
    store64(arguments + 8 * _BUCKETS, words.ctypes.data)
    store64(arguments + 8 * _NUM_BUCKETS, words.shape[0])
    store64(arguments + 8 * _OWNERS, owners.ctypes.data)
    store64(arguments + 8 * _NUM_OWNERS, owners.shape[0])
    store64(arguments + 8 * _SHARDS, shards.ctypes.data)
    store64(arguments + 8 * _VERSION, version.ctypes.data)
    run(pool, kernel, (ids.shape[0] + _CHUNK - 1) // _CHUNK, scratch)
