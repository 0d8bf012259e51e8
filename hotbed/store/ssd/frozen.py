"""Rows as of one moment, for a checkpoint: sealed segments and which of their records are live.

Freezing copies bitmaps and seals the segment being written; it takes no time. Flushing the segments and linking them into a
checkpoint's folder (`link_into`) can happen in another thread while the store is used. Linked segments are immutable: the store
and all checkpoints share their bytes.

`adopt` takes the segments of a checkpoint back: they are linked into the store's folder and read once, several at a time, and
every live record is verified. The index needs only keys, but a key can be trusted only with its checksum, and the bytes of a
record lie in the pages that its key brings along; verifying is faster than disks are.
"""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from collections.abc import Callable, Collection, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import StoreError, without_room
from hotbed.host.atomic import flush_to_disk
from hotbed.host.memory import in_words
from hotbed.host.threads import run_all
from hotbed.store.ssd import kernels
from hotbed.store.ssd.format import (
    HEADER_BYTES,
    INDEX_NAME,
    Index,
    IndexedSegment,
    no_bits,
    open_segment,
    pack_index,
    read_index,
)
from hotbed.store.ssd.places import Places
from hotbed.store.ssd.scan import SegmentFile, scan
from hotbed.store.ssd.segments import Segment, Segments, cannot_write

_THREADS = 4  # that read segments to be adopted
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}


class FrozenStore:
    """All rows of a store as of one moment. The files stay until `release`, or until this object is freed.

    Made with the lock of the segments held.
    """

    def __init__(self, segments: Segments, held: list[tuple[Segment, IndexedSegment]], num_rows: int) -> None:
        self._held = held
        for segment, _ in held:
            segment.num_holds += 1
        self._release = weakref.finalize(self, _release, segments, [segment for segment, _ in held])
        self._release.atexit = False
        self._index = Index(segments.width, num_rows, [indexed for _, indexed in held])

    def __enter__(self) -> FrozenStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def paths(self) -> list[Path]:
        """The sealed segment files."""
        return [segment.path for segment, _ in self._held]

    @property
    def segments(self) -> list[IndexedSegment]:
        """Name, number of records and live bitmap of each."""
        return self._index.segments

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for a manifest."""
        return {
            "width": self._index.width,
            "num_rows": self._index.num_rows,
            "num_written": sum(segment.num_live for segment in self.segments),
            "num_bytes": sum(segment.num_bytes for segment, _ in self._held),
        }

    def link_into(self, folder: Path) -> None:
        """Put the segments (hard links; copies where the file system has none) and an index file into a folder, flushed."""
        if not self._release.alive:
            raise StoreError("these rows were released; freeze the store again.")
        with cannot_write(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for segment, _ in self._held:
                sync(segment)
                link_or_copy(segment.path, folder / segment.path.name)
            (folder / INDEX_NAME).write_bytes(pack_index(self._index))
            flush_to_disk(folder / INDEX_NAME)
            flush_to_disk(folder)

    def release(self) -> None:
        """The store may delete these files again."""
        self._release()


class SavedSegments:
    """The segments of the last checkpoint: a record in any other was written, or moved by compaction, since."""

    def __init__(self, segments: Segments, places: Places) -> None:
        self._segments, self._places = segments, places
        self.names: frozenset[str] = frozenset()

    def save_all(self) -> None:
        """All rows are as a checkpoint has them."""
        self.names = frozenset(segment.path.name for segment in self._segments)

    def touched(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The keys among these that were written since the last checkpoint, or never, and a few others."""
        with self._segments.lock:
            is_saved = np.array(
                [one is not None and one.path.name in self.names for one in self._segments.all], np.bool_
            )
            places = (self._places.words[keys] & (kernels.EXPECTED - 1)) - 1
        written = places >= 0
        written[written] = is_saved[places[written] >> 32]
        return keys[~written]


