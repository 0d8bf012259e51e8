"""Reads the live records of a segment from start to end, piece by piece, each verified.

Compaction, adopting and reading a checkpoint use it. Pieces of 4 MiB without a live record are not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError
from hotbed.store.ssd.format import HEADER_BYTES, Bits, Header, record_bytes
from hotbed.store.ssd.kernels import decode_live

_PIECE = 4 << 20  # bytes


class LiveRecords(NamedTuple):
    """Some live records of a segment. The next ones overwrite them."""

    numbers: NDArray[np.int64]  # [n] in the segment
    keys: NDArray[np.int64]  # [n]
    records: NDArray[np.float32]  # [n, W]


class SegmentFile(NamedTuple):
    """A segment to read."""

    path: Path
    handle: int
    header: Header


def scan(file: SegmentFile, num_records: int, live: Bits) -> Iterator[LiveRecords]:
    """The records whose bit in `live` is set, in order; StoreError at one that is damaged."""
    width, stride = file.header.width, record_bytes(file.header.width)
    most = max(_PIECE // stride // 64, 1) * 64  # whole words of the bitmap
    buffer = np.empty(most * stride, dtype=np.uint8)
    numbers, keys = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    records = np.empty((most, width), dtype=np.float32)
    seed = np.uint64(file.header.seed)
    for first in range(0, num_records, most):
        stop = min(first + most, num_records)
        if not live[first // 64 : -(-stop // 64)].any():
            continue
        _read_fully(file, buffer.data[: (stop - first) * stride], HEADER_BYTES + first * stride)
        found = decode_live(buffer.ctypes.data, stride, first, stop, seed, live, numbers, keys, records)
        if found < 0:
            at = HEADER_BYTES + (-1 - found) * stride
            key = int(np.frombuffer(os.pread(file.handle, 8, at), dtype=np.int64)[0])
            raise damaged(file.path, at, key)
        yield LiveRecords(numbers[:found], keys[:found], records[:found])


def damaged(path: Path, offset: int, key: int) -> StoreError:
    """The error for a record that must not be used."""
    return StoreError(
        f"{path} is damaged: the record at byte {offset} (key {key}) does not match its checksum. Its row is lost here; "
        f"check the disk and resume from a checkpoint."
    )


def truncated(path: Path, offset: int) -> StoreError:
    return StoreError(
        f"{path} is damaged: it ends before byte {offset}, where a record should be. Check the disk and resume from a "
        f"checkpoint."
    )


def unreadable(path: Path, offset: int, number: int) -> StoreError:
    return StoreError(
        f"{path} cannot be read at byte {offset}: {os.strerror(number)}. Check the disk and resume from a checkpoint."
    )


def _read_fully(file: SegmentFile, buffer: memoryview, offset: int) -> None:
    while buffer:
        try:
            got = os.preadv(file.handle, [buffer], offset)
        except OSError as error:
            raise unreadable(file.path, offset, error.errno or 0) from error
        if got == 0:
            raise truncated(file.path, offset)
        buffer, offset = buffer[got:], offset + got
