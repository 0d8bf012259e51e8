"""A cache's size and a batch of look-ups in, the seconds it takes to plan that batch on this CPU out, measured with the cache.

Planning on a CPU is work of the training thread and grows with the cache and with what is known ahead: every window the cells
of the index are swept and the slots are ranked. So it is measured at the size asked for: an index with as many cells, filled
with keys nobody will ask for again, and batches that miss as often as the run's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.cache import Cache, make_policy

_ROUNDS = 5
_FEW = 64  # keys of a window that is all sweeping and ranking


def plan_seconds(
    num_slots: int, num_cells: float, counts: NDArray[np.int32], miss_share: float, window: int, policy: str
) -> float:
    """Of one batch, whose distinct keys are looked up `counts` times each, planned in windows of so many."""
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
    """Fill every slot; their keys."""
    keys = np.arange(num_slots, dtype=np.int64) * 3
    cache.plan([cache.arrive_at_once(torch.from_numpy(keys), None)], True)
    return keys


def _median(work: Callable[[], float]) -> float:
    """Of some calls, the first left out."""
    return float(np.median([work() for _ in range(_ROUNDS)][1:]))
