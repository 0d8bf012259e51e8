"""The cache in plain Python over dictionaries: obviously right, slow, and what the tests hold the real one against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hotbed.ops.index import UNIT, Scoring


class ReferencePlan(NamedTuple):
    """One window, decided."""

    num_hits: int
    miss_keys: list[int]  # ascending
    miss_slots: list[int]
    written: dict[int, int]  # key -> slot of the dirty rows that leave
    num_evictions: int


class ReferenceCache:
    """S slots under a policy."""

    def __init__(self, num_slots: int, policy: Scoring) -> None:
        self.key_of_slot: list[int | None] = [None] * num_slots
        self.slot_of_key: dict[int, int] = {}
        self.last = [0] * num_slots
        self.uses = [0] * num_slots
        self.dirty = [False] * num_slots
        self.hot: set[int] = set()
        self.waiting: list[set[int]] = []
        self.clock = 0
        self._policy = policy
        self._score = policy.bind({"where": lambda condition, yes, no: yes if condition else no})

    def arrive(self, keys: Sequence[int]) -> None:
        """A batch ahead."""
        self.waiting.append({key for key in keys if key >= 0})

    def plan(self, num_batches: int, pinned: int, train: bool) -> ReferencePlan:
        """The next batches' turn; rows used at clock `pinned` or later stay."""
        since, half = self.clock + 1, self._policy.half_life
        window, self.waiting = self.waiting[:num_batches], self.waiting[num_batches:]
        hits: set[int] = set()
        misses: set[int] = set()
        for batch in window:
            self.clock += 1
            for key in batch:
                slot = self.slot_of_key.get(key)
                if slot is None:
                    misses.add(key)
                    continue
                hits.add(key)
                self.uses[slot] = max(self.uses[slot] >> min((self.clock - self.last[slot]) // half, 31), 1) + UNIT
                self.last[slot] = self.clock
                self.dirty[slot] |= train
        order = sorted(range(len(self.last)), key=lambda slot: (self._rank(slot, min(pinned, since)), slot))
        chosen = sorted(order[: len(misses)])
        written, num_evictions = {}, 0
        for slot, key in zip(chosen, sorted(misses)):
            victim = self.key_of_slot[slot]
            if victim is not None:
                del self.slot_of_key[victim]
                num_evictions += 1
                if self.dirty[slot]:
                    written[victim] = slot
            self.key_of_slot[slot], self.slot_of_key[key] = key, slot
            self.last[slot], self.uses[slot], self.dirty[slot] = self.clock, UNIT, train
        return ReferencePlan(len(hits), sorted(misses), chosen, written, num_evictions)

    def _rank(self, slot: int, pinned: int) -> float:
        key = self.key_of_slot[slot]
        if key is None:
            return float("-inf")
        if self.last[slot] >= pinned:
            return float("inf")
        next_use = next((n for n, batch in enumerate(self.waiting, start=1) if key in batch), 0)
        age = self.clock - self.last[slot]
        uses = self.uses[slot] >> min(age // self._policy.half_life, 31)
        return float(self._score(next_use, uses, age, int(key in self.hot)))
