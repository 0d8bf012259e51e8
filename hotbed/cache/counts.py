"""What a cache has done since it was made."""

from __future__ import annotations

import operator
from typing import NamedTuple


class CacheCounts(NamedTuple):
    """Cumulative counts: over distinct keys of windows, over lookups, over rows and bytes moved."""

    windows: int = 0
    batches: int = 0
    keys: int = 0  # distinct keys, window by window
    hits: int = 0
    misses: int = 0  # keys = hits + misses
    created: int = 0  # misses whose row had never been written: made on the device, not copied
    evictions: int = 0
    written_back: int = 0  # evictions of rows that had changed
    lookups: int = 0
    missed_lookups: int = 0
    bytes_in: int = 0  # to the device
    bytes_out: int = 0
    stall_seconds: float = 0.0  # time training waited for a window

    def plus(self, other: CacheCounts) -> CacheCounts:
        """Field by field."""
        return CacheCounts(*map(operator.add, self, other))

    def minus(self, other: CacheCounts) -> CacheCounts:
        """What happened since `other`."""
        return CacheCounts(*map(operator.sub, self, other))

    @property
    def hit_rate(self) -> float:
        """Over distinct keys of windows; 1 when there were none."""
        return self.hits / self.keys if self.keys else 1.0

    @property
    def lookup_hit_rate(self) -> float:
        """Over lookups; 1 when there were none."""
        return 1 - self.missed_lookups / self.lookups if self.lookups else 1.0
