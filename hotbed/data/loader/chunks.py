"""A row group of a Parquet file in, the pages of its columns out, checked and unpacked, ready for pages.py.

Reads the bytes of the requested columns, verifies page checksums, and decompresses pages. For anything that `hotbed prepare`
does not write (nulls, other encodings, a changed or damaged file) the result is None: then Arrow reads it or reports what is
wrong. This module raises no errors but those of an object store that does not answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotbed.data.dataset import RowGroup, footer_of, stamp_of
from hotbed.data.loader.page_headers import (
    BYTES,
    CHUNK_BYTES,
    CODEC,
    DATA_START,
    DICTIONARY_PAGE,
    ENCODING,
    IS_ELSEWHERE,
    KIND,
    NUM_VALUES,
    PLAIN,
    START,
    STORED_BYTES,
    TYPE,
    WORDS_START,
    list_chunks,
    list_pages,
)
from hotbed.data.loader.pages import ColumnPages
from hotbed.data.loader.scatter import FLOAT, INT32, INT64
from hotbed.errors import RemoteError
from hotbed.files import RemotePath, readable

_LETTERS = {1: INT32, 2: INT64, 4: FLOAT}  # Parquet's types
_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}  # and its codecs
_MOST_PAGES = 64  # in a chunk: twenty times what a row group of prepare has
_GAP = 1 << 16  # smaller gaps between two chunks are read rather than skipped
_FILES = 128  # whose footers are kept: about 50 KB each


class Chunks(NamedTuple):
    """The positions of the requested columns of a row group in their file."""

    letters: NDArray[np.int64]  # [C]
    begins: NDArray[np.int64]  # [C]
    ends: NDArray[np.int64]  # [C]
    codecs: tuple[str | None, ...]


class ReadPages(NamedTuple):
    """Pages, and the memory they point to."""

    pages: ColumnPages
    letters: NDArray[np.int64]
    memory: Sequence[Any]  # keeps the addresses alive


class _ThreadBuffer(threading.local):
    """A reusable buffer per thread for the bytes of a file."""

    def __init__(self) -> None:
        self.raw = np.empty(0, dtype=np.uint8)

    def of(self, size: int) -> NDArray[np.uint8]:
        if len(self.raw) < size:
            self.raw = np.empty(size + size // 8, dtype=np.uint8)
        return self.raw[:size]


_buffer = _ThreadBuffer()


def read_pages(group: RowGroup, names: tuple[str, ...]) -> ReadPages | None:
    """The pages of these columns of a row group; None if Arrow must read it. Valid until the next call in this thread."""
    try:
        stamp = stamp_of(group.file)
        if group.stamp is not None and stamp != group.stamp:
            return None
        chunks = _chunks_of(group.file, stamp, names)[group.number]
        if chunks is None:
            return None
        raw, begins = _read(group.file, chunks)
        if stamp_of(group.file) != stamp:
            return None
        return _list_pages(raw, begins, chunks, group.rows)
    except RemoteError:
        raise
    except (OSError, pa.ArrowException, IndexError, ValueError, OverflowError, MemoryError):
        return None


def fetch_ahead(group: RowGroup, names: tuple[str, ...]) -> None:
    """Have the bytes of a row group of a store fetched; of a local file nothing, which the kernel reads ahead itself."""
    if not isinstance(group.file, RemotePath) or group.stamp is None:
        return
    try:
        chunks = _chunks_of(group.file, group.stamp, names)[group.number]
        if chunks is not None:
            group.file.content().fetch_ahead(int(chunks.begins.min()), int(chunks.ends.max()))
    except (OSError, pa.ArrowException, IndexError, ValueError):
        return  # whoever reads the row group reports it


@lru_cache(maxsize=_FILES)
def _chunks_of(file: Path, stamp: tuple[int, int], names: tuple[str, ...]) -> list[Chunks | None]:
    """The chunks of every row group of a file, from its footer; None if Arrow must read it."""
    metadata = pq.read_metadata(readable(file))
    schema = metadata.schema
    columns = [schema.column(number) for number in range(len(schema))]
    where = {column.path: number for number, column in enumerate(columns)}
    numbers = [where.get(name, -1) for name in names]
    # Arrow aborts the process on an unknown codec, so the chunks are listed here
    found = np.empty((metadata.num_row_groups, len(columns), 6), dtype=np.int64)
    ours = all(number >= 0 and columns[number].max_definition_level == 0 for number in numbers)
    if not ours or not list_chunks(np.frombuffer(footer_of(file), dtype=np.uint8), found):
        return [None] * metadata.num_row_groups
    return [_chunks(group, stamp[0]) for group in found[:, numbers]]


def _chunks(found: NDArray[np.int64], file_bytes: int) -> Chunks | None:
    kinds, codecs = found[:, TYPE].tolist(), found[:, CODEC].tolist()
    begins = np.where(found[:, WORDS_START] > 0, found[:, WORDS_START], found[:, DATA_START])
    ends = begins + found[:, CHUNK_BYTES]
    outside = (begins <= 0) | (ends < begins) | (ends > file_bytes) | (found[:, IS_ELSEWHERE] == 1)
    if outside.any() or any(kind not in _LETTERS for kind in kinds) or any(codec not in _CODECS for codec in codecs):
        return None
    letters = np.asarray([_LETTERS[kind] for kind in kinds], dtype=np.int64)
    return Chunks(letters, begins, ends, tuple(_CODECS[codec] for codec in codecs))


def _read(file: Path, chunks: Chunks) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of the chunks, and the start of each in them."""
    runs: list[list[int]] = []  # begin, end in the file
    order = np.argsort(chunks.begins, kind="stable")
    begins = np.empty_like(chunks.begins)
    total = 0
    for column in order:
        begin, end = int(chunks.begins[column]), int(chunks.ends[column])
        if runs and begin - runs[-1][1] <= _GAP:
            total += max(end - runs[-1][1], 0)
            runs[-1][1] = max(end, runs[-1][1])
        else:
            runs.append([begin, end])
            total += end - begin
        begins[column] = total - (runs[-1][1] - begin)
    raw = _buffer.of(total)
    at = 0
    if isinstance(file, RemotePath):
        remote = file.content()
        for begin, end in runs:
            if remote.read_into(raw[at : at + end - begin], begin) != end - begin:
                raise OSError(f"{file} is shorter than its footer says")
            at += end - begin
        return raw, begins
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        for begin, end in runs:
            stop, behind = at + end - begin, begin - at
            while at < stop:
                got = os.preadv(handle, [raw[at:stop].data], at + behind)
                if got == 0:
                    raise OSError(f"{file} is shorter than its footer says")
                at += got
    finally:
        os.close(handle)
    return raw, begins


