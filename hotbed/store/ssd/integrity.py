"""What must be true of a store at rest: index, bitmaps, counts and files say the same."""

from __future__ import annotations

import numpy as np

from hotbed.store.ssd.kernels import EXPECTED
from hotbed.store.ssd.places import Places
from hotbed.store.ssd.segments import Segments


def check_integrity(segments: Segments, places: Places) -> None:
    """An assertion with both sides of the equation that does not hold."""
    keys = np.concatenate([np.empty(0, dtype=np.int64), *places.written(1 << 16)])
    found = (places.words[keys] & (EXPECTED - 1)) - 1
    for segment in segments:
        numbers = np.sort(found[found >> 32 == segment.slot] & 0xFFFFFFFF)
        live = np.flatnonzero(np.unpackbits(segment.live.view(np.uint8), bitorder="little"))
        assert np.array_equal(numbers, live), f"{segment.path}: the index says {numbers} are live, the bitmap {live}"
        count = int(segments.num_live[segment.slot])
        assert count == live.size, f"{segment.path}: {live.size} live, {count} counted"
        size = segment.path.stat().st_size
        assert size == segment.num_bytes, f"{segment.path}: {size} bytes, {segment.num_bytes} counted"
    total = sum(segment.num_bytes for segment in segments)
    assert total == segments.used_bytes, f"files have {total} bytes, {segments.used_bytes} are counted"
    num_live = int(segments.num_live.sum())
    assert keys.size == num_live, f"{keys.size} keys in the index, {num_live} live records"
