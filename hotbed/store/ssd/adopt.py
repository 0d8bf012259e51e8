"""Taking over the segments of a checkpoint: linked into the store's folder, read once, every live record verified.

Only keys are needed to rebuild the index, but a key can be trusted only with its checksum, and the bytes of a record lie in
the pages that its key brings along; verifying runs faster than disks read. Several segments are read at once.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from hotbed.errors import StoreError
from hotbed.host.memory import in_words
from hotbed.store.ssd import kernels
from hotbed.store.ssd.format import HEADER_BYTES, IndexedSegment, no_bits, open_segment, read_index
from hotbed.store.ssd.frozen import link_or_copy
from hotbed.store.ssd.places import Places
from hotbed.store.ssd.scan import SegmentFile, scan
from hotbed.store.ssd.segments import Segment, Segments, cannot_write

_THREADS = 4


def adopt(folder: Path, segments: Segments, places: Places, limit: int) -> None:
    """Fill an empty store with the rows of a folder that Frozen.link_into has filled."""
    index = read_index(folder)
    if index.width != segments.width:
        raise StoreError(
            f"{folder} holds records of {index.width} words, this store has {segments.width}: dim, optimizer or precision "
            f"differ. Use a warm start."
        )
    with ThreadPoolExecutor(_THREADS) as threads:
        tasks = [threads.submit(_adopt_one, folder, one, segments, places, limit) for one in index.segments]
        for task in tasks:
            task.result()


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
        raise StoreError(
            f"{path.parent} does not fit under the cap: {path.name} has {in_words(size)}, {in_words(segments.used_bytes)} of "
            f"{in_words(limit)} are taken. Give a larger ssd=."
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
