"""Measures this machine: seconds to plan a batch on this CPU, and how fast records are read from an ssd.

On a CPU the training thread plans, which takes longer for larger caches and longer look-ahead: for every window the cells of
the index are swept and the slots are ranked. So it is measured at the size in question: an index with as many cells, filled
with keys that are not used again, and batches that miss as often as the run's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.cache import Cache, make_policy
from hotbed.errors import StoreError
from hotbed.host.memory import in_words
from hotbed.store.ssd.format import RECORD_HEAD
from hotbed.store.ssd.store import SEGMENTS
from hotbed.tables.sizing.budget import Room, parse_ssd
from hotbed.train.build import Sketch

_BYTES = 32 << 20
_SECONDS = 0.1
_SPARE = 1 + 1 / SEGMENTS  # one segment is kept for compaction
_ROUNDS = 5
_FEW = 64  # keys of a window whose cost is sweeping and ranking alone


def plan_seconds(
    num_slots: int, num_cells: float, counts: NDArray[np.int32], miss_share: float, window: int, policy: str
) -> float:
    """Seconds to plan one batch whose distinct keys are looked up `counts` times each, in windows of `window` batches."""
    cache = Cache(num_slots, make_policy(policy), torch.device("cpu"))
    cache.reserve(int(num_cells))
    resident = _arrived(cache, num_slots)
    extra = max(0, int(0.55 * num_cells) - num_slots)  # known ahead and in no slot
    if extra:
        cache.arrive(resident.shape[0] + torch.arange(extra, device="cpu") * 7 + 1, None)
    rng = np.random.default_rng(0)
    fresh = 1 << 40

    def plan(times: NDArray[np.int32]) -> float:
        nonlocal fresh
        missing = round(miss_share * times.shape[0])
        hits = rng.choice(num_slots, times.shape[0] - missing, replace=False) if num_slots > times.shape[0] else None
        known = resident[hits] if hits is not None else resident[: times.shape[0] - missing]
        keys = np.concatenate([known, fresh + np.arange(missing)])
        fresh += missing
        lookups = np.repeat(keys, times)
        rng.shuffle(lookups)
        began = time.perf_counter()
        arrival = cache.arrive_at_once(torch.from_numpy(lookups), None)
        cache.slots_of(arrival, cache.plan([arrival], True))
        return time.perf_counter() - began

    whole = _median(lambda: plan(counts))
    few = np.ones(min(_FEW, counts.shape[0]), dtype=np.int32)
    fixed = _median(lambda: plan(few))
    return max(whole - fixed, 0.0) + fixed / window


def _arrived(cache: Cache, num_slots: int) -> NDArray[np.int64]:
    """Fill every slot; returns their keys."""
    keys = np.arange(num_slots, dtype=np.int64) * 3
    cache.plan([cache.arrive_at_once(torch.from_numpy(keys), None)], True)
    return keys


def _median(work: Callable[[], float]) -> float:
    """The median of some calls, without the first."""
    return float(np.median([work() for _ in range(_ROUNDS)][1:]))


def ssd_problems(found: Sketch, room: Room | None, ssd: str) -> list[str]:
    """A problem if the rows do not fit."""
    if room is None or not ssd or room.place.folder is None:
        return []
    _, budget = parse_ssd(ssd)
    rows = min(found.amounts.rows, found.most_used)
    needed = rows * (found.amounts.record + RECORD_HEAD) * _SPARE
    if needed <= budget:
        return []
    return [
        f"the rows do not fit on the ssd: {rows:,} rows of {found.amounts.record} bytes take {in_words(needed)} once all are "
        f"used, and tables.ssd gives {in_words(budget)}. Give {in_words(needed * 1.05)} or more, a smaller model.dim, or "
        "tables.precision=bf16"
    ]


def ssd_speed(ssd: str, record: int) -> float:
    """Bytes/s of records read at random places of a file in the folder, for a tenth of a second, from the device itself.

    The file is flushed and its pages are dropped, so that reads do not come from memory; each place is read once. Reads follow
    each other here; a run has several in flight and is faster on a device that supports that.
    """
    folder, _ = parse_ssd(ssd)
    place = folder
    while not place.is_dir() and place != place.parent:
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix="hotbed-plan-") as file:
            for _ in range(_BYTES >> 20):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            _forget_pages(file.fileno())
            return _read_at_random(file.fileno(), record)
    except OSError as error:
        raise StoreError(
            f"the speed of the ssd could not be measured in {place}: {error}. It takes {in_words(_BYTES)} there for a moment; "
            "make room or give another folder (--ssd FOLDER:BYTES)"
        ) from error


def _forget_pages(file: int) -> None:
    """From here on reads come from the device, without read-ahead."""
    if not hasattr(os, "posix_fadvise"):
        raise OSError("this system cannot read from the device past the page cache")
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def _read_at_random(file: int, record: int) -> float:
    """Pages of 4 KiB are read whole, so no two places share one."""
    apart = -(-record // 4096) * 4096
    places = (np.random.default_rng(0).permutation(_BYTES // apart) * apart).tolist()
    done, began = 0, time.perf_counter()
    for at in places:
        done += len(os.pread(file, record, at))
        if time.perf_counter() - began > _SECONDS:
            break
    return done / (time.perf_counter() - began)
