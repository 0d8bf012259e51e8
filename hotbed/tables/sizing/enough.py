"""What would be enough: a cache for a batch of a known size, or memory between a cache and an ssd, as options a user can type.

Errors and forecasts recommend these amounts; budget.py says what groups get of the amounts that were given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hotbed.cache import BYTES_PER_SLOT
from hotbed.host.memory import typed
from hotbed.store import tiered
from hotbed.tables.sizing.budget import BYTES_PER_ID, SSD_BYTES_PER_KEY, Size


def with_some_to_spare(needed: int) -> int:
    """The slots that hold the largest batch of a long epoch too, if one of its batches needs `needed` rows.

    The distinct rows of batches of one size vary by less than the root of their number; this adds four times that.
    """
    return needed + 4 * math.isqrt(needed)


def share_of(num_slots: int, num_rows: int) -> str:
    """As an argument of --cache: four digits, rounded up, so that it is enough."""
    unit = 10.0 ** (math.floor(math.log10(num_slots / num_rows)) - 3)
    return f"{min(math.ceil(num_slots / num_rows / unit) * unit, 1.0):.4g}"


class SufficientCache(NamedTuple):
    """A cache that is large enough, as options."""

    num_slots: int
    share: str | None  # of --cache; None: rows have no number
    option: str  # hbm, or memory where that is the cache
    amount: str  # of it

    def __str__(self) -> str:
        """As a command line takes it."""
        share = f"--cache {self.share} or " if self.share is not None else ""
        return f"{share}--{self.option} {self.amount}"


def enough_for(
    needed: int,
    rows: int | None,
    record: int,
    *,
    on_ssd: bool = False,
    to_spare: bool = True,
    part: float = 1.0,
) -> SufficientCache:
    """For batches of which one needs `needed` rows of a group; `rows` is None for dynamic ids.

    `to_spare`: with room for batches that need a little more, else the minimum. `on_ssd`: there is no memory between the cache
    and the ssd. `part`: of the budget, for the cache of this group.
    """
    num_slots = with_some_to_spare(needed) if to_spare else needed
    if rows is None:
        num_bytes = math.ceil(num_slots * (record + BYTES_PER_SLOT) / part)
        return SufficientCache(
            num_slots, None, *(("memory", typed(2 * num_bytes)) if on_ssd else ("hbm", typed(num_bytes)))
        )
    num_slots = min(num_slots, rows)
    num_bytes = math.ceil(num_slots * (record + BYTES_PER_SLOT) / part)
    if on_ssd:
        index = math.ceil(rows * SSD_BYTES_PER_KEY / part)
        return SufficientCache(num_slots, None, "memory", typed(num_bytes + index))
    return SufficientCache(num_slots, share_of(num_slots, rows), "hbm", typed(num_bytes))


def least_over_ssd(groups: Sequence[Size], num_ids: int, held: int) -> int:
    """Bytes of memory between a cache and an ssd: the index of all rows, or of `num_ids` dynamic ids, and `held` rows.

    Groups are of one record, so that each has its part of the budget.
    """
    per_id = tiered.BYTES_PER_KEY + BYTES_PER_ID
    index = [2 * num_ids * per_id if rows is None else rows * tiered.BYTES_PER_KEY for rows, _ in groups]
    return len(groups) * (max(index) + held * (groups[0][1] + tiered.BYTES_PER_SLOT))
