"""Rows on an SSD: an append-only log of segment files, and an index of them in memory.

Every record is verified against its checksum when it is read. A batch is written at the end of the log at once, whatever its
keys. The records it replaces become stale, and compaction rewrites segments that are mostly stale (compaction.py). Reads of a
batch are sorted, neighbours are joined, and many threads issue them concurrently (read.py). The price: 8 bytes of memory for
each key that was ever used, and up to twice the bytes of the rows on disk.

Files never take more than `max_bytes`. One segment of it is reserved for compaction, which copies before it deletes.

Rows outlive the process in checkpoints only (frozen.py): files that a dead process left are deleted when the folder is opened,
and `close` deletes the store's own.

fetch, expect and write come from one thread at a time; read, items, freeze and sizes may come from any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import StoreError, without_room
from hotbed.host.memory import in_words
from hotbed.store.counts import TierContents, TierCounts, Tiers, TierSizes
from hotbed.store.ssd import kernels
from hotbed.store.ssd.append import Appender, BatchPiece, NoRoomError
from hotbed.store.ssd.compaction import Compaction
from hotbed.store.ssd.format import HEADER_BYTES, MAX_RECORD_BYTES, IndexedSegment, record_bytes
from hotbed.store.ssd.frozen import FrozenRows, FrozenStore, SavedSegments, adopt, sync
from hotbed.store.ssd.places import MAX_ROWS, Places, check_integrity
from hotbed.store.ssd.read import RecordPlaces, read_records
from hotbed.store.ssd.segments import Segments, cannot_write

BYTES_PER_KEY = 9  # of the index and the bitmaps
_CHUNK = 1 << 16
_SMALLEST, _LARGEST = 1 << 20, 1 << 32  # bytes of a segment, unless the caller says otherwise
SEGMENTS = 256  # under the cap: few enough for the descriptors a process may have


class SsdStore:
    """Records [R, W] of all keys 0..R-1, in files in a folder of their own."""

    def __init__(
        self,
        folder: Path,
        num_rows: int,
        width: int,
        first: Callable[[Tensor], Tensor],
        *,
        max_bytes: int,
        segment_bytes: int = 0,
    ) -> None:
        stride = record_bytes(width)
        segment_bytes = segment_bytes or min(max(max_bytes // SEGMENTS, _SMALLEST), _LARGEST)
        _check_shape(num_rows, stride, max_bytes, segment_bytes)
        self._segments = Segments(folder, width, (segment_bytes - HEADER_BYTES) // stride, max_bytes)
        self._places = Places(num_rows)
        self.saved = SavedSegments(self._segments, self._places)
        self._writer, self._compaction = Appender(self._segments), Compaction(self._segments, self._places)
        self._finalizer = weakref.finalize(self, _close, self._segments, self._compaction)
        self._limit = max_bytes - segment_bytes  # for rows; the rest is for the copies of compaction
        self._first, self._num_rows, self._width = first, num_rows, width
        self._bytes_read = self._records_read = self._records_written = 0

    def read(self, keys: Tensor, out: Tensor) -> None:
        """The records of `keys` [U] into `out` [U, W], on the host; what was never written reads as its initial value."""
        numbers = self._checked(keys, out)
        with ExitStack() as stack:
            found = self._find(numbers, False, stack)
            self._read(found, found.positions, numbers, out)
        if found.missing.size:
            absent = torch.from_numpy(found.missing)
            out[absent] = self._first(keys[absent])

    def expect(self, keys: Tensor) -> None:
        """These rows are on their way here: a reader that wants one before it is written must wait."""
        numbers = self._checked(keys)
        with self._segments.lock:
            kernels.expect(self._places.words, self._places.touched, numbers)

    def fetch(self, keys: Tensor, out: Tensor, source: Tensor) -> tuple[int, Tensor]:
        """Pack the rows that were ever written into `out` [>= U, W]: (their number, positions of late ones).

        source int32 [U]: the place of each key's row in `out`, or -1 for a row that still has its initial value. Late rows
        are those that are expected; they have no place yet.
        """
        numbers = self._checked(keys, out)
        with ExitStack() as stack:
            found = self._find(numbers, True, stack)
            rows = np.arange(found.positions.size)
            self._read(found, rows, numbers[found.positions], out)
        place_in_out = source.numpy()
        place_in_out.fill(-1)
        place_in_out[found.positions] = rows
        return rows.size, torch.from_numpy(found.missing)

    def written(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of the keys that have a record."""
        places, found, missing = (np.empty(keys.size, dtype=np.int64) for _ in range(3))
        with self._segments.lock:
            num_found, _ = kernels.find(self._places.words, keys, False, places, found, missing)
        return found[:num_found]

    def read_into(self, rows: NDArray[np.int64], keys: NDArray[np.int64], out: Tensor) -> None:
        """out[row] = the record of keys[row], which was written, for each of these rows, distinct."""
        wanted = self._checked(torch.from_numpy(keys[rows]), out)
        with ExitStack() as stack:
            found = self._find(wanted, False, stack)
            assert not found.missing.size, f"{found.missing.size} of {rows.size} keys have no record"
            self._read(found, rows, keys, out)

    def write(self, keys: Tensor, records: Tensor) -> None:
        """Keep the records [U, W] of `keys` [U], distinct: all of them, or none and the old ones stay."""
        numbers = self._checked(keys, records)
        values = records.numpy()
        if not numbers.size:
            return
        with self._writer.lock:
            try:
                pieces = self._writer.append(numbers, values, self._limit)
            except NoRoomError as error:
                pieces = self._append_after_compaction(numbers, values, error.num_bytes)
            self._commit(numbers, pieces)
            self._records_written += numbers.size
        self._compaction.start_behind()

    def forget(self, keys: Tensor) -> None:
        """These rows are gone: they read as their initial values again."""
        numbers = self._checked(keys)
        segments = self._segments
        with segments.lock:
            kernels.forget(self._places.words, numbers, segments.live_of_slot, segments.num_live)
        self._compaction.start_behind()

    def keys(self) -> Iterator[NDArray[np.int64]]:
        """The keys that have a record, ascending."""
        self._check_open()
        return self._places.written(_CHUNK)

    def items(self, chunk: int = _CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of every row ever written, in key order. A chunk is of one moment, two chunks may not be."""
        self._check_open()
        for written in self._places.written(chunk):
            with ExitStack() as stack:
                found = self._find(written, False, stack)
                keys = written[found.positions]
                records = torch.empty(keys.size, self._width, dtype=torch.float32, device="cpu")
                self._read(found, np.arange(keys.size), keys, records)
            yield torch.from_numpy(keys), records

    def freeze(self) -> FrozenStore:
        """The rows as of now, for a checkpoint: see frozen.py. Its segments stay until it is released."""
        self._compaction.raise_error()
        segments = self._segments
        with self._writer.lock, self._compaction.appender.lock, segments.lock:
            self._check_open()
            self._writer.seal()
            self._compaction.appender.seal()
            held = []
            for segment in segments:
                if segments.num_live[segment.slot]:
                    live = segment.live[: -(-segment.num_records // 64)].copy()
                    held.append((segment, IndexedSegment(segment.path.name, segment.num_records, live)))
            return FrozenStore(segments, held, self._num_rows)

    def holder(self) -> FrozenRows:
        """For a checkpoint, which links the files."""
        return FrozenRows(self.freeze, self.saved)

    def count_as_saved(self) -> None:
        """The files are those of a checkpoint; nothing is added to them."""
        with self._writer.lock, self._compaction.appender.lock, self._segments.lock:
            self._writer.seal()
            self._compaction.appender.seal()
            self.saved.save_all()

    def contents(self) -> TierContents | None:
        """No tier in memory."""
        return None

    def restore_contents(self, held: TierContents) -> bool | None:
        """No tier in memory."""
        return None

    def adopt(self, folder: Path) -> None:
        """Replace all rows by those of a checkpoint's folder: see frozen.py."""
        self._check_open()
        with self._writer.lock, self._compaction.lock:
            self._drop_all()
            try:
                adopt(folder, self._segments, self._places, self._limit)
            except BaseException:
                self._drop_all()
                raise
        self._compaction.start_behind()

    def clear(self) -> None:
        """Every row reads as its initial value."""
        self._check_open()
        with self._writer.lock, self._compaction.lock:
            self._drop_all()

    def flush(self) -> None:
        """Flush everything written to the disk."""
        self._compaction.raise_error()
        self._check_open()
        with self._writer.lock, self._segments.reading():
            for segment in self._segments:
                with cannot_write(segment.path):
                    sync(segment)

    def close(self) -> None:
        """Delete the files and unlock the folder. Frozen rows stay until they are released."""
        self._finalizer()
        self._compaction.raise_error()

    def sizes(self) -> TierSizes:
        """Present sizes of the files."""
        segments = self._segments
        with segments.lock:
            num_records = sum(segment.num_records for segment in segments)
            num_live, num_segments = int(segments.num_live.sum()), sum(1 for _ in segments)
            used = segments.used_bytes
        return TierSizes(
            ssd_bytes=used,
            ssd_cap=self.max_bytes,
            ssd_live_bytes=num_live * segments.stride,
            ssd_stale_bytes=(num_records - num_live) * segments.stride,
            ssd_segments=num_segments,
        )

    def tiers(self, num_keys: int) -> Tiers:
        """Counts and sizes of the ssd, where `num_keys` keys were ever used."""
        return Tiers(self.counts, self.sizes()._replace(memory_bytes=num_keys * BYTES_PER_KEY))

    @property
    def counts(self) -> TierCounts:
        """Since the store was opened; takes no lock."""
        compacted = self._compaction.appender.bytes_written
        return TierCounts(
            from_ssd=self._records_read,
            to_ssd=self._records_written,
            bytes_read=self._bytes_read,
            bytes_written=self._writer.bytes_written + compacted,
            bytes_compacted=compacted,
            compactions=self._compaction.num_done,
        )

    @property
    def max_bytes(self) -> int:
        """The cap."""
        return self._segments.max_bytes

    @property
    def num_written(self) -> int:
        return int(self._segments.num_live.sum())

    @property
    def array(self) -> None:
        """Rows are in files."""

    @property
    def tiered(self) -> None:
        """No tier in memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes of address space of the index and bitmaps, not of the disk; pages become memory when they are used."""
        return self._places.num_bytes + sum(segment.live.nbytes for segment in self._segments)

    def check_integrity(self) -> None:
        """The conservation laws of index, bitmaps and files; for tests, while no other thread uses the store."""
        self._compaction.wait()
        check_integrity(self._segments, self._places)

    def _find(self, keys: NDArray[np.int64], waits: bool, stack: ExitStack) -> RecordPlaces:
        """Where the records of keys are; they stay readable there until the stack is left."""
        places, found, missing = (np.empty(keys.size, dtype=np.int64) for _ in range(3))
        with self._segments.lock:
            num_found, num_missing = kernels.find(self._places.words, keys, waits, places, found, missing)
            files = stack.enter_context(self._segments.reading())
        return RecordPlaces(places[:num_found], found[:num_found], missing[:num_missing], files)

    def _read(self, found: RecordPlaces, rows: NDArray[np.int64], keys: NDArray[np.int64], out: Tensor) -> None:
        """out[rows[i]] is the record at places[i], which must be of keys[rows[i]]."""
        if rows.size:
            self._bytes_read += read_records(self._segments, found, rows, keys, out.numpy())
            self._records_read += rows.size

    def _drop_all(self) -> None:
        """Every row reads as its initial value."""
        segments = self._segments
        with segments.lock:
            self._writer.seal()
            self._compaction.appender.seal()
            self._places.clear()
            segments.num_live[:] = 0
            for segment in segments:
                if not segments.is_dead(segment):
                    segment.live[:] = 0
                    segments.retire(segment)
        segments.wait_for_readers()

    def _commit(self, keys: NDArray[np.int64], pieces: list[BatchPiece]) -> None:
        segments, places = self._segments, self._places
        with segments.lock:
            try:
                for piece in pieces:
                    part = keys[piece.start : piece.stop]
                    arrays = segments.live_of_slot, segments.num_live
                    kernels.commit(places.words, places.touched, part, piece.place, *arrays)
            finally:  # even after a KeyboardInterrupt: records that are not in the index are stale
                self._writer.settle(pieces)

    def _append_after_compaction(
        self, keys: NDArray[np.int64], records: NDArray[np.float32], num_bytes: int
    ) -> list[BatchPiece]:
        needed = num_bytes + HEADER_BYTES  # compaction may seal the segment that is being written
        if self._compaction.make_room(needed, self._limit, self._writer):
            return self._writer.append(keys, records, self._limit)
        sizes, cap = self.sizes(), self._segments.max_bytes
        held = sum(segment.num_bytes for segment in self._segments if segment.num_holds)
        raise without_room(
            StoreError,
            f"{self._segments.folder} has reached its cap: this write needs {in_words(num_bytes)}; live rows take "
            f"{in_words(sizes.ssd_live_bytes)}, stale ones {in_words(sizes.ssd_stale_bytes)}"
            + (f", a checkpoint in progress holds {in_words(held)}" if held else "")
            + f", and of ssd={in_words(cap)} {in_words(cap - self._limit)} are kept for compaction. Nothing is lost. Give a "
            "larger ssd=, use fewer rows or a smaller dim, or let rows expire.",
        )

    def _checked(self, keys: Tensor, records: Tensor | None = None) -> NDArray[np.int64]:
        """The keys, if the store is open and healthy and no key or shape can reach foreign memory."""
        self._compaction.raise_error()
        self._check_open()
        numbers: NDArray[np.int64] = keys.numpy()
        fits = records is None or (
            records.dtype == torch.float32
            and records.is_contiguous()
            and records.shape[0] >= numbers.size
            and records.shape[1:] == (self._width,)
        )
        if not fits or numbers.dtype != np.int64 or numbers.ndim != 1 or not keys.is_contiguous():
            shape = "none" if records is None else f"{records.dtype} {list(records.shape)}"
            raise ValueError(
                f"keys {keys.dtype} {list(keys.shape)} and records {shape} must be contiguous, int64 [U] and float32 "
                f"[U, {self._width}]"
            )
        wrong = kernels.outside(numbers, self._num_rows)
        if wrong >= 0:
            raise IndexError(f"key {numbers[wrong]} at position {wrong} is not in 0..{self._num_rows - 1}")
        return numbers

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise StoreError(f"the store in {self._segments.folder} is closed.")


def _close(segments: Segments, compaction: Compaction) -> None:
    compaction.stop()
    segments.close()


def _check_shape(num_rows: int, stride: int, max_bytes: int, segment_bytes: int) -> None:
    if num_rows > MAX_ROWS:
        raise StoreError(
            f"{num_rows:,} rows: a group on ssd has at most {MAX_ROWS:,}. Use hashing=True or dynamic ids."
        )
    if stride > MAX_RECORD_BYTES:
        raise StoreError(f"records of {in_words(stride)}: at most {in_words(MAX_RECORD_BYTES)}. Use a smaller dim.")
    if segment_bytes < HEADER_BYTES + stride or max_bytes < 3 * segment_bytes:
        raise without_room(
            StoreError,
            f"ssd={in_words(max_bytes)} is too little: three segments of {in_words(segment_bytes)} must fit, and a record of "
            f"{in_words(stride)} into each.",
        )
