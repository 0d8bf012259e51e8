"""A footer in, where its column chunks lie out; their bytes in, the pages they are made of out, checked by their checksums.

Plain and dictionary pages of columns without nulls are understood,
which is what `hotbed prepare` writes; of anything else, and of anything damaged, the kernels say no more than that.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hotbed.data.loader.crc import crc32
from hotbed.data.loader.thrift_walk import FAILED, FIELD, NUMBER, OVER, depth_of, end_of, start_walk, step, value_of

NOT_OURS = -1
DATA_PAGE, DICTIONARY_PAGE = 0, 2
PLAIN, DICTIONARY, RLE_DICTIONARY = 0, 2, 8  # encodings; the second is an old name of the third
KIND, START, STORED_BYTES, BYTES, NUM_VALUES, ENCODING, HAS_CHECKSUM, CHECKSUM = range(8)  # of a page
TYPE, CODEC, CHUNK_BYTES, DATA_START, WORDS_START, IS_ELSEWHERE = range(6)  # of a chunk


@njit(nogil=True, cache=True)
def list_chunks(footer: NDArray[np.uint8], found: NDArray[np.int64]) -> bool:
    """Fill `found` [G, C, 6] with the chunks of every row group; False where the footer is no such list."""
    found[:] = NOT_OURS
    walk = start_walk(0)
    while True:  # ends: every step passes bytes or closes what it opened, and fails at the last byte
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
    """The pages of chunks [C, 2] (begin, end in `raw`) of so many rows each, into `found` [P, 8]; their number.

    Those of chunk c are first[c] .. first[c + 1] - 1, a dictionary before all others. -1 where one is not ours, damaged, or
    they do not fit in `found`.
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
    """Read the header of a page; where it ends, or -1."""
    page[:] = NOT_OURS
    page[HAS_CHECKSUM] = 0
    walk = start_walk(at)
    while True:  # ends: every step passes bytes or closes what it opened, and fails at the last byte
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
