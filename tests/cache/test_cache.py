"""The cache against a dict: whatever windows come, index, slots and victims tell one story."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotbed.cache import POLICIES, Cache, make_policy
from hotbed.cache.index import SortedIndex
from hotbed.errors import BudgetError

CPU = torch.device("cpu")
SLOTS = 6


class CacheMachine(RuleBasedStateMachine):
    """Slots are modelled by a dict slot -> key."""

    policy = "lru"

    def __init__(self):
        super().__init__()
        self.cache = Cache(SLOTS, make_policy(self.policy, SLOTS, CPU), CPU)
        self.model = {}

    @rule(window=st.lists(st.integers(0, 30), min_size=1, max_size=12))
    def a_window(self, window):
        keys, counts = torch.unique(torch.tensor(window), return_counts=True)
        if keys.shape[0] > SLOTS:
            with pytest.raises(BudgetError):
                self.cache.plan(keys, counts)
            return
        plan = self.cache.plan(keys, counts)
        before = dict(self.model)
        for key, slot in zip(plan.victim_keys.tolist(), plan.victim_slots.tolist()):
            assert self.model.pop(slot) == key
            assert key not in window
        for key, slot in zip(plan.miss_keys.tolist(), plan.miss_slots.tolist()):
            assert key not in before.values()
            assert slot not in self.model
            self.model[slot] = key
        for key, slot in zip(keys.tolist(), plan.slots.tolist()):
            assert self.model[slot] == key
        free = SLOTS - len(before)
        assert plan.victim_keys.shape[0] == max(0, plan.miss_keys.shape[0] - free)  # no row leaves without need
        self.cache.commit(plan)

    @invariant()
    def index_and_slots_agree(self):
        self.cache.check_integrity()
        keys, slots = self.cache.resident()
        assert dict(zip(slots.tolist(), keys.tolist())) == self.model


class LFUMachine(CacheMachine):
    policy = "lfu"


TestLRU = CacheMachine.TestCase
TestLFU = LFUMachine.TestCase


def windows(cache, *windows):
    misses = []
    for window in windows:
        keys, counts = torch.unique(torch.tensor(window), return_counts=True)
        plan = cache.plan(keys, counts)
        cache.commit(plan)
        misses.append(plan.miss_keys.tolist())
    return misses


def test_lru_evicts_the_oldest():
    cache = Cache(3, make_policy("lru", 3, CPU), CPU)
    assert windows(cache, [1, 2, 3], [1], [2], [4], [1, 2], [3]) == [[1, 2, 3], [], [], [4], [], [3]]


def test_lfu_keeps_the_frequent():
    cache = Cache(2, make_policy("lfu", 2, CPU), CPU)
    assert windows(cache, [7, 7, 7, 8], [9], [7], [8]) == [[7, 8], [9], [], [8]]


def test_lfu_forgets():
    """A row that was hot long ago gives way to one that is used now and then."""
    cache = Cache(2, make_policy("lfu", 2, CPU), CPU)
    windows(cache, [1] * 1000)
    later = windows(cache, *[[2 + i % 2] * 5 for i in range(2000)])
    assert later[-1] == []
    assert 1 not in cache.resident()[0].tolist()


def test_counts():
    cache = Cache(2, make_policy("lru", 2, CPU), CPU)
    windows(cache, [1, 1, 2], [3, 3, 3, 1], [3])
    assert cache.counts._asdict() == {
        "windows": 3,
        "keys": 5,
        "misses": 3,
        "evictions": 1,
        "lookups": 8,
        "missed_lookups": 6,
    }


def test_integrity_check_can_fail():
    cache = Cache(2, make_policy("lru", 2, CPU), CPU)
    windows(cache, [1, 2])
    cache.key_of_slot[0] = 9
    with pytest.raises(AssertionError, match="another key"):
        cache.check_integrity()


def test_every_policy_is_tested():
    assert set(POLICIES) == {"lru", "lfu"}


def test_index_of_nothing():
    index = SortedIndex(CPU)
    assert index.find(torch.tensor([3, 5])).tolist() == [-1, -1]
    index.replace(torch.empty(0, dtype=torch.int64), torch.tensor([2, 5]), torch.tensor([1, 0]))
    assert index.find(torch.tensor([1, 2, 5, 9])).tolist() == [-1, 1, 0, -1]
