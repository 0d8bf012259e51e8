"""The cache in plain Python over dictionaries: obviously right, slow, and what the tests hold the real one against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hotbed.ops.index import UNIT, ScoreFunction


class ReferencePlan(NamedTuple):
    """One window, decided."""

    num_hits: int
    misses: set[int]
    written: set[int]  # dirty rows that leave
    num_evictions: int


class _Story(NamedTuple):
    """What is known of a row in the cache."""

    last: int
    uses: int
    dirty: bool


class ReferenceCache:
    """S slots under a policy."""

    def __init__(self, num_slots: int, policy: ScoreFunction) -> None:
        self.num_slots = num_slots
        self.rows: dict[int, _Story] = {}
        self.hot: set[int] = set()
        self.ahead: list[set[int]] = []  # every batch that arrived
        self.num_planned = 0
        self.stride = 1
        self.clock = 0
        self._policy = policy
        self._score = policy.bind({"where": lambda condition, yes, no: yes if condition else no})

    def arrive(self, keys: Sequence[int]) -> None:
        """A batch ahead."""
        self.ahead.append({key for key in keys if key >= 0})

    def plan(self, num_batches: int, train: bool) -> ReferencePlan:
        """Plan the next batches."""
        window = self.ahead[self.num_planned : self.num_planned + num_batches]
        self.num_planned += num_batches
        return self._plan(window, train)

    def plan_at_once(self, keys: Sequence[int]) -> ReferencePlan:
        """A batch that is used for evaluation before those ahead."""
        return self._plan([set(keys)], train=False)

    def _plan(self, window: list[set[int]], train: bool) -> ReferencePlan:
        since, half = self.clock + 1, self._policy.half_life
        hits: set[int] = set()
        misses: set[int] = set()
        for batch in window:
            self.clock += 1
            for key in batch:
                if key not in self.rows:
                    misses.add(key)
                    continue
                hits.add(key)
                last, uses, dirty = self.rows[key]
                uses = max(uses >> min((self.clock - last) // half, 31), 1) + UNIT
                self.rows[key] = _Story(self.clock, uses, dirty or train)
        leaving = max(0, len(self.rows) + len(misses) - self.num_slots)
        may_leave = [key for key, story in self.rows.items() if story.last < since]
        victims = sorted(may_leave, key=lambda key: (self._value(key), key))[:leaving]
        written = {key for key in victims if self.rows[key].dirty}
        for key in victims:
            del self.rows[key]
        self.rows |= {key: _Story(self.clock, UNIT, train) for key in misses}
        return ReferencePlan(len(hits), misses, written, len(victims))

    def _value(self, key: int) -> int:
        last, uses, _ = self.rows[key]
        step = self.num_planned // self.stride  # a step's batches are known until the last of them is planned
        known = self.ahead[step * self.stride :]
        next_use = next((1 + n // self.stride for n, batch in enumerate(known) if key in batch), 0)
        age = self.clock - last
        uses >>= min(age // self._policy.half_life, 31)
        return int(self._score(next_use, uses, age, int(key in self.hot)))
