"""A Parquet footer in, the positions of column chunks out; their bytes in, their pages out, with verified checksums.

Supported are plain and dictionary pages of columns without nulls, as `hotbed prepare` writes them. For anything else, and for
damage, the kernels only report failure.

Footer and page headers are structs in Thrift's compact encoding: `step` walks from one value to the next. A walk holds its
position: the fields and list items that lead to the current value. Maps are not supported; Parquet has none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotbed.data.loader.crc import crc32
from hotbed.host.jit import njit

FAILED = -1
OVER, NUMBER, OTHER = 0, 1, 2  # the result of a step: the end, a number, any other value
_STOP, _TRUE, _FALSE, _BYTE, _SHORT, _INT, _LONG, _DOUBLE, _TEXT, _LIST, _SET, _STRUCT = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    12,
)
_DEEPEST = 10
# Rows of a walk: for every open struct or list its current field or item, the type of its items (0: a struct), items left
FIELD, _ITEMS, _LEFT, _STATE = 0, 1, 2, 3
_DEPTH, _VALUE, _AT = 0, 1, 2  # of the last row
NOT_OURS = -1
DATA_PAGE, DICTIONARY_PAGE = 0, 2
PLAIN, DICTIONARY, RLE_DICTIONARY = 0, 2, 8  # encodings; the second is an old name of the third
KIND, START, STORED_BYTES, BYTES, NUM_VALUES, ENCODING, HAS_CHECKSUM, CHECKSUM = range(8)  # of a page
TYPE, CODEC, CHUNK_BYTES, DATA_START, WORDS_START, IS_ELSEWHERE = range(6)  # of a chunk


@njit(nogil=True, cache=True)
def list_chunks(footer: NDArray[np.uint8], found: NDArray[np.int64]) -> bool:
    """Fill `found` [G, C, 6] with the chunks of every row group; False if the footer cannot be read."""
    found[:] = NOT_OURS
    walk = start_walk(0)
    while True:  # ends: every step consumes bytes or closes a struct or list, and fails at the end of the data
        got = step(footer, len(footer), walk)
        if got in (OVER, FAILED):
            return bool(got == OVER)
        path = walk[FIELD, : depth_of(walk) + 1]
        # FileMetaData.row_groups (4), item, RowGroup.columns (1), item, then file_path (1) or meta_data (3) and its field
        if len(path) < 5 or path[0] != 4 or path[2] != 1:
            continue
        if path[1] >= found.shape[0] or path[3] >= found.shape[1]:
            return False
        chunk = found[path[1], path[3]]
        if len(path) == 5 and path[4] == 1:
            chunk[IS_ELSEWHERE] = 1
        elif len(path) == 6 and path[4] == 3 and got == NUMBER:
            _keep_of_chunk(chunk, path[5], value_of(walk))


@njit(nogil=True, cache=True)
def _keep_of_chunk(chunk: NDArray[np.int64], field: int, value: int) -> None:
    """A number of ColumnMetaData."""
    if field == 1:
        chunk[TYPE] = value
    elif field == 4:
        chunk[CODEC] = value
    elif field == 7:
        chunk[CHUNK_BYTES] = value
    elif field == 9:
        chunk[DATA_START] = value
    elif field == 11:
        chunk[WORDS_START] = value


@njit(nogil=True, cache=True)
def list_pages(
    raw: NDArray[np.uint8], chunks: NDArray[np.int64], num_rows: int, found: NDArray[np.int64], first: NDArray[np.int64]
) -> int:
    """Write the pages of chunks [C, 2] (begin, end in `raw`), of `num_rows` rows each, to `found` [P, 8]; returns their number.

    Those of chunk c are first[c] .. first[c + 1] - 1, a dictionary first. -1 if a page is not supported or damaged, or if there
    are too many.
    """
    count = 0
    for chunk in range(len(chunks)):
        first[chunk] = count
        at, end = chunks[chunk]
        num_values = 0
        while at < end:
            if count == len(found):
                return NOT_OURS
            page = found[count]
            at = _header(raw, at, end, page)
            if at < 0 or page[NUM_VALUES] < 0 or page[BYTES] < 0 or not 0 <= page[STORED_BYTES] <= end - at:
                return NOT_OURS
            page[START] = at
            if page[HAS_CHECKSUM] and crc32(raw.ctypes.data + at, page[STORED_BYTES]) != page[CHECKSUM]:
                return NOT_OURS
            at += page[STORED_BYTES]
            if page[KIND] == DATA_PAGE:
                num_values += page[NUM_VALUES]
                numbers = page[ENCODING] in (DICTIONARY, RLE_DICTIONARY)
                if not (page[ENCODING] == PLAIN or (numbers and found[first[chunk], KIND] == DICTIONARY_PAGE)):
                    return NOT_OURS
            elif page[KIND] != DICTIONARY_PAGE or count > first[chunk] or page[ENCODING] not in (PLAIN, DICTIONARY):
                return NOT_OURS
            count += 1
        if num_values != num_rows:
            return NOT_OURS
    first[len(chunks)] = count
    return count


@njit(nogil=True, cache=True)
def _header(raw: NDArray[np.uint8], at: int, end: int, page: NDArray[np.int64]) -> int:
    """Read the header of a page; returns its end, or -1."""
    page[:] = NOT_OURS
    page[HAS_CHECKSUM] = 0
    walk = start_walk(at)
    while True:  # ends: every step consumes bytes or closes a struct or list, and fails at the end of the data
        found = step(raw, end, walk)
        if found == FAILED:
            return NOT_OURS
        if found == OVER:
            return end_of(walk)
        if found == NUMBER:
            _keep(page, walk[FIELD, : depth_of(walk) + 1], value_of(walk))


@njit(nogil=True, cache=True)
def _keep(page: NDArray[np.int64], path: NDArray[np.int64], value: int) -> None:
    """A number of PageHeader, or of the header of a data or dictionary page in it."""
    if len(path) == 2:
        if path[0] in (5, 7) and path[1] in (1, 2):
            page[NUM_VALUES if path[1] == 1 else ENCODING] = value
    elif len(path) == 1:
        if path[0] == 1:
            page[KIND] = value
        elif path[0] == 2:
            page[BYTES] = value
        elif path[0] == 3:
            page[STORED_BYTES] = value
        elif path[0] == 4:
            page[HAS_CHECKSUM] = 1
            page[CHECKSUM] = value & 0xFFFFFFFF


@njit(nogil=True, cache=True)
def start_walk(at: int) -> NDArray[np.int64]:
    """Start a walk through the struct at byte `at`."""
    walk = np.zeros((4, _DEEPEST), dtype=np.int64)
    walk[_STATE, _AT] = at
    return walk


@njit(nogil=True, cache=True)
def depth_of(walk: NDArray[np.int64]) -> int:
    """The depth of the current value: walk[FIELD, : depth + 1] is its path; 0 in the outermost struct."""
    return int(walk[_STATE, _DEPTH])


@njit(nogil=True, cache=True)
def value_of(walk: NDArray[np.int64]) -> int:
    """The current number of a walk."""
    return int(walk[_STATE, _VALUE])


@njit(nogil=True, cache=True)
def end_of(walk: NDArray[np.int64]) -> int:
    """The position after the struct, once the walk is over."""
    return int(walk[_STATE, _AT])


@njit(nogil=True, cache=True)
def _read_number(raw: NDArray[np.uint8], at: int, end: int) -> tuple[int, int]:
    """An unsigned number with seven bits per byte, and its end, or -1."""
    number, shift = np.uint64(0), np.uint64(0)
    while at < end and shift < 64:
        number |= np.uint64(raw[at] & 0x7F) << shift
        at += 1
        if raw[at - 1] < 0x80:
            return np.int64(number), at
        shift += np.uint64(7)
    return 0, FAILED


@njit(nogil=True, cache=True)
def _signed(number: int) -> int:
    return ((number >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(number & 1)


@njit(nogil=True, cache=True)
def _open(walk: NDArray[np.int64], items: int, count: int) -> bool:
    """Go down into a struct (no items) or a list."""
    depth = walk[_STATE, _DEPTH] + 1
    if depth == _DEEPEST:
        return False
    walk[FIELD, depth] = 0 if items == 0 else -1
    walk[_ITEMS, depth], walk[_LEFT, depth] = items, count
    walk[_STATE, _DEPTH] = depth
    return True


@njit(nogil=True, cache=True)
def step(raw: NDArray[np.uint8], end: int, walk: NDArray[np.int64]) -> int:
    """Go to the next value; OVER, NUMBER, OTHER or FAILED."""
    while True:  # ends: every turn consumes a byte or an item, or closes a struct or list
        at, depth = walk[_STATE, _AT], walk[_STATE, _DEPTH]
        if walk[_ITEMS, depth]:
            if walk[_LEFT, depth] == 0:
                walk[_STATE, _DEPTH] -= 1
                continue
            walk[_LEFT, depth] -= 1
            walk[FIELD, depth] += 1
            kind = walk[_ITEMS, depth]
        else:
            if at >= end:
                return FAILED
            kind, ahead = np.int64(raw[at] & 0x0F), np.int64(raw[at] >> 4)
            at += 1
            if kind == _STOP:
                walk[_STATE, _AT] = at
                if depth == 0:
                    return OVER
                walk[_STATE, _DEPTH] -= 1
                continue
            if ahead:
                walk[FIELD, depth] += ahead
            else:
                number, at = _read_number(raw, at, end)
                if at < 0:
                    return FAILED
                walk[FIELD, depth] = _signed(number)
        found, at = _take(raw, at, end, kind, walk)
        if at < 0 or at > end:
            return FAILED
        walk[_STATE, _AT] = at
        if found != OVER:
            return found


@njit(nogil=True, cache=True)
def _take(raw: NDArray[np.uint8], at: int, end: int, kind: int, walk: NDArray[np.int64]) -> tuple[int, int]:
    """Read a value, or open a struct or list (OVER); returns its end, or -1."""
    if kind == _STRUCT:
        return OVER, at if _open(walk, 0, 0) else FAILED
    if kind in (_LIST, _SET):
        if at >= end:
            return OVER, FAILED
        items, count = np.int64(raw[at] & 0x0F), np.int64(raw[at] >> 4)
        at += 1
        if count == 15:
            count, at = _read_number(raw, at, end)
        if at < 0 or items == 0 or count < 0 or count > end:
            return OVER, FAILED
        return OVER, at if _open(walk, items, count) else FAILED
    if kind in (_TRUE, _FALSE):
        return OTHER, at + (
            walk[_ITEMS, walk[_STATE, _DEPTH]] != 0
        )  # one byte each in a list; elsewhere the type is the value
    if kind == _BYTE:
        return OTHER, at + 1
    if kind == _DOUBLE:
        return OTHER, at + 8
    if kind not in (_SHORT, _INT, _LONG, _TEXT):
        return OTHER, FAILED
    number, at = _read_number(raw, at, end)
    if at < 0 or kind != _TEXT:
        walk[_STATE, _VALUE] = _signed(number)
        return NUMBER, at
    return OTHER, at + number if 0 <= number <= end - at else FAILED
