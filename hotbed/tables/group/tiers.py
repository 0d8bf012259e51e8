"""Groups of tables in, what their tiers below the device did and hold out; None where no group has rows on an ssd.

Without an ssd there is nothing to add to what the cache counts: every row that is not on the device is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.sizing.budget import BASE_BYTES, SSD_BYTES_PER_KEY
from hotbed.store import SsdStore, TieredStore, tiered
from hotbed.store.counts import TierCounts, Tiers, TierSizes
from hotbed.tables.group.cached import CachedGroup
from hotbed.tables.group.group import TableGroup


def tiers_of(groups: Sequence[TableGroup], memory_budget: int) -> Tiers | None:
    """Summed over the groups; `memory_budget` is for all of them together."""
    counts, sizes = TierCounts(), TierSizes(memory_budget=memory_budget)
    has_ssd = False
    for group in groups:
        if isinstance(group, CachedGroup) and isinstance(group.store, SsdStore | TieredStore):
            counts, sizes = counts.plus(group.store.counts), sizes.plus(_sizes(group, group.store))
            has_ssd = True
    return Tiers(counts, sizes) if has_ssd else None


def _sizes(group: CachedGroup, store: SsdStore | TieredStore) -> TierSizes:
    ssd = store.sizes()
    found = TierSizes(
        memory_bytes=_memory_of(group, store),
        ssd_bytes=ssd.file_bytes,
        ssd_cap=store.max_bytes,
        ssd_live_bytes=ssd.live_bytes,
        ssd_stale_bytes=ssd.stale_bytes,
        ssd_segments=ssd.num_segments,
    )
    if isinstance(store, SsdStore):
        return found
    return found._replace(memory_slots=store.num_slots, memory_rows=store.num_in_memory)


def _memory_of(group: CachedGroup, store: SsdStore | TieredStore) -> int:
    """What rows in memory take with all that finds them, as the budget counts it (budget.py)."""
    ids = group.ids.translator if group.ids is not None else None
    keys, index = (group.num_rows, 0) if ids is None else (ids.end, max(0, ids.num_bytes - BASE_BYTES))
    if isinstance(store, SsdStore):  # memory is the cache
        return index + keys * SSD_BYTES_PER_KEY + group.records.nbytes + group.cache.num_bytes
    per_slot = group.layout.width * 4 + tiered.BYTES_PER_SLOT
    return index + keys * tiered.BYTES_PER_KEY + store.num_slots_used * per_slot
