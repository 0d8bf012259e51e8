"""The cache: slots, the keys in them, and the plan of a window.

In: the distinct keys of a window, ascending. Out: a CachePlan: the slot of every key, the misses to bring in, the victims to
write back first. `plan` decides and changes nothing; `commit` makes it so. The cache moves no rows and knows no store.

Shapes: U distinct keys of the window, M misses, V victims, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.cache.index import SortedIndex
from hotbed.cache.policies import Policy
from hotbed.errors import BudgetError

_FREE = -1


class CachePlan(NamedTuple):
    """One window, decided."""

    keys: Tensor  # int64 [U], ascending
    counts: Tensor  # int64 [U], uses in the window
    slots: Tensor  # int64 [U], where each key will be
    is_miss: Tensor  # bool [U]
    miss_keys: Tensor  # int64 [M], ascending
    miss_slots: Tensor  # int64 [M]
    victim_keys: Tensor  # int64 [V], ascending: rows to write back before their slots are filled
    victim_slots: Tensor  # int64 [V]


class CacheCounts(NamedTuple):
    """What happened since the start, over distinct keys of windows and over look-ups."""

    windows: int = 0
    keys: int = 0
    misses: int = 0
    evictions: int = 0
    lookups: int = 0
    missed_lookups: int = 0


class Cache:
    """S slots under a policy."""

    def __init__(self, num_slots: int, policy: Policy, device: torch.device) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.key_of_slot = torch.full((num_slots,), _FREE, dtype=torch.int64, device=device)
        self.index = SortedIndex(device)
        self.counts = CacheCounts()

    def plan(self, keys: Tensor, counts: Tensor) -> CachePlan:
        """Find the keys and choose victims for those that are absent, among slots the window does not use."""
        if keys.shape[0] > self.num_slots:
            raise BudgetError(
                f"one batch needs {keys.shape[0]:,} rows at once, but the cache has {self.num_slots:,} slots. "
                "Give the cache more memory, or take smaller batches."
            )
        slots = self.index.find(keys)
        is_miss = slots < 0
        miss_keys = keys[is_miss]
        scores = self.policy.scores().clone()
        scores[self.key_of_slot == _FREE] = -torch.inf  # empty slots first
        scores[slots[~is_miss]] = torch.inf  # never a row of this very window
        order = torch.sort(scores, stable=True).indices[: miss_keys.shape[0]]
        slots = slots.masked_scatter(is_miss, order)
        leaving = self.key_of_slot[order]
        occupied = leaving != _FREE
        victim_keys, by_key = torch.sort(leaving[occupied])
        return CachePlan(keys, counts, slots, is_miss, miss_keys, order, victim_keys, order[occupied][by_key])

    def commit(self, plan: CachePlan) -> None:
        """Let the plan's rows in and its victims go."""
        self.index.replace(plan.victim_keys, plan.miss_keys, plan.miss_slots)
        self.key_of_slot[plan.miss_slots] = plan.miss_keys
        self.policy.used(plan.slots, plan.counts, plan.is_miss)
        before, num_misses = self.counts, int(plan.miss_keys.shape[0])
        self.counts = CacheCounts(
            windows=before.windows + 1,
            keys=before.keys + int(plan.keys.shape[0]),
            misses=before.misses + num_misses,
            evictions=before.evictions + int(plan.victim_keys.shape[0]),
            lookups=before.lookups + int(plan.counts.sum()),
            missed_lookups=before.missed_lookups + int(plan.counts[plan.is_miss].sum()),
        )

    def resident(self) -> tuple[Tensor, Tensor]:
        """(keys ascending, their slots) of all rows in the cache."""
        return self.index.keys, self.index.slots

    def clear(self) -> None:
        """Forget every row."""
        self.key_of_slot.fill_(_FREE)
        self.index = SortedIndex(self.key_of_slot.device)

    def check_integrity(self) -> None:
        """Index and slots tell the same story: every key in one slot, every slot one key or free."""
        keys, slots = self.index.keys, self.index.slots
        occupied = int((self.key_of_slot != _FREE).sum())
        assert keys.shape[0] == occupied, f"{keys.shape[0]} keys in the index, {occupied} slots occupied"
        assert bool((keys.diff() > 0).all()), "index keys do not ascend"
        assert torch.unique(slots).shape[0] == slots.shape[0], "two keys share a slot"
        assert torch.equal(self.key_of_slot[slots], keys), "a slot holds another key than the index says"