def _list_pages(raw: NDArray[np.uint8], begins: NDArray[np.int64], chunks: Chunks, num_rows: int) -> ReadPages | None:
    places = np.stack([begins, begins + chunks.ends - chunks.begins], axis=1)
    found = np.empty((_MOST_PAGES * len(places), 8), dtype=np.int64)
    first = np.empty(len(places) + 1, dtype=np.int64)
    count = list_pages(raw, places, num_rows, found, first)
    if count < 0:
        return None
    found = found[:count]
    column = np.repeat(np.arange(len(places)), np.diff(first))
    addresses, sizes = raw.ctypes.data + found[:, START], found[:, STORED_BYTES]
    memory = [] if not any(chunks.codecs) else _unpack(raw, found, [chunks.codecs[one] for one in column.tolist()])
    if memory:
        addresses = np.asarray([piece.address for piece in memory], dtype=np.int64)
        sizes = np.asarray([piece.size for piece in memory], dtype=np.int64)
    is_words = found[:, KIND] == DICTIONARY_PAGE
    words, num_words = np.zeros((2, len(places)), dtype=np.int64)
    words[column[is_words]], num_words[column[is_words]] = addresses[is_words], found[is_words, NUM_VALUES]
    widths = np.where(chunks.letters == INT64, 8, 4)[column[is_words]]
    if (found[is_words, NUM_VALUES] * widths > sizes[is_words]).any():
        return None
    data = ~is_words
    pages = ColumnPages(
        first - np.concatenate([[0], np.cumsum(is_words)])[first],
        addresses[data],
        (addresses + sizes)[data],
        found[data, NUM_VALUES],
        words,
        np.where(found[data, ENCODING] == PLAIN, -1, num_words[column[data]]),
    )
    return ReadPages(pages, chunks.letters, [raw, *memory])


def _unpack(raw: NDArray[np.uint8], found: NDArray[np.int64], codecs: list[str | None]) -> list[pa.Buffer]:
    """The decompressed bytes of every page."""
    whole = pa.py_buffer(raw)
    pieces = []
    for codec, page in zip(codecs, found.tolist()):
        stored = whole.slice(page[START], page[STORED_BYTES])
        pieces.append(stored if codec is None else pa.decompress(stored, page[BYTES], codec))
    return pieces
