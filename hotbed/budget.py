"""How large a cache is: a share of the rows, or an amount of device memory that holds the rows and all that finds them."""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.cache import BYTES_PER_SLOT
from hotbed.errors import BudgetError, ConfigError
from hotbed.memory import in_words, parse_bytes

Rows = tuple[int, int]  # number of rows, bytes of a record


def cache_share(cache: float | None, hbm: str | int | None, groups: Sequence[Rows]) -> float | None:
    """The share of every group's rows that is on the device; None without a cache."""
    if cache is not None and hbm is not None:
        raise ConfigError(f"cache={cache!r} and hbm={hbm!r} both say how large the cache is; leave one of them out")
    if hbm is not None:
        budget = parse_bytes(hbm, "hbm")
        every_row = sum(rows * (record + BYTES_PER_SLOT) for rows, record in groups)
        if budget < sum(record + BYTES_PER_SLOT for _, record in groups):
            raise ConfigError(f"hbm={hbm!r} does not hold one row of every dim with all that finds it")
        return min(1.0, budget / every_row)
    if cache is not None and (isinstance(cache, bool) or not isinstance(cache, (int, float)) or not 0 < cache <= 1):
        raise ConfigError(f"cache is the share of rows on the device, above 0 and at most 1, not {cache!r}")
    return cache


def num_slots(share: float, rows: int, *, exact: bool) -> int:
    """Slots of one group; a budget is not exceeded by rounding."""
    return max(1, int(share * rows) if exact else round(share * rows))


def check_host(memory: str | int | None, groups: Sequence[Rows]) -> None:
    """Raise when the rows behind the cache do not fit their budget once all are used."""
    if memory is None:
        return
    budget, needed = parse_bytes(memory, "memory"), sum(rows * (record + 1) for rows, record in groups)
    if needed > budget:
        raise BudgetError(
            f"the rows behind the cache need {in_words(needed)} of host memory once all are used, and memory is "
            f"{in_words(budget)}. Give memory={in_words(needed * 1.01)!r} or more, fewer rows (hashing=True), a smaller dim, "
            "or precision='bf16'."
        )
