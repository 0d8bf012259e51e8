"""What the tiers below the device did, and what they hold: numbers that every store keeps, and sums over groups.

TierCounts only rise. They start at zero when a process opens its stores, also in a process that resumes a run. They are Python
integers, added once per batch, so their cost is negligible compared with moving rows. TierSizes describe one moment.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from numpy.typing import NDArray


class TierCounts(NamedTuple):
    """Since the stores were opened. Rows that were never written are created on the device and requested from no tier."""

    from_memory: int = 0  # requested rows that memory had, and was not asked ahead for
    from_ssd: int = 0  # rows that were read from the ssd
    to_ssd: int = 0  # rows written to the ssd, without the copies of compaction
    bytes_from_memory: int = 0
    bytes_read: int = 0  # from the ssd, with checksums and the gaps between neighbours
    bytes_written: int = 0  # to the ssd: wear, with headers and the copies of compaction
    bytes_compacted: int = 0  # the part of it that compaction wrote
    compactions: int = 0  # segments rewritten
    ahead: int = 0  # rows of those from the ssd that were in memory before they were requested
    waits: int = 0  # windows that had to wait for rows of the ssd

    def plus(self, other: TierCounts) -> TierCounts:
        """Field by field."""
        return TierCounts(*(a + b for a, b in zip(self, other)))

    def minus(self, other: TierCounts) -> TierCounts:
        """What happened since `other`."""
        return TierCounts(*(a - b for a, b in zip(self, other)))

    @property
    def requested(self) -> int:
        """Rows requested from the store that were ever written."""
        return self.from_memory + self.from_ssd

    @property
    def asked(self) -> int:
        """The name of `requested` in 0.1."""
        warnings.warn("TierCounts.asked is called requested", DeprecationWarning, stacklevel=2)
        return self.requested


class TierSizes(NamedTuple):
    """Sizes of the tiers at one moment."""

    memory_slots: int = 0  # rows that memory can hold over the ssd; 0: memory is the cache itself
    memory_rows: int = 0  # rows that it holds
    memory_bytes: int = 0  # rows and their index
    memory_budget: int = 0
    ssd_bytes: int = 0  # all files
    ssd_cap: int = 0
    ssd_live_bytes: int = 0  # records that are the newest of their row
    ssd_stale_bytes: int = 0  # records that are not; compaction drops them
    ssd_segments: int = 0

    def plus(self, other: TierSizes) -> TierSizes:
        """Field by field."""
        return TierSizes(*(a + b for a, b in zip(self, other)))

    @property
    def live_share(self) -> float:
        """Share of live records in segments; 1 if there are no records."""
        records = self.ssd_live_bytes + self.ssd_stale_bytes
        return self.ssd_live_bytes / records if records else 1.0


class TierContents(NamedTuple):
    """What memory over an ssd holds at one moment, and what the policy knows of it; E slots were ever taken."""

    num_slots: int
    clock: int
    hand: int
    keys: NDArray[Any]  # int64 [E]; -1: free
    last: NDArray[Any]  # int32 [E]
    uses: NDArray[Any]  # int32 [E]
    free: NDArray[Any]  # int64: slots, the next one first


class Tiers(NamedTuple):
    """Counts and sizes."""

    counts: TierCounts
    sizes: TierSizes
