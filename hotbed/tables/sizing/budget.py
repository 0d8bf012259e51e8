"""Budgets: a share of the rows or bytes of device memory for the cache, bytes of host memory, a folder and bytes of an ssd.

The budgets of a user and the needs of the groups of tables -> what each group gets. Bytes include rows and their index. Groups
share a budget in proportion to the bytes of their rows.

Tables of dynamic ids have no number of rows. The other tables get what all their rows need, but at most half of a budget; the
rest is for dynamic ids, in proportion to the bytes of a record. If their rows are on an ssd, up to half of their memory is for
the index of ids, which limits their number, and the rest holds rows.

Rows on their way between a cache and the rows below wait in buffers of their own (tables/group/staging.py), in addition to the
other budgets. `staging` bounds them: windows are cut so that all their rows fit, and a batch that does not is refused.

Replicas of rows that other ranks own (parallel/replicated.py) have a share of the bytes of the cache, which gets the rest.
They are of the rows of all ranks: groups share their bytes by those, whatever a rank has of them.

A part that is in proportion to few rows, such as those of a group that is on other ranks, is at least what one row needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hotbed.cache import BYTES_PER_SLOT
from hotbed.errors import BudgetError, ConfigError
from hotbed.host.memory import in_words, parse_bytes, percent_hint, typed
from hotbed.ids import MAX_ROWS
from hotbed.ops.records import STORE_PRECISIONS
from hotbed.store import Place, ssd, tiered

Rows = tuple[int, int]  # number of rows, bytes of a record
Size = tuple[int | None, int]  # likewise; None for dynamic ids
BYTES_PER_ID = 35  # of the index of dynamic ids, with last use and score
BASE_BYTES = 12 << 20  # of an empty index of ids, in whole pages; not counted
SSD_BYTES_PER_KEY = ssd.BYTES_PER_KEY  # without a memory tier over the ssd
# windows whose rows are in buffers at once; on a CPU the copies of both ends are in host memory
STAGED_WINDOWS = {"cuda": 4, "cpu": 5}
_LEAST_SSD = 4 << 20  # of a group: three segments, and the copy of compaction
_MOST_ADDRESSES = 1 << 44  # bytes of address space for rows of dynamic ids, which take memory only once they are used


class Budgets(NamedTuple):
    """As given by the user; None: not given."""

    cache: float | None = None
    hbm: str | int | None = None
    memory: str | int | None = None
    ssd: str | None = None
    store_precision: str = "same"  # of weights below the device
    staging: str | int | None = None  # host memory for rows on their way; a CUDA device takes as much again
    replicas: float = 0.0  # share of `hbm`, or of `memory` where that is the cache, for replicas of other ranks' rows

    @property
    def bounds_index(self) -> bool:
        """Whether the size of the cache is given in bytes: `hbm`, or `memory` over an ssd without a cache on a device."""
        return self.hbm is not None or (self.ssd is not None and self.cache is None)


class IdRoom(NamedTuple):
    """The budget of the ids of one group."""

    rows: int
    memory: int | None = None  # bytes of the index and of what rows take in addition; None: unlimited
    per_row: int = 0  # bytes of that


class Room(NamedTuple):
    """What one group gets."""

    num_slots: int | None  # on the device; None: every row
    place: Place  # of the rows below
    ids: IdRoom | None = None  # of dynamic ids
    bounded: bool = False  # the cache with its index has BYTES_PER_SLOT in addition to every record, and no more
    replica_bytes: int | None = None  # of replicas and their index; None: not limited
    cache_part: float = 1.0  # of the budget of the cache: the rest is for other groups and replicas
    staged_rows: int | None = None  # of one window that may be on their way; None: not limited
    staging_part: float = 1.0  # of the budget for them


def rooms_of(
    budgets: Budgets,
    groups: Sequence[Size],
    device_type: str,
    stored: Sequence[int] = (),
    everywhere: Sequence[Size] = (),
) -> list[Room]:
    """The room of every group; contradictions and budgets that do not fit are errors that say what would fit.

    `stored`: bytes of a record below the device, of every group; left out: those on the device. `everywhere`: the groups with
    the rows of all ranks; left out: every rank has as many as this one.
    """
    _check_int8(budgets)
    below = [(rows, one) for (rows, _), one in zip(groups, stored)] if stored else list(groups)
    left, replicas = without_replicas(budgets)
    preset = [(rows, record) for rows, record in groups if rows is not None]
    try:
        if len(preset) < len(groups):
            rooms = _rooms_with_dynamic(left, groups, device_type, below)
        else:
            rooms = _preset_rooms(left, preset, device_type, below)
    except (BudgetError, ConfigError) as error:
        if not replicas:
            raise
        raise type(error)(
            f"{error} ({in_words(replicas)} of {'hbm' if budgets.hbm is not None else 'memory'}= are for replicas of rows, "
            f"replicas={budgets.replicas:g}; mode='sharded' needs none)"
        ) from None
    int8 = budgets.store_precision == "int8"
    rooms = [
        room._replace(bounded=budgets.bounds_index and room.num_slots is not None, place=room.place._replace(int8=int8))
        for room in rooms
    ]
    if budgets.bounds_index:
        rooms = _with_cache_parts(rooms, groups)
    rooms = _with_staging(rooms, groups, budgets.staging, device_type) if budgets.staging is not None else rooms
    return _with_replicas(rooms, everywhere or groups, replicas, budgets.replicas) if replicas else rooms


def without_replicas(budgets: Budgets) -> tuple[Budgets, int]:
    """What is left for the cache and the tiers below it, and the bytes of replicas."""
    if not budgets.replicas or not budgets.bounds_index:
        return budgets, 0
    name = "hbm" if budgets.hbm is not None else "memory"
    given = getattr(budgets, name)
    if given is None:  # reported where the room of the cache is
        return budgets, 0
    whole = parse_bytes(given, name)
    replicas = int(whole * budgets.replicas)
    left = whole - replicas
    return budgets._replace(hbm=left) if name == "hbm" else budgets._replace(memory=left), replicas


def staged_row_bytes(record: int, device_type: str) -> int:
    """Host memory that each row of a window takes on its way: records in and out, and their places, of windows in flight."""
    return STAGED_WINDOWS[device_type] * (2 * record + 8)


def _with_cache_parts(rooms: Sequence[Room], groups: Sequence[Size]) -> list[Room]:
    """What groups have of the budget of the cache. Memory over an ssd also holds their index."""
    sizes = _cached_bytes(rooms, groups)
    for number, (room, (rows, _)) in enumerate(zip(rooms, groups)):
        if room.place.folder is not None and not room.place.memory_slots:
            sizes[number] += (room.ids.memory or 0) if room.ids is not None else (rows or 0) * SSD_BYTES_PER_KEY
    return [room._replace(cache_part=size / sum(sizes)) for room, size in zip(rooms, sizes)]


def _with_staging(rooms: Sequence[Room], groups: Sequence[Size], staging: str | int, device_type: str) -> list[Room]:
    """Groups share the bytes as they share those of the cache."""
    budget, cached = parse_bytes(staging, "staging"), _cached_bytes(rooms, groups)
    if not any(cached):
        raise ConfigError(
            f"staging={staging!r} is for rows on their way to a cache and back; give cache= or hbm= too, or leave it out"
        )
    return [
        room._replace(
            staged_rows=budget * own // sum(cached) // staged_row_bytes(record, device_type),
            staging_part=own / sum(cached),
        )
        if own
        else room
        for room, own, (_, record) in zip(rooms, cached, groups)
    ]


def _cached_bytes(rooms: Sequence[Room], groups: Sequence[Size]) -> list[int]:
    """Bytes of the cache of each group."""
    return [(room.num_slots or 0) * (record + BYTES_PER_SLOT) for room, (_, record) in zip(rooms, groups)]


def _with_replicas(rooms: Sequence[Room], groups: Sequence[Size], replicas: int, share: float) -> list[Room]:
    """Groups share the bytes of replicas as they share those of the cache, by the rows of all ranks."""
    if any(rows is None for rows, _ in groups):
        parts = _split(replicas, groups, 1, BYTES_PER_SLOT)
    else:
        sizes = [(rows or 0) * (record + BYTES_PER_SLOT) for rows, record in groups]
        parts = [replicas * size // max(1, sum(sizes)) for size in sizes]
    return [
        room._replace(replica_bytes=part, cache_part=room.cache_part * (1.0 - share))
        for room, part in zip(rooms, parts)
    ]


def _check_int8(budgets: Budgets) -> None:
    if budgets.store_precision not in STORE_PRECISIONS:
        known = ", ".join(map(repr, STORE_PRECISIONS))
        raise ConfigError(f"store_precision must be one of {known}, not {budgets.store_precision!r}")
    if budgets.store_precision == "int8" and budgets.cache is None and budgets.hbm is None:
        raise ConfigError(
            "store_precision='int8' is for rows that leave a cache; give cache= or hbm= too, or leave it out"
        )
    if budgets.store_precision == "int8" and budgets.ssd is not None:
        raise ConfigError("store_precision='int8' is for rows in memory; leave ssd= or store_precision= out")


def _preset_rooms(budgets: Budgets, groups: Sequence[Rows], device_type: str, below: Sequence[Size]) -> list[Room]:
    share = cache_share(budgets.cache, budgets.hbm, groups)
    if budgets.ssd is None:
        if share is not None:
            check_host(budgets.memory, below)
        elif budgets.memory is not None:
            raise ConfigError("memory= is for the rows behind a cache; give cache= or hbm= too, or ssd=")
        return [Room(_slots(share, rows, budgets), Place()) for rows, _ in groups]
    folder, ssd_bytes = parse_ssd(budgets.ssd)
    memory = _memory_over_ssd(budgets)
    if share is None and device_type != "cpu":
        raise ConfigError(f"ssd={budgets.ssd!r} on {device_type} needs a cache there; give cache= or hbm= too")
    sizes = [rows * record for rows, record in groups]
    per_key, per_slot = SSD_BYTES_PER_KEY, BYTES_PER_SLOT
    if share is not None:
        per_key, per_slot = tiered.BYTES_PER_KEY, tiered.BYTES_PER_SLOT
    in_memory = _at_least(
        [memory * size // sum(sizes) for size in sizes],
        [rows * per_key + record + per_slot for rows, record in groups],
    )
    rooms = []
    for number, ((rows, record), on_ssd, part) in enumerate(zip(groups, _ssd_parts(ssd_bytes, sizes), in_memory)):
        place = Place(folder / f"group-{number}", on_ssd)
        fit = _rows_in(memory, part, rows, per_key, record + per_slot)
        if share is None:
            rooms.append(Room(fit, place))
        else:
            rooms.append(Room(_slots(share, rows, budgets), place._replace(memory_slots=fit)))
    return rooms


def _rooms_with_dynamic(
    budgets: Budgets, groups: Sequence[Size], device_type: str, below: Sequence[Size]
) -> list[Room]:
    if budgets.cache is not None:
        raise ConfigError(
            f"cache={budgets.cache!r} is a share of the rows, and tables with rows=None have no number of rows; give hbm=, "
            "the bytes of the cache on the device (on a CPU too), such as hbm='1GiB'"
        )
    if budgets.hbm is None and (budgets.ssd is None or device_type != "cpu"):
        raise ConfigError(
            "tables with rows=None are looked up in a cache: give hbm=, its bytes on the device (on a CPU too), such as "
            "hbm='1GiB'"
        )
    if budgets.ssd is None:
        rooms = _memory_rooms(budgets, below)
    else:
        rooms = _ssd_rooms(budgets, groups)
    if budgets.hbm is not None:
        slots = _slots_in(parse_bytes(budgets.hbm, "hbm"), groups)
        rooms = [room._replace(num_slots=count) for room, count in zip(rooms, slots)]
    return rooms


def _memory_rooms(budgets: Budgets, groups: Sequence[Size]) -> list[Room]:
    """Rows in memory; the number of slots is set later."""
    check_host(budgets.memory, groups)
    memory = None if budgets.memory is None else parse_bytes(budgets.memory, "memory")
    left = None if memory is None else memory - sum(rows * (record + 1) for rows, record in groups if rows is not None)
    records = sum(record for rows, record in groups if rows is None)
    rooms = []
    for rows, record in groups:
        if rows is not None:
            rooms.append(Room(None, Place()))
            continue
        most = min(MAX_ROWS, _MOST_ADDRESSES // record)
        if left is None:
            rooms.append(Room(None, Place(grows=True), IdRoom(most)))
            continue
        part = left * record // records
        fit = part // (record + 1 + BYTES_PER_ID)
        if fit < 1:
            raise BudgetError(
                f"memory={budgets.memory!r} holds no row of dynamic ids in addition to the other tables. Give more memory, or "
                "ssd='FOLDER:BYTES'."
            )
        rooms.append(Room(None, Place(grows=True), IdRoom(min(most, fit), part, record + 1)))
    return rooms


def _ssd_rooms(budgets: Budgets, groups: Sequence[Size]) -> list[Room]:
    """Rows on an ssd, under memory; without a cache on a device, memory is the cache."""
    folder, ssd_bytes = parse_ssd(str(budgets.ssd))
    memory = _memory_over_ssd(budgets)
    is_cache = budgets.hbm is None
    per_key, per_slot = SSD_BYTES_PER_KEY, BYTES_PER_SLOT
    if not is_cache:
        per_key, per_slot = tiered.BYTES_PER_KEY, tiered.BYTES_PER_SLOT
    ssd_parts = _ssd_parts(ssd_bytes, _split(ssd_bytes, groups, 3, 0))  # 3: stale rows too
    least = [0 if rows is None else rows * per_key + record + per_slot for rows, record in groups]
    parts = zip(ssd_parts, _at_least(_split(memory, groups, 1, per_key + per_slot), least))
    rooms = []
    for number, ((rows, record), (on_ssd, in_memory)) in enumerate(zip(groups, parts)):
        place = Place(folder / f"group-{number}", on_ssd, grows=rows is None)
        ids = None
        if rows is not None:
            fit = _rows_in(memory, in_memory, rows, per_key, record + per_slot)
        else:
            per_id = BYTES_PER_ID + per_key
            most = max(1, min(MAX_ROWS, place.ssd_bytes // record, in_memory // 2 // per_id))
            ids = IdRoom(most, most * per_id, per_key)
            fit = (in_memory - most * per_id) // (record + per_slot)
            if fit < 1:
                raise BudgetError(
                    f"memory={budgets.memory!r} holds no row of dynamic ids in addition to their index. Give more memory."
                )
        slots, place = (fit, place) if is_cache else (None, place._replace(memory_slots=fit))
        rooms.append(Room(slots, place, ids))
    return rooms


def _slots_in(hbm: int, groups: Sequence[Size]) -> list[int]:
    """Slots of every group."""
    least = [record + BYTES_PER_SLOT for _, record in groups]
    parts = zip(groups, _at_least(_split(hbm, groups, 1, BYTES_PER_SLOT), least))
    slots = [part // (record + BYTES_PER_SLOT) for (_, record), part in parts]
    if min(slots) < 1:
        raise ConfigError(f"hbm={in_words(hbm)!r} does not hold one row of every dim with its index. Give more")
    return slots


def _split(budget: int, groups: Sequence[Size], copies: int, extra: int) -> list[int]:
    """Bytes for every group, if some have dynamic ids: see above. Rows need `copies` of their record, and `extra`."""
    needs = [(rows or 0) * (copies * record + extra) for rows, record in groups]
    share = min(1.0, budget / 2 / sum(needs)) if any(needs) else 0.0
    left = budget - sum(int(need * share) for need in needs)
    records = sum(record for rows, record in groups if rows is None)
    return [
        left * record // records if rows is None else int(need * share) for (rows, record), need in zip(groups, needs)
    ]


def _at_least(parts: Sequence[int], least: Sequence[int]) -> Sequence[int]:
    """Parts of a budget, none below the least where there is room for that: the others give of what they have above it."""
    above = [max(0, part - low) for part, low in zip(parts, least)]
    missing = sum(max(0, low - part) for part, low in zip(parts, least))
    if not missing or missing > sum(above):
        return parts
    return [max(part, low) - -(-missing * more // sum(above)) for part, low, more in zip(parts, least, above)]


def _ssd_parts(budget: int, shares: Sequence[int]) -> list[int]:
    """Bytes of an ssd for every group: the least that works, plus a part of the rest in proportion to its share."""
    left = budget - _LEAST_SSD * len(shares)
    if left < 0:
        least = in_words(_LEAST_SSD)
        of_all = f", {in_words(_LEAST_SSD * len(shares))} for {len(shares)} dims" if len(shares) > 1 else ""
        raise BudgetError(
            f"ssd= is {in_words(budget)}; the files of every dim take {least} at least{of_all}. Give that or more "
            f"(--ssd FOLDER:{typed(_LEAST_SSD * len(shares))})."
        )
    return [_LEAST_SSD + left * share // max(1, sum(shares)) for share in shares]


def _memory_over_ssd(budgets: Budgets) -> int:
    if budgets.memory is None:
        raise ConfigError(f"ssd={budgets.ssd!r} holds what memory does not; give memory= too, such as memory='16GiB'")
    return parse_bytes(budgets.memory, "memory")


def cache_share(cache: float | None, hbm: str | int | None, groups: Sequence[Rows]) -> float | None:
    """The share of every group's rows that is on the device; None without a cache."""
    if cache is not None and hbm is not None:
        raise ConfigError(f"cache={cache!r} and hbm={hbm!r} both say how large the cache is; leave one of them out")
    if hbm is not None:
        budget = parse_bytes(hbm, "hbm")
        every_row = sum(rows * (record + BYTES_PER_SLOT) for rows, record in groups)
        if budget < sum(record + BYTES_PER_SLOT for _, record in groups):
            raise ConfigError(f"hbm={hbm!r} does not hold one row of every dim with its index. Give more")
        return min(1.0, budget / every_row)
    if cache is not None and (isinstance(cache, bool) or not isinstance(cache, (int, float)) or not 0 < cache <= 1):
        raise ConfigError(
            f"cache is the share of rows on the device, above 0 and at most 1, not {cache!r}{percent_hint(cache)}"
        )
    return cache


