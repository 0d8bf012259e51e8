"""Rows as of one moment, for a checkpoint: sealed segments and which of their records are live.

Freezing copies bitmaps and seals the segment being written; it takes no time. Bringing the segments to the disk and linking
them into a checkpoint's folder (`link_into`) can happen in another thread while the store goes on. Linked segments are
immutable: the store and all checkpoints share their bytes.
"""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import StoreError
from hotbed.host.atomic import flush_to_disk
from hotbed.store.ssd.format import INDEX_NAME, Index, IndexedSegment, open_segment, pack_index, read_index
from hotbed.store.ssd.scan import SegmentFile, scan
from hotbed.store.ssd.segments import Segment, Segments, cannot_write

_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}


class FrozenStore:
    """All rows of a store as of one moment. The files stay until `release`, or until nobody has this any more.

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
        """What a manifest may say of it."""
        return {
            "width": self._index.width,
            "num_rows": self._index.num_rows,
            "num_written": sum(segment.num_live for segment in self.segments),
            "num_bytes": sum(segment.num_bytes for segment, _ in self._held),
        }

    def link_into(self, folder: Path) -> None:
        """Put the segments (hard links; copies where the file system has none) and an index file into a folder, on the disk."""
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


class FrozenRows:
    """A Holder (held.py) of rows that are all in files: nothing is read, a checkpoint links the files."""

    def __init__(self, freeze: Callable[[], FrozenStore]) -> None:
        self._freeze = freeze
        self.files: list[FrozenStore] = []

    @property
    def keys(self) -> NDArray[np.int64]:
        return np.empty(0, dtype=np.int64)

    def take(self, touched: bool) -> None:
        """All rows, whatever was touched: a link costs nothing."""
        self.files.append(self._freeze())

    def items(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())

    def in_files(self, live: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
        return np.sort(live())

    def commit(self) -> None:
        """They are linked."""

    def give_back(self) -> None:
        """The store may delete the files again."""
        for frozen in self.files:
            frozen.release()


def _release(segments: Segments, held: list[Segment]) -> None:
    with segments.lock:
        for segment in held:
            segment.num_holds -= 1
        segments.reap()


def frozen_items(folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """(keys, records) of every row in a folder that `link_into` has filled, in no order, every one verified."""
    index = read_index(folder)
    for segment in index.segments:
        path = folder / segment.name
        handle, header = open_segment(path, index.width, segment.num_records)
        try:
            for live in scan(SegmentFile(path, handle, header), segment.num_records, segment.live):
                yield torch.from_numpy(live.keys.copy()), torch.from_numpy(live.records.copy())
        finally:
            os.close(handle)


def sync(segment: Segment) -> None:
    """Bring a segment to the disk. One that failed fails for ever: the system reports lost bytes once and then forgets."""
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