class FrozenRows:
    """A Holder (held.py) of rows that are all in files. A checkpoint links the files and reads nothing."""

    def __init__(self, freeze: Callable[[], FrozenStore], saved: SavedSegments) -> None:
        self._freeze, self._saved, self._touched = freeze, saved, False
        self.files: list[FrozenStore] = []

    @property
    def keys(self) -> NDArray[np.int64]:
        return np.empty(0, dtype=np.int64)

    def take(self, touched: bool) -> None:
        """Hold all rows, touched or not: a link costs nothing."""
        self._touched = touched
        self.files.append(self._freeze())

    def items(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())

    def in_files(self, live: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
        keys = np.sort(live())
        return self._saved.touched(keys) if self._touched else keys

    def commit(self) -> None:
        """They are linked."""
        for frozen in self.files:
            self._saved.names = frozenset(segment.name for segment in frozen.segments)

    def give_back(self) -> None:
        """The store may delete the files again."""
        for frozen in self.files:
            frozen.release()


def _release(segments: Segments, held: list[Segment]) -> None:
    with segments.lock:
        for segment in held:
            segment.num_holds -= 1
        segments.reap()


def segments_of(folder: Path) -> frozenset[str]:
    """The names of the segments in a folder that `link_into` has filled. No two segments of a store have one name."""
    return frozenset(segment.name for segment in read_index(folder).segments)


def frozen_items(folder: Path, known: Collection[str] = ()) -> Iterator[tuple[Tensor, Tensor]]:
    """(keys, records) of every row in a folder that `link_into` has filled, in no order, each verified.

    `known` segments are left out. With those of an earlier folder of the store, what is left are the rows written since, and
    some that compaction has moved: a segment in a folder is sealed, so that nothing is added to it.
    """
    index = read_index(folder)
    for segment in index.segments:
        if segment.name in known:
            continue
        path = folder / segment.name
        handle, header = open_segment(path, index.width, segment.num_records)
        try:
            for live in scan(SegmentFile(path, handle, header), segment.num_records, segment.live):
                yield torch.from_numpy(live.keys.copy()), torch.from_numpy(live.records.copy())
        finally:
            os.close(handle)


def sync(segment: Segment) -> None:
    """Flush a segment to the disk. A failure is permanent: the system reports lost bytes once and then forgets."""
    if segment.sync_error is not None:
        raise segment.sync_error
    if not segment.synced:
        try:
            os.fsync(segment.handle)
        except OSError as error:
            segment.sync_error = error
            raise
        segment.synced = segment.sealed


def link_or_copy(source: Path, target: Path) -> None:
    """Two names for one file, or a second file where the file system refuses that."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(source, target)
        flush_to_disk(target)


def adopt(folder: Path, segments: Segments, places: Places, limit: int) -> None:
    """Fill an empty store with the rows of a folder that `FrozenStore.link_into` has filled."""
    index = read_index(folder)
    if index.width != segments.width:
        raise StoreError(
            f"{folder} holds records of {index.width} words, this store has {segments.width}: dim, optimizer or precision "
            f"differ. Use a warm start."
        )

    def take(one: IndexedSegment) -> None:
        _adopt_one(folder, one, segments, places, limit)

    run_all(take, index.segments, threads=_THREADS, name="hotbed-adopt")


def _adopt_one(folder: Path, indexed: IndexedSegment, segments: Segments, places: Places, limit: int) -> None:
    segment = _register(folder / indexed.name, indexed, segments, limit)
    file = SegmentFile(segment.path, segment.handle, segment.header)
    for live in scan(file, indexed.num_records, indexed.live):
        wrong = kernels.outside(live.keys, places.words.size)
        if wrong >= 0:
            raise StoreError(
                f"{folder} holds a row with key {live.keys[wrong]}, this store has {places.words.size} rows. Use a warm start."
            )
        with segments.lock:
            arrays = segments.live_of_slot, segments.num_live
            twice = kernels.adopt(places.words, places.touched, live.keys, segment.slot << 32, live.numbers, *arrays)
        if twice >= 0:
            raise StoreError(f"{folder} is damaged: key {live.keys[twice]} has two records. Use another checkpoint.")


def _register(path: Path, indexed: IndexedSegment, segments: Segments, limit: int) -> Segment:
    """A slot for a linked segment, which is checked but not yet read."""
    handle, header = open_segment(path, segments.width, indexed.num_records)
    size = HEADER_BYTES + indexed.num_records * segments.stride
    os.close(handle)
    if not segments.reserve(size, limit):
        raise without_room(
            StoreError,
            f"{path.parent} does not fit under the cap: {path.name} has {in_words(size)}, {in_words(segments.used_bytes)} of "
            f"{in_words(limit)} are taken. Give a larger ssd=.",
        )
    target = _free_name(segments.folder, path)
    try:
        with cannot_write(target):
            link_or_copy(path, target)
        handle, header = open_segment(target, segments.width, indexed.num_records)
    except BaseException:
        segments.unreserve(size)
        target.unlink(missing_ok=True)
        raise
    segment = segments.register(target, handle, header, no_bits(indexed.num_records))
    segment.num_records = indexed.num_records
    segment.sealed = True
    segments.skip_numbers(header.number)
    return segment


def _free_name(folder: Path, path: Path) -> Path:
    """The segment's own name, unless a checkpoint in progress still holds the file of that name."""
    names = (path.name if number == 0 else f"{path.stem}.{number}.rows" for number in count())
    return next(folder / name for name in names if not (folder / name).exists())
