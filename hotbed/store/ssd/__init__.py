"""Rows on an SSD: an append-only log of segment files with an index in memory.

store.py        SsdStore: the methods of a store, over
places.py       key -> place
segments.py     the files, the cap, and which files are still needed
append.py       a batch at the end of the log, whole or not at all
read.py         places -> records, with many reads in flight
compaction.py   rewrites segments that are mostly stale
frozen.py       rows of one moment for a checkpoint, and back into a store
scan.py         a segment from start to end
format.py       the files, byte by byte
kernels.py      compiled code
"""

from hotbed.store.ssd.format import INDEX_NAME, IndexedSegment
from hotbed.store.ssd.frozen import FrozenRows, FrozenStore, frozen_items, segments_of
from hotbed.store.ssd.store import BYTES_PER_KEY, SsdStore

__all__ = [
    "BYTES_PER_KEY",
    "INDEX_NAME",
    "FrozenRows",
    "FrozenStore",
    "IndexedSegment",
    "SsdStore",
    "frozen_items",
    "segments_of",
]