def check_host(memory: str | int | None, groups: Sequence[Size]) -> None:
    """Raise when the rows behind the cache do not fit their budget once all are used."""
    if memory is None:
        return
    budget, needed = parse_bytes(memory, "memory"), sum((rows or 0) * (record + 1) for rows, record in groups)
    if needed > budget:
        raise BudgetError(
            f"the rows behind the cache need {in_words(needed)} of host memory once all are used, and memory is "
            f"{in_words(budget)}. Give memory={typed(needed)!r} (--memory {typed(needed)}) or more, ssd='FOLDER:BYTES' (--ssd) "
            "for what does not fit, fewer rows (hashing=True), a smaller dim, precision='bf16' or store_precision='int8'."
        )


def parse_ssd(ssd: str) -> tuple[Path, int]:
    """'FOLDER:BYTES' -> (folder, bytes)."""
    folder, colon, amount = str(ssd).rpartition(":")
    if not colon or not folder:
        raise ConfigError(f"ssd: must be a folder and bytes, such as '/fast/rows:500GiB', not {ssd!r}")
    if "://" in folder:
        raise ConfigError(f"ssd: must be a folder of a local disk, such as '/fast/rows:500GiB', not {ssd!r}")
    return Path(folder), parse_bytes(amount, "ssd")


def _slots(share: float | None, rows: int, budgets: Budgets) -> int | None:
    """A budget is not exceeded by rounding."""
    if share is None:
        return None
    return max(1, int(share * rows) if budgets.hbm is not None else round(share * rows))


def _rows_in(memory: int, part: int, rows: int, per_key: int, per_row: int) -> int:
    """How many rows fit into a part of memory, in addition to the index of all."""
    fit = (part - rows * per_key) // per_row
    if fit < 1:
        needed = memory * (rows * per_key + per_row) / max(1, part)
        raise BudgetError(
            f"memory={in_words(memory)} does not hold the index of {rows:,} rows on the ssd, {per_key} bytes each once used. "
            f"Give memory={typed(needed)!r} (--memory {typed(needed)}) or more, or fewer rows (hashing=True)."
        )
    return min(rows, fit)
