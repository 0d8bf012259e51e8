"""Appends a batch of records to segments, whole or not at all.

Records are encoded into a buffer and written in order, at the end of one segment and then of the next: no seek, one system
call per MiB. A write that fails is undone: the segment is cut to its old length, new ones are deleted, and the index never knew
of it. Rows and compaction append to separate segments: records that compaction copies are cold, and apart from new ones they
stay live longer.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.store.ssd.format import HEADER_BYTES
from hotbed.store.ssd.kernels import encode
from hotbed.store.ssd.segments import Segment, Segments, cannot_write, start_writing_out, write_fully

_PIECE = 1 << 20  # bytes


class BatchPiece(NamedTuple):
    """Records start..stop-1 of a batch, in the segment from record number `first` on."""

    segment: Segment
    first: int
    start: int
    stop: int

    @property
    def place(self) -> int:
        return self.segment.slot << 32 | self.first


class NoRoomError(Exception):
    """The batch does not fit under the limit; nothing was written."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes} bytes")
        self.num_bytes = num_bytes


class Appender:
    """The end of the log. `lock` is held from append until the index knows the records and `settle` was called."""

    def __init__(self, segments: Segments) -> None:
        self.lock = threading.RLock()
        self.bytes_written = 0
        self._segments = segments
        self._current: Segment | None = None
        self._buffer = np.empty(max(_PIECE // segments.stride, 1) * segments.stride, dtype=np.uint8)

    def append(self, keys: NDArray[np.int64], records: NDArray[np.float32], limit: int) -> list[BatchPiece]:
        """Write the records [n, W] of keys [n] if all files take no more than `limit` bytes then, else NoRoomError."""
        segments, num_records = self._segments, keys.shape[0]
        old, room = self._current, self._room()
        num_new = -(-max(num_records - room, 0) // segments.capacity)
        num_bytes = num_records * segments.stride + num_new * HEADER_BYTES
        if not segments.reserve(num_bytes, limit):
            raise NoRoomError(num_bytes)
        pieces: list[BatchPiece] = []
        start = 0
        try:
            with cannot_write(segments.folder if old is None else old.path):
                while start < num_records:
                    segment = self._writable()
                    segment.settled = False
                    stop = min(start + self._room(), num_records)
                    pieces.append(BatchPiece(segment, segment.num_records, start, stop))
                    self._write(segment, keys[start:stop], records[start:stop])
                    segment.num_records += stop - start
                    start = stop
        except BaseException:
            self._take_back(old, pieces, num_bytes)
            raise
        self.bytes_written += num_bytes
        return pieces

    @staticmethod
    def settle(pieces: list[BatchPiece]) -> None:
        """The index has these records."""
        for piece in pieces:
            piece.segment.settled = True

    def seal(self) -> None:
        """Append nothing more to the existing segments."""
        if self._current is not None:
            self._current.sealed = True
            self._current = None

    def _room(self) -> int:
        return 0 if self._current is None else self._segments.capacity - self._current.num_records

    def _writable(self) -> Segment:
        if self._room() == 0:
            new = self._segments.create()
            self.seal()
            self._current = new
        assert self._current is not None
        return self._current

    def _write(self, segment: Segment, keys: NDArray[np.int64], records: NDArray[np.float32]) -> None:
        stride = self._segments.stride
        most = self._buffer.size // stride
        seed = np.uint64(segment.header.seed)
        for start in range(0, keys.shape[0], most):
            part = slice(start, min(start + most, keys.shape[0]))
            number = segment.num_records + start
            encode(keys[part], records[part], number, seed, self._buffer.ctypes.data, stride)
            data = self._buffer.data[: (part.stop - part.start) * stride]
            write_fully(segment.handle, data, HEADER_BYTES + number * stride)
            start_writing_out(segment.handle, HEADER_BYTES + number * stride, len(data))

    def _take_back(self, old: Segment | None, pieces: list[BatchPiece], num_bytes: int) -> None:
        """Undo the batch: `old` is the segment appended to, all others are new."""
        segments = self._segments
        with segments.lock:
            segments.unreserve(num_bytes)
            for piece in pieces:
                piece.segment.num_records = piece.first
            for segment in {piece.segment for piece in pieces}:
                if segment is not old:
                    segments.used_bytes += HEADER_BYTES
                    segments.drop(segment)
            self._current = old
            if old is not None:
                old.sealed, old.settled = False, True
                with suppress(OSError):  # bytes past its end are not records; they are overwritten or deleted with it
                    os.ftruncate(old.handle, old.num_bytes)
