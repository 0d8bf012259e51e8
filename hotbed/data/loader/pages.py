"""Pages of a Parquet row group in, rows of batches out, in one pass without the GIL.

In: the pages of column chunks (page_headers.py). Out: the same rows in the same places as scatter.py writes from Arrow's
columns. No column is ever decoded completely: one tile of rows at a time, plain values are copied from the bytes of the file,
and dictionary indices are looked up into a small buffer first. Making Arrow's columns would cost 75 to 95 ns a row of Criteo.

If something is wrong the kernels only report failure: then Arrow reads the pages again, and decode.py reports the error.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.loader.page_headers import NOT_OURS
from hotbed.data.loader.scatter import TILE, Kinds, RowPlaces, is_wrong, place_tile, scatter_buffers, size_of
from hotbed.host.intrinsics import fence, load8, load32, load64, store32, store64
from hotbed.host.jit import njit

# A cursor: the page, and how many of its values are used. In a dictionary page: bits per index; the start of the next run; of
# this run, the values left, and the repeated index or the position of the next packed bits.
_PAGE, _USED, _WIDTH, _RUN, _LEFT, _NUMBER, _BIT = range(7)
_PACKED = -1


class ColumnPages(NamedTuple):
    """The data pages of all columns, column by column."""

    first: NDArray[np.int64]  # [C + 1] where the pages of a column begin
    addresses: NDArray[np.int64]  # [P] of the bytes
    ends: NDArray[np.int64]  # [P] the address after the last byte
    num_values: NDArray[np.int64]  # [P]
    words: NDArray[np.int64]  # [C] address of the column's dictionary
    num_words: NDArray[np.int64]  # [P] size of that dictionary; -1: a page of plain values


@njit(nogil=True, cache=True)
def scatter_pages(pages: ColumnPages, kinds: Kinds, place: NDArray[np.int64], spots: RowPlaces) -> int:
    """Row r of the pages becomes row place[r] of its block; -1 if a value is wrong or a page is not supported, else 0."""
    num_columns = len(kinds.letters)
    is_known = np.empty(num_columns, dtype=np.bool_)
    for column in range(num_columns):
        if not _fits(pages, kinds, column):
            return NOT_OURS
        numbers = pages.num_words[pages.first[column] : pages.first[column + 1]]
        is_known[column] = (
            len(numbers) > 0 and numbers.min() >= 0
        )  # every value comes from the dictionary, which was checked
    bench = scatter_buffers(kinds)
    room = np.empty((num_columns, TILE), dtype=np.int64)
    cursors = np.zeros((num_columns, 7), dtype=np.int64)
    cursors[:, _PAGE] = pages.first[:-1]
    addresses = np.empty(num_columns, dtype=np.int64)
    for low in range(0, len(place), TILE):
        count = min(TILE, len(place) - low)
        for column in range(num_columns):
            size = size_of(kinds.letters[column])
            address = _next(pages, column, size, cursors[column], count, room[column])
            if address == NOT_OURS or (not is_known[column] and is_wrong(kinds, column, address, count)):
                return NOT_OURS
            addresses[column] = address
        place_tile(addresses, kinds, place[low : low + count], spots, bench)
    fence()
    return 0


@njit(nogil=True, cache=True)
def _fits(pages: ColumnPages, kinds: Kinds, column: int) -> bool:
    """Whether plain pages are long enough, and all values of the dictionary are valid."""
    size = size_of(kinds.letters[column])
    num_words = -1
    for page in range(pages.first[column], pages.first[column + 1]):
        num_words = max(num_words, pages.num_words[page])
        if pages.num_words[page] < 0 and pages.num_values[page] * size > pages.ends[page] - pages.addresses[page]:
            return False
    return num_words <= 0 or not is_wrong(kinds, column, pages.words[column], num_words)


@njit(nogil=True, cache=True)
def _next(
    pages: ColumnPages,
    column: int,
    size: int,
    cursor: NDArray[np.int64],
    count: int,
    room: NDArray[np.int64],
) -> int:
    """The address of the next `count` values of a column: in their page, or collected in `room`; -1 on failure."""
    done = 0
    while done < count:  # ends: every turn takes at least one value or moves to the next page
        page = cursor[_PAGE]
        take = min(pages.num_values[page] - cursor[_USED], count - done)
        if take == 0:
            if page + 1 == pages.first[column + 1]:
                return NOT_OURS
            cursor[:] = 0
            cursor[_PAGE] = page + 1
            continue
        target = room.ctypes.data + size * done
        if pages.num_words[page] < 0:
            source = pages.addresses[page] + size * cursor[_USED]
            if take == count:
                cursor[_USED] += take
                return source
            for value in range(take):
                if size == 8:
                    store64(target + 8 * value, load64(source + 8 * value))
                else:
                    store32(target + 4 * value, load32(source + 4 * value))
        elif not _look_up(pages, column, size, cursor, take, target):
            return NOT_OURS
        cursor[_USED] += take
        done += take
    return np.int64(room.ctypes.data)


@njit(nogil=True, cache=True)
def _look_up(pages: ColumnPages, column: int, size: int, cursor: NDArray[np.int64], take: int, target: int) -> bool:
    """Copy the values of the next indices of a page to `target`; False if an index is outside the dictionary."""
    page = cursor[_PAGE]
    end, words, last = pages.ends[page], pages.words[column], pages.num_words[page] - 1
    if cursor[_USED] == 0:
        if pages.addresses[page] == end:
            return False
        cursor[_WIDTH] = load8(pages.addresses[page])
        cursor[_RUN] = pages.addresses[page] + 1
        if cursor[_WIDTH] > 32:
            return False
    done = 0
    while done < take:
        if cursor[_LEFT] == 0 and not _open_run(end, cursor):
            return False
        some = min(cursor[_LEFT], take - done)
        if cursor[_NUMBER] == _PACKED:
            most = _look_up_bits(cursor[_BIT], cursor[_WIDTH], end, some, words, last, size, target + size * done)
            cursor[_BIT] += some * cursor[_WIDTH]
        else:
            most = cursor[_NUMBER]
            number = min(most, last)
            for value in range(done, done + some):
                _look_up_one(words, number, size, target, value)
        if most > last:
            return False
        cursor[_LEFT] -= some
        done += some
    return True


@njit(nogil=True, cache=True, inline="always")
def _look_up_one(words: int, number: int, size: int, target: int, value: int) -> None:
    if size == 8:
        store64(target + 8 * value, load64(words + 8 * number))
    else:
        store32(target + 4 * value, load32(words + 4 * number))


@njit(nogil=True, cache=True)
def _open_run(end: int, cursor: NDArray[np.int64]) -> bool:
    """Read the header of a run: 2 * length for a repeated index, 2 * groups of eight + 1 for packed indices."""
    at, shift, length = cursor[_RUN], 0, 0
    while True:  # ends: a number has five bytes at most
        if at >= end or shift > 28:
            return False
        byte = np.int64(load8(at))
        at += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    width = cursor[_WIDTH]
    cursor[_LEFT] = length >> 1
    if length & 1:
        cursor[_LEFT] *= 8
        cursor[_NUMBER], cursor[_BIT] = _PACKED, 8 * at
        at += (length >> 1) * width
    else:
        number = np.int64(0)
        for byte in range((width + 7) // 8):
            if at >= end:
                return False
            number |= np.int64(load8(at)) << (8 * byte)
            at += 1
        cursor[_NUMBER] = number
    cursor[_RUN] = at
    return bool(at <= end and cursor[_LEFT] > 0)


@njit(nogil=True, cache=True)
def _look_up_bits(first: int, width: int, end: int, count: int, words: int, last: int, size: int, target: int) -> int:
    """Look up packed indices of `width` bits, from bit `first` of memory on; returns the largest index.

    An index above `last` reads the value at `last`, and the caller refuses the page.
    """
    w = np.uint64(width)
    mask = (np.uint64(1) << w) - np.uint64(1)
    most = value = 0
    step = 4 if width <= 14 else 1  # indices that fit into eight bytes, from any bit of the first byte on
    while value + step <= count and ((first + value * width) >> 3) + 8 <= end:
        bit = first + value * width
        word = np.uint64(load64(bit >> 3)) >> np.uint64(bit & 7)
        number = np.int64(word & mask)
        most = max(most, number)
        _look_up_one(words, min(number, last), size, target, value)
        if step == 4:
            second, third = np.int64((word >> w) & mask), np.int64((word >> (w + w)) & mask)
            fourth = np.int64((word >> (w + w + w)) & mask)
            most = max(most, second, third, fourth)
            _look_up_one(words, min(second, last), size, target, value + 1)
            _look_up_one(words, min(third, last), size, target, value + 2)
            _look_up_one(words, min(fourth, last), size, target, value + 3)
        value += step
    for rest in range(value, count):
        bit = first + rest * width
        word = np.uint64(0)
        for byte in range(((bit & 7) + width + 7) >> 3):
            word |= np.uint64(load8((bit >> 3) + byte)) << np.uint64(8 * byte)
        number = np.int64((word >> np.uint64(bit & 7)) & mask)
        most = max(most, number)
        _look_up_one(words, min(number, last), size, target, rest)
    return most
