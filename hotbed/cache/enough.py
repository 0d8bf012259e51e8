"""Rows that a batch needs in, the slots of a cache that will do out: the least, and with some to spare for other batches."""

from __future__ import annotations

import math


def with_some_to_spare(needed: int) -> int:
    """The slots that hold the largest batch of a long epoch, too, where one of its batches needs so many rows.

    Distinct rows of equally large batches scatter by less than the root of their number; this is four times that on top.
    """
    return needed + 4 * math.isqrt(needed)


def share_of(num_slots: int, num_rows: int) -> str:
    """As --cache takes it: four digits, rounded up, so that it is enough."""
    unit = 10.0 ** (math.floor(math.log10(num_slots / num_rows)) - 3)
    return f"{min(math.ceil(num_slots / num_rows / unit) * unit, 1.0):.4g}"
