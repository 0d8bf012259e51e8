"""What the tiers below the device did, and what they hold: numbers that stores keep and sums over groups add up.

TierCounts only rise, from the moment a process opens its stores: a process that resumes a run begins at zero. They are whole
numbers of Python, added once a batch, so they cost nothing beside the rows. TierSizes are of one moment.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray


class TierCounts(NamedTuple):
    """Since the stores were opened. Rows that were never written before are made on the device and asked from no tier."""

    from_memory: int = 0  # rows asked from the store that memory had
    from_ssd: int = 0  # rows that were read from the ssd
    to_ssd: int = 0  # rows written to the ssd; what compaction copies is not among them
    bytes_from_memory: int = 0
    bytes_read: int = 0  # from the ssd, with checksums and what lies between neighbours
    bytes_written: int = 0  # to the ssd: wear, with headers and what compaction copies
    bytes_compacted: int = 0  # the part of it that compaction wrote
    compactions: int = 0  # segments rewritten

    def plus(self, other: TierCounts) -> TierCounts:
        """Field by field."""
        return TierCounts(*(a + b for a, b in zip(self, other)))

    def minus(self, other: TierCounts) -> TierCounts:
        """What happened since `other`."""
        return TierCounts(*(a - b for a, b in zip(self, other)))

    @property
    def asked(self) -> int:
        """Rows asked from the store that had ever been written."""
        return self.from_memory + self.from_ssd


class TierSizes(NamedTuple):
    """Now."""

    memory_slots: int = 0  # rows that memory can hold over the ssd; 0: memory is the cache itself
    memory_rows: int = 0  # rows that it holds
    memory_bytes: int = 0  # rows and all that finds them
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
        """Of the records in segments; 1 when there are none."""
        records = self.ssd_live_bytes + self.ssd_stale_bytes
        return self.ssd_live_bytes / records if records else 1.0


class TierHoldings(NamedTuple):
    """What memory over an ssd holds and the policy knows of it, of one moment; [E] are the slots that were ever taken."""

    num_slots: int
    clock: int
    hand: int
    keys: NDArray[Any]  # int64 [E]; -1: free
    last: NDArray[Any]  # int32 [E]
    uses: NDArray[Any]  # int32 [E]
    free: NDArray[Any]  # int64: slots, the next one first


class Tiers(NamedTuple):
    """Both."""

    counts: TierCounts
    sizes: TierSizes
