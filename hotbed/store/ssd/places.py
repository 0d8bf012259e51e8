"""Key -> place of its record: an index over the whole key space that takes memory only where keys are used.

8 bytes for each key, in pages that are allocated when they are written, and a byte for each 4,096 keys that says whether any of
them was ever written, so that listing written keys skips the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hotbed.host.pages import zeros
from hotbed.store.ssd.kernels import BLOCK, EXPECTED
from hotbed.store.ssd.segments import Segments

MAX_ROWS = 1 << 36


class Places:
    """`words` [R] as kernels.py describes them. Callers hold the lock of the segments."""

    def __init__(self, num_rows: int) -> None:
        self.words: NDArray[np.int64] = zeros((num_rows,), np.int64, huge=False)
        self.touched = np.zeros((num_rows >> BLOCK) + 1, dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        """Address space; pages become memory when they are written."""
        return self.words.nbytes + self.touched.nbytes

    def written(self, chunk: int) -> Iterator[NDArray[np.int64]]:
        """The keys that have a record, ascending, at most `chunk` at a time."""
        kept: list[NDArray[np.int64]] = []
        num_kept = 0
        for block in np.flatnonzero(self.touched):
            start = int(block) << BLOCK
            words = self.words[start : start + (1 << BLOCK)]
            kept.append(np.flatnonzero(words & (EXPECTED - 1)) + start)
            num_kept += kept[-1].size
            if num_kept >= chunk:
                keys = np.concatenate(kept)
                whole = keys.size - keys.size % chunk
                yield from (keys[at : at + chunk] for at in range(0, whole, chunk))
                kept, num_kept = [keys[whole:]], keys.size - whole
        if num_kept:
            yield np.concatenate(kept)

    def clear(self) -> None:
        """No key has a record."""
        for block in np.flatnonzero(self.touched):
            start = int(block) << BLOCK
            self.words[start : start + (1 << BLOCK)] = 0
        self.touched[:] = 0


def check_integrity(segments: Segments, places: Places) -> None:
    """At rest, index, bitmaps, counts and files agree; an AssertionError has both sides of an equation that does not hold."""
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
