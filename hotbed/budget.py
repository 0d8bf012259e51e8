"""Budgets: a share of the rows or bytes of device memory for the cache, bytes of host memory, a folder and bytes of an ssd.

In comes what a user asked for and what the groups of tables need; out goes what each group gets. Bytes hold the rows and all
that finds them. Groups share a budget in proportion to the bytes of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hotbed.cache import BYTES_PER_SLOT
from hotbed.errors import BudgetError, ConfigError
from hotbed.memory import in_words, parse_bytes
from hotbed.store import tiered
from hotbed.store.place import Place

Rows = tuple[int, int]  # number of rows, bytes of a record
_BYTES_PER_KEY = 8  # of the ssd's index, where no memory tier is over it
_LEAST_SSD = 4 << 20


class Budgets(NamedTuple):
    """As given by the user; None is not given."""

    cache: float | None = None
    hbm: str | int | None = None
    memory: str | int | None = None
    ssd: str | None = None


class Room(NamedTuple):
    """What one group gets."""

    num_slots: int | None  # on the device; None: every row
    place: Place  # of the rows below


def rooms_of(budgets: Budgets, groups: Sequence[Rows], device_type: str) -> list[Room]:
    """The room of every group; all that contradicts itself or does not fit is an error that says what would."""
    share = cache_share(budgets.cache, budgets.hbm, groups)
    if budgets.ssd is None:
        if share is not None:
            check_host(budgets.memory, groups)
        elif budgets.memory is not None:
            raise ConfigError("memory= is for the rows behind a cache; give cache= or hbm= too, or ssd=")
        return [Room(_slots(share, rows, budgets), Place()) for rows, _ in groups]
    folder, ssd_bytes = parse_ssd(budgets.ssd)
    if budgets.memory is None:
        raise ConfigError(f"ssd={budgets.ssd!r} holds what memory does not; give memory= too, such as memory='16GiB'")
    if share is None and device_type != "cpu":
        raise ConfigError(f"ssd={budgets.ssd!r} on {device_type} needs a cache there; give cache= or hbm= too")
    memory = parse_bytes(budgets.memory, "memory")
    whole = sum(rows * record for rows, record in groups)
    rooms = []
    for number, (rows, record) in enumerate(groups):
        part = rows * record / whole
        place = Place(folder / f"group-{number}", max(_LEAST_SSD, int(ssd_bytes * part)))
        if share is None:
            fit = _rows_in(memory, part, rows, _BYTES_PER_KEY, record + BYTES_PER_SLOT)
            rooms.append(Room(fit, place))
        else:
            fit = _rows_in(memory, part, rows, tiered.BYTES_PER_KEY, record + tiered.BYTES_PER_SLOT)
            rooms.append(Room(_slots(share, rows, budgets), place._replace(memory_slots=fit)))
    return rooms


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


def check_host(memory: str | int | None, groups: Sequence[Rows]) -> None:
    """Raise when the rows behind the cache do not fit their budget once all are used."""
    if memory is None:
        return
    budget, needed = parse_bytes(memory, "memory"), sum(rows * (record + 1) for rows, record in groups)
    if needed > budget:
        raise BudgetError(
            f"the rows behind the cache need {in_words(needed)} of host memory once all are used, and memory is "
            f"{in_words(budget)}. Give memory={in_words(needed * 1.01)!r} or more, ssd='FOLDER:BYTES' for what does not fit, "
            "fewer rows (hashing=True), a smaller dim, or precision='bf16'."
        )


def parse_ssd(ssd: str) -> tuple[Path, int]:
    """'FOLDER:BYTES' -> (folder, bytes)."""
    folder, colon, amount = str(ssd).rpartition(":")
    if not colon or not folder:
        raise ConfigError(f"ssd: must be a folder and bytes, such as '/fast/rows:500GiB', not {ssd!r}")
    return Path(folder), parse_bytes(amount, "ssd")


def _slots(share: float | None, rows: int, budgets: Budgets) -> int | None:
    """A budget is not exceeded by rounding."""
    if share is None:
        return None
    return max(1, int(share * rows) if budgets.hbm is not None else round(share * rows))


def _rows_in(memory: int, part: float, rows: int, per_key: int, per_row: int) -> int:
    """How many rows fit into a part of memory, beside the index of all."""
    fit = int((memory * part - rows * per_key) // per_row)
    if fit < 1:
        needed = (rows * per_key + per_row) / part
        raise BudgetError(
            f"memory={in_words(memory)} does not hold the index of {rows:,} rows on the ssd, {per_key} bytes each once used. "
            f"Give memory={in_words(needed * 1.01)!r} or more, or fewer rows (hashing=True)."
        )
    return min(rows, fit)
