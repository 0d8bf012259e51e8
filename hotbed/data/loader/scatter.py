"""Columns of a row group in, rows of batches out, in one pass without the GIL.

In: the addresses of the columns from Arrow's C data interface (one call per row group, no Python object per column), and the
target of each row. Out: labels [B], dense [B, N] and ids [B, F] of the batches, row-major.

One tile of rows and four columns at a time: four values of four columns are read as vectors, transposed, and stored as parts
of four rows. For 26 ids in a shuffled block this takes 35 ns a row, value by value 70 ns. Values are checked in the same tile
by the maximum of a column: outside their table, not finite, not 0 or 1.

Consecutive rows are assembled in a buffer that stays in the first-level cache and streamed to memory past the caches (in order
21 ns a row): written in place, every cache line of a batch would be read from memory first (52 ns).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.host.intrinsics import (
    fence,
    load32,
    load64,
    store32,
    store64,
    stream32,
    transpose_4_bytes,
    transpose_8_bytes,
    transpose_int32_to_int64,
)
from hotbed.host.jit import njit

_TILE = 512  # rows: their columns and targets fit the second-level cache
_NEAR = 64  # rows whose targets fit the first-level cache
_FLOAT, _INT32, _INT64 = ord("f"), ord("i"), ord("l")  # Arrow's letters
_NO_LIMIT = np.uint64(0xFFFFFFFFFFFFFFFF)
_NOT_FINITE = np.uint32(0x7F800000)  # and above, without the sign
_MOST_INT32 = np.uint64(0x7FFFFFFF)
_NOWHERE = -1


class Kinds(NamedTuple):
    """The types of the columns: label, dense, ids; label and dense may be absent."""

    letters: NDArray[np.int64]  # [C] _FLOAT, _INT32 or _INT64
    last: NDArray[np.uint64]  # [C] the largest id, _NO_LIMIT for any; unused for numbers
    num_labels: int  # 0 or 1
    num_dense: int


class ScatterBuffers(NamedTuple):
    """Work memory of one thread."""

    targets: NDArray[np.int64]  # [3, _TILE] where the labels, numbers and ids of every row go
    nearby: NDArray[np.int64]  # bytes of _NEAR rows


class RowPlaces(NamedTuple):
    """The targets of the rows of a block: consecutive slabs of `slab_rows` rows."""

    addresses: NDArray[np.int64]  # [S, 3] of labels, dense and ids of every slab
    unwanted: NDArray[np.int64]  # a dummy target for rows that are not needed
    slab_rows: int
    first: int  # the row of the first slab that row `begin` of the block goes to
    begin: int  # range of the block that is needed
    end: int


@njit(nogil=True, cache=True)
def describe(schema: int, array: int) -> NDArray[np.int64]:
    """For every column of a record batch: type letter, nulls (-1: not counted), address of its first value."""
    found = np.empty((load64(array + 32), 3), dtype=np.int64)
    for column in range(len(found)):
        field = load64(load64(schema + 40) + 8 * column)
        child = load64(load64(array + 48) + 8 * column)
        letter = load32(load64(field)) & 0xFF
        found[column, 0] = letter
        found[column, 1] = load64(child + 8)
        found[column, 2] = load64(load64(child + 40) + 8) + _size_of(letter) * load64(child + 16)
    return found


@njit(nogil=True, cache=True)
def scatter(addresses: NDArray[np.int64], kinds: Kinds, place: NDArray[np.int64], spots: RowPlaces) -> int:
    """Row r of the columns at `addresses` becomes row place[r] of its block; the first wrong column, else -1."""
    bench = _scatter_buffers(kinds)
    here = addresses.copy()
    for low in range(0, len(place), _TILE):
        count = min(_TILE, len(place) - low)
        for column in range(len(here)):
            if _is_wrong(kinds, column, here[column], count):
                return column
        _place_tile(here, kinds, place[low : low + count], spots, bench)
        for column in range(len(here)):
            here[column] += _TILE * _size_of(kinds.letters[column])
    fence()
    return _NOWHERE


@njit(nogil=True, cache=True)
def _size_of(letter: int) -> int:
    """Bytes of a value in a column."""
    return 8 if letter == _INT64 else 4


@njit(nogil=True, cache=True)
def _scatter_buffers(kinds: Kinds) -> ScatterBuffers:
    """Work memory to place tiles."""
    row_words = len(kinds.letters)  # of eight bytes: more than a row takes
    return ScatterBuffers(np.empty((3, _TILE), dtype=np.int64), np.empty(_NEAR * row_words, dtype=np.int64))


@njit(nogil=True, cache=True)
def _place_tile(
    addresses: NDArray[np.int64], kinds: Kinds, place: NDArray[np.int64], spots: RowPlaces, bench: ScatterBuffers
) -> None:
    """Copy a tile of rows, whose columns start at `addresses`, to their targets. Call `fence` after the last tile."""
    first_id = kinds.num_labels + kinds.num_dense
    num_ids = len(addresses) - first_id
    dense_bytes, ids_bytes = 4 * kinds.num_dense, 8 * num_ids
    _aim(place, spots, dense_bytes, ids_bytes, bench.targets)
    if kinds.num_labels:
        _place_column(addresses[0], _FLOAT, len(place), bench.targets[0], 0)
    if kinds.num_dense:
        _place_rows(
            addresses[kinds.num_labels : first_id], kinds.letters[kinds.num_labels :], dense_bytes, len(place), 1, bench
        )
    if num_ids:
        _place_rows(addresses[first_id:], kinds.letters[first_id:], ids_bytes, len(place), 2, bench)


@njit(nogil=True, cache=True)
def _place_rows(
    addresses: NDArray[np.int64],
    letters: NDArray[np.int64],
    row_bytes: int,
    count: int,
    which: int,
    bench: ScatterBuffers,
) -> None:
    """Assemble consecutive rows in the buffer and stream them; write others directly."""
    targets = bench.targets[which]
    nearby = bench.nearby.ctypes.data
    for low in range(0, count, _NEAR):
        high = min(low + _NEAR, count)
        goal = targets[low]
        apart = 0
        for row in range(low, high):
            apart |= targets[row] - (goal + row_bytes * (row - low))
        if apart == 0:
            for row in range(low, high):
                targets[row] += nearby - goal
        _place_columns(addresses, letters, low, high, targets)
        if apart == 0:
            _stream(goal, nearby, row_bytes * (high - low))


@njit(nogil=True, cache=True)
def _stream(target: int, source: int, count: int) -> None:
    """Copy a multiple of four bytes past the caches: a batch is not read before it is complete."""
    at = 0
    while at < count and (target + at) & 31:
        store32(target + at, load32(source + at))
        at += 4
    while at + 32 <= count:
        stream32(target + at, source + at)
        at += 32
    while at < count:
        store32(target + at, load32(source + at))
        at += 4


@njit(nogil=True, cache=True)
def _aim(
    place: NDArray[np.int64], spots: RowPlaces, dense_bytes: int, ids_bytes: int, targets: NDArray[np.int64]
) -> None:
    """The addresses of the rows of a tile."""
    share = 1.0 / spots.slab_rows
    for row in range(len(place)):
        if spots.begin <= place[row] < spots.end:
            stream = place[row] - spots.begin + spots.first
            slab = np.int64((stream + 0.5) * share)  # stream // slab_rows, at a third of the time
            at = stream - slab * spots.slab_rows
            targets[0, row] = spots.addresses[slab, 0] + 4 * at
            targets[1, row] = spots.addresses[slab, 1] + dense_bytes * at
            targets[2, row] = spots.addresses[slab, 2] + ids_bytes * at
        else:
            targets[:, row] = spots.unwanted.ctypes.data


@njit(nogil=True, cache=True)
def _is_wrong(kinds: Kinds, column: int, address: int, count: int) -> bool:
    """Whether one of the values at `address` is invalid."""
    letter, last = kinds.letters[column], kinds.last[column]
    if letter == _INT64:
        if last == _NO_LIMIT:
            return False
        largest = np.uint64(0)
        for row in range(count):
            largest = max(largest, np.uint64(load64(address + 8 * row)))
        return bool(largest > last)
    most = np.uint32(0)
    if letter == _INT32:
        if last == _NO_LIMIT:
            return False
        for row in range(count):
            most = max(most, np.uint32(load32(address + 4 * row)))
        return bool(np.uint64(most) > min(last, _MOST_INT32))
    if column >= kinds.num_labels:
        for row in range(count):
            most = max(most, np.uint32(load32(address + 4 * row)) & np.uint32(0x7FFFFFFF))
        return bool(most >= _NOT_FINITE)
    num_wrong = 0
    for row in range(count):
        word = np.uint32(load32(address + 4 * row))
        num_wrong += ((word & np.uint32(0x7FFFFFFF)) != 0) & (word != np.uint32(0x3F800000))
    return bool(num_wrong > 0)


@njit(nogil=True, cache=True)
def _place_columns(
    addresses: NDArray[np.int64], letters: NDArray[np.int64], low: int, high: int, targets: NDArray[np.int64]
) -> None:
    """Copy rows low .. high - 1, four columns at a time; the last four may overlap the previous ones."""
    end = len(addresses)
    width = 4 if letters[0] == _FLOAT else 8  # of a value in a row
    for four in range(0, end, 4):
        at = max(min(four, end - 4), 0)
        letter = letters[at]
        alike = at + 4 <= end and letters[at + 1] == letter and letters[at + 2] == letter and letters[at + 3] == letter
        whole = low
        if alike:
            whole += (high - low) // 4 * 4
            _place_four(addresses[at : at + 4], letter, low, whole, targets, width * at)
        if whole < high:
            for column in range(at, min(at + 4, end)):
                address = addresses[column] + _size_of(letters[column]) * whole
                _place_column(address, letters[column], high - whole, targets[whole:], width * column)


@njit(nogil=True, cache=True)
def _place_four(
    addresses: NDArray[np.int64], letter: int, low: int, high: int, targets: NDArray[np.int64], shift: int
) -> None:
    a, b, c, d = addresses[0], addresses[1], addresses[2], addresses[3]
    for row in range(low, high, 4):
        w, x = targets[row] + shift, targets[row + 1] + shift
        y, z = targets[row + 2] + shift, targets[row + 3] + shift
        if letter == _INT32:
            transpose_int32_to_int64(a + 4 * row, b + 4 * row, c + 4 * row, d + 4 * row, w, x, y, z)
        elif letter == _FLOAT:
            transpose_4_bytes(a + 4 * row, b + 4 * row, c + 4 * row, d + 4 * row, w, x, y, z)
        else:
            transpose_8_bytes(a + 8 * row, b + 8 * row, c + 8 * row, d + 8 * row, w, x, y, z)


@njit(nogil=True, cache=True)
def _place_column(address: int, letter: int, count: int, targets: NDArray[np.int64], shift: int) -> None:
    for row in range(count):
        if letter == _FLOAT:
            store32(targets[row] + shift, load32(address + 4 * row))
        elif letter == _INT32:
            store64(targets[row] + shift, np.int64(load32(address + 4 * row)))
        else:
            store64(targets[row] + shift, load64(address + 8 * row))
