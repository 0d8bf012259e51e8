"""Places of records -> the records: sorted, neighbours joined, read by many threads, faults told in words."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError
from hotbed.host.intrinsics import SHORT
from hotbed.store.ssd.format import HEADER_BYTES
from hotbed.store.ssd.kernels import plan_runs
from hotbed.store.ssd.readers import DAMAGED, GAP, LONGEST_RUN, Fault, read_runs
from hotbed.store.ssd.scan import damaged, truncated, unreadable
from hotbed.store.ssd.segments import Segments


class RecordPlaces(NamedTuple):
    """Where the records of some keys are, of one moment."""

    places: NDArray[np.int64]
    positions: NDArray[np.int64]  # of their keys among those asked for
    missing: NDArray[np.int64]  # positions of keys without a record, or of those that are expected
    files: tuple[NDArray[np.int64], NDArray[np.int64]]  # descriptors and seeds by slot


def read_records(
    segments: Segments, found: RecordPlaces, rows: NDArray[np.int64], keys: NDArray[np.int64], out: NDArray[np.float32]
) -> int:
    """out[rows[i]] = the record at places[i], verified to be that of keys[rows[i]]: the bytes read."""
    order = np.argsort(found.places)
    places, rows = found.places[order], rows[order]
    offsets, runs = np.empty(places.size, dtype=np.int64), np.empty((places.size, 3), dtype=np.int64)
    num_runs = plan_runs(places, segments.stride, HEADER_BYTES, GAP, LONGEST_RUN, offsets, runs)
    slots, first, stop = runs[:num_runs].T
    jobs = np.stack([found.files[0][slots], found.files[1][slots], first, stop], axis=1)
    fault = read_runs(jobs, offsets, rows, keys, out, segments.stride)
    if fault is not None:
        segment = segments.all[int(places[fault.record] >> 32)]
        assert segment is not None, "a segment went while it was read"
        raise _in_words(fault, segment.path, int(offsets[fault.record]), int(keys[rows[fault.record]]))
    return int((offsets[stop - 1] + segments.stride - offsets[first]).sum())


def _in_words(fault: Fault, path: Path, offset: int, key: int) -> StoreError:
    if fault.kind == DAMAGED:
        return damaged(path, offset, key)
    if fault.kind == SHORT:
        return truncated(path, offset)
    return unreadable(path, offset, fault.kind)
