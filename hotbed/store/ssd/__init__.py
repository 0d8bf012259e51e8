"""Rows on an SSD: an append-only log of segment files with an index in memory.

store.py        SsdStore: the verbs of a store, over
places.py       key -> place
segments.py     the files, the cap, and who still needs a file
append.py       a batch at the end of the log, all or nothing
read.py         places -> records, with readers.py: many reads in flight
compaction.py   rewriting what is mostly stale
frozen.py       rows of one moment for a checkpoint; adopt.py takes them back
scan.py         a segment from start to end
format.py       what is in the files, byte by byte
kernels.py      all that is compiled
"""

from hotbed.store.ssd.format import INDEX_NAME, IndexedSegment
from hotbed.store.ssd.frozen import FrozenRows, FrozenStore, frozen_items
from hotbed.store.ssd.store import BYTES_PER_KEY, SsdSizes, SsdStore

__all__ = [
    "BYTES_PER_KEY",
    "INDEX_NAME",
    "FrozenRows",
    "FrozenStore",
    "IndexedSegment",
    "SsdSizes",
    "SsdStore",
    "frozen_items",
]
