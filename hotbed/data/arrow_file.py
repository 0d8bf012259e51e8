"""The files of rows of a dataset: Arrow IPC, not packed, so that nothing has to be decoded.

In: record batches. Out: a file that pandas, Polars and Arrow read, which ends with an empty record batch. The metadata of that
batch is the index: place, length, rows and checksum of every other batch, because IPC has no checksums of its own.

A record batch is read with `pread` into memory of the caller, verified, and only then given to Arrow, which points into that
memory. A mapped file would save the copy, but a file that is truncated while it is mapped, or a disk that fails, kills the
process; a read reports an error.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.files import RemotePath
from hotbed.host.jit import njit

SUFFIX = ".arrow"
_INDEX, _INDEX_SUM, _NAME = b"hotbed.batches", b"hotbed.batches.checksum", b"hotbed.file"
_MAGIC_BYTES = 8  # before the first message
_WRITE_BYTES = 1 << 20  # Arrow writes every column, and what fills it up, on its own
_LANES = 16
_ODD = np.uint64(0x9E3779B97F4A7C15)
_LEFT, _RIGHT = np.uint64(31), np.uint64(33)


class BatchPlace(NamedTuple):
    """A record batch in its file."""

    begin: int
    length: int  # bytes
    rows: int
    checksum: int


class ArrowIndex(NamedTuple):
    """What a file holds."""

    schema: pa.Schema
    places: tuple[BatchPlace, ...]
    content: bytes  # the places as they are in the file
    name: str  # of the file in its dataset, "" where it does not say


class ArrowWriter:
    """Writes one file; without `close` it has no footer and is not readable."""

    def __init__(self, path: Path, schema: pa.Schema, name: str = "") -> None:
        """`name`: the place of the file in its dataset, such as valid/part-00000.arrow; `path` may be temporary."""
        self._schema, self._name = schema, name
        self._sink = pa.BufferedOutputStream(pa.OSFile(str(path), "wb"), _WRITE_BYTES)
        self._writer = pa.ipc.new_file(self._sink, schema)
        self._end = _MAGIC_BYTES + schema.serialize().size
        self._places: list[BatchPlace] = []

    def write(self, table: pa.Table, batch_rows: int) -> None:
        """Write rows in record batches of `batch_rows`."""
        for batch in table.combine_chunks().to_batches(max_chunksize=batch_rows):
            message = np.frombuffer(batch.serialize(), dtype=np.uint8)
            self._writer.write_batch(batch)
            begin, self._end = self._end, self._sink.tell()
            written = self._end - begin
            assert written == len(message), f"pyarrow wrote {written} bytes of a message of {len(message)}"
            self._places.append(BatchPlace(begin, written, batch.num_rows, checksum(message)))

    def close(self) -> None:
        """Write the index and the footer."""
        index = np.asarray(self._places, dtype="<u8").reshape(len(self._places), len(BatchPlace._fields))
        about = {
            _INDEX: index.tobytes().hex(),
            _INDEX_SUM: f"{checksum(index.view(np.uint8).ravel()):016x}",
            _NAME: self._name,
        }
        empty = [pa.array([], type=field.type) for field in self._schema]
        self._writer.write_batch(pa.RecordBatch.from_arrays(empty, schema=self._schema), custom_metadata=about)
        self._writer.close()
        self._sink.close()

    def __enter__(self) -> ArrowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._sink.close()


def read_index(file: Path) -> ArrowIndex:
    """The index of a file; anything wrong is a ValueError, an OSError or an ArrowException."""
    with file.open("rb") as source:
        size = source.seek(0, os.SEEK_END)
        with pa.ipc.open_file(source) as reader:
            if not reader.num_record_batches:
                raise ValueError("it has no index of its record batches")
            last = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
            schema, about = reader.schema, last.custom_metadata
    if about is None or _INDEX not in about or _INDEX_SUM not in about:
        raise ValueError("it has no index of its record batches; hotbed did not write it")
    if len(set(schema.names)) < len(schema):  # also a ValueError if a name is not text
        raise ValueError("two of its columns have the same name")
    content = bytes.fromhex(about[_INDEX].decode())
    index = np.frombuffer(content, dtype=np.uint8)
    width = len(BatchPlace._fields)
    if index.size % (8 * width) or f"{checksum(index):016x}".encode() != about[_INDEX_SUM]:
        raise ValueError("its index is damaged")
    places = tuple(BatchPlace(*one) for one in index.view("<u8").reshape(-1, width).tolist())
    end = max((place.begin + place.length for place in places), default=0)
    if end > size:
        raise ValueError(f"its record batches end at byte {end:,}, and the file at {size:,}")
    return ArrowIndex(schema, places, content, about.get(_NAME, b"").decode())


def read_batch(file: Path, place: BatchPlace, schema: pa.Schema, memory: NDArray[np.uint8]) -> pa.RecordBatch:
    """A record batch, whose columns point into `memory` (uint8 [place.length]); errors as those of `read_index`."""
    if isinstance(file, RemotePath):
        got = file.content().read_into(memory, place.begin)
    else:
        got = _read_local(file, place.begin, memory)
    if got < place.length:
        raise OSError(f"the file ends {place.length - got:,} bytes too early")
    if checksum(memory) != place.checksum:
        raise ValueError("its content does not match its checksum")
    batch = pa.ipc.read_record_batch(pa.py_buffer(memory), schema)
    batch.validate(full=True)
    return batch


def _read_local(file: Path, begin: int, memory: NDArray[np.uint8]) -> int:
    """Fill `memory` from a position of a file on; the bytes that there were."""
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        got = 0
        while got < len(memory):
            more = os.preadv(handle, [memory[got:].data], begin + got)
            if more == 0:
                break
            got += more
        return got
    finally:
        os.close(handle)


def checksum(content: NDArray[np.uint8]) -> int:
    """A checksum of 64 bits; the length must be a multiple of eight.

    Every step is a bijection of its lane, so damage within one word of eight bytes is always found. 8 GB/s; zlib.crc32 has 3.3.
    """
    return int(_mix(content.view("<u8")))


@njit(nogil=True, cache=True)
def _mix(words: Any) -> Any:
    """Word i goes to lane i % 16; the last words and the lanes are mixed one after the other."""
    lanes = np.arange(1, _LANES + 1).astype(np.uint64) * _ODD
    whole = len(words) // _LANES * _LANES
    for first in range(0, whole, _LANES):
        for lane in range(_LANES):
            lanes[lane] = _step(lanes[lane], words[first + lane])
    found = np.uint64(len(words))
    for word in words[whole:]:
        found = _step(found, word)
    for one in lanes:
        found = _step(found, one)
    return found


@njit(nogil=True, cache=True, inline="always")
def _step(lane: Any, word: Any) -> Any:
    lane = (lane ^ word) * _ODD
    return (lane << _LEFT) | (lane >> _RIGHT)
