"""Who leaves, chosen from a line instead of from all slots: the same rows as the reference, however long the line stands."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from hotbed.cache import POLICIES, Arrival, Cache, CachePlan, make_policy
from hotbed.cache.reference import ReferenceCache, ReferencePlan
from hotbed.ops.index import ScoreFunction, victims
from hotbed.ops.index.victims import Victims
from tests.pairs import pairs


class Case(NamedTuple):
    """One stream."""

    policy: str
    half_life: int
    num_slots: int
    stride: int
    ahead: int
    window: int


def cases() -> list[Case]:
    choices = (sorted(POLICIES), [3, 16, 128], [60, 300], [1, 3], [1, 7, 29], [1, 2])
    return [Case(*values) for values in pairs(*choices)]


class Both:
    """A cache and its reference, which must agree after every window."""

    def __init__(self, case: Case, draw: random.Random) -> None:
        policy = make_policy(case.policy)._replace(half_life=case.half_life)
        self.cache, self.reference = (
            Cache(case.num_slots, policy, torch.device("cpu")),
            ReferenceCache(case.num_slots, policy),
        )
        self.cache.stride = self.reference.stride = case.stride
        self._case, self._draw = case, draw
        self.num_keys = 4 * case.num_slots
        if case.policy == "static":
            hot = sorted(draw.sample(range(self.num_keys), case.num_slots // 4))
            self.cache.keep(torch.tensor(hot))
            self.reference.hot = set(hot)

    def batch(self) -> list[int]:
        """Some keys come again and again, most hardly ever."""
        count = self._draw.randint(0, self._case.num_slots // 12)
        return [int(self.num_keys * self._draw.random() ** 3) for _ in range(count)]

    def arrive(self, keys: list[int]) -> Arrival:
        self.reference.arrive(keys)
        return self.cache.arrive(torch.tensor(keys, dtype=torch.int64), None)

    def plan(self, window: list[Arrival]) -> None:
        train = self._draw.random() < 0.7
        self.compare(self.cache.plan(window, train), self.reference.plan(len(window), train))

    def plan_at_once(self) -> None:
        keys = self.batch()
        arrival = self.cache.arrive_at_once(torch.tensor(keys, dtype=torch.int64), None)
        self.compare(self.cache.plan([arrival], False), self.reference.plan_at_once(keys))

    def compare(self, plan: CachePlan, expected: ReferencePlan) -> None:
        assert (plan.num_hits, plan.num_evictions) == (expected.num_hits, expected.num_evictions)
        assert sorted(plan.miss_keys.tolist()) == sorted(expected.misses)
        assert sorted(plan.victim_keys.tolist()) == sorted(expected.written)
        assert set(self.cache.resident()[0].tolist()) == set(self.reference.rows)


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clock of every line that was formed; no window or cache is small enough to rank all slots."""
    found: list[int] = []
    form = Victims._form

    def counted(self: Victims, state: tuple[object, ...], moment: victims.WindowClock) -> bool:
        found.append(moment.clock)
        return form(self, state, moment)

    monkeypatch.setattr(victims, "_DIRECT", 0)
    monkeypatch.setattr(victims, "_LINE_CONSTANT", -1_000_000)
    monkeypatch.setattr(victims, "LINE_BYTES", 1_000_000)
    monkeypatch.setattr(Victims, "_form", counted)
    return found


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_line_gives_the_victims_of_the_reference(case: Case, formed: list[int]) -> None:
    draw = random.Random(repr(case))
    both, stream, arrivals, num_windows = Both(case, draw), 130, list[Arrival](), 0
    planned = 0
    while planned < stream:
        while len(arrivals) < stream and len(arrivals) - planned < max(case.ahead, case.window):
            arrivals.append(both.arrive(both.batch()))
        if draw.random() < 0.1:
            both.plan_at_once()
        window = arrivals[planned : planned + case.window]
        both.plan(window)
        planned += len(window)
        num_windows += 1
    both.cache.check_integrity()
    assert formed
    if case.half_life == 128:
        assert len(formed) < num_windows / 3, "a line was formed for every few windows"


@pytest.mark.parametrize("num_slots", [64, 800, 2500, 10_000])
def test_a_line_takes_no_more_than_its_bytes(num_slots: int) -> None:
    both = Both(Case("lfu", 128, num_slots, 1, 1, 1), random.Random(2))
    for _ in range(40):
        both.plan([both.arrive(both.batch())])
        chooser = both.cache._victims
        assert chooser.num_bytes <= victims.LINE_BYTES * num_slots
    assert chooser.has_line == (num_slots > 2000)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_goes_unreported_ends_the_line(name: str, formed: list[int]) -> None:
    both = Both(Case(name, 128, 60, 1, 4, 1), random.Random(1))
    for _ in range(40):
        both.plan([both.arrive(both.batch())])
    keys = both.cache.resident()[0][::3]
    both.cache.forget(keys)
    for key in keys.tolist():
        del both.reference.rows[key]
    both.arrive(both.batch())
    both.cache.drop_ahead()
    del both.reference.ahead[both.reference.num_planned :]
    for _ in range(40):
        both.plan([both.arrive(both.batch())])
    both.cache.check_integrity()


@pytest.mark.parametrize("policy", [POLICIES[name] for name in sorted(POLICIES)], ids=sorted(POLICIES))
def test_scores_as_of_an_earlier_moment_give_the_same_order(policy: ScoreFunction) -> None:
    """What lines rely on, of every policy: see ScoreFunction. The line was formed up to 64 batches before."""
    score = policy.bind({"where": lambda condition, yes, no: yes if condition else no})
    draw = random.Random(0)
    for _ in range(20_000):
        before = draw.randint(0, 64)
        now, then = [], []
        for _ in range(2):
            next_use, uses, age = draw.choice([0, draw.randint(1, 30)]), draw.randint(1, 80), draw.randint(0, 400)
            hot = draw.randint(0, 1)
            now.append(score(next_use, uses, age, hot))
            as_of_then = policy.oldest if 0 < policy.oldest <= age else age - before
            then.append(score(next_use + before if next_use else 0, uses, as_of_then, hot))
            assert score(next_use or 30, uses, age, hot) >= now[-1]  # a next use becomes known
        assert (now[0] < now[1], now[0] == now[1]) == (then[0] < then[1], then[0] == then[1])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("scores", [(0, 1), (16, 17), (16, 1 << 30), (-(1 << 31), 1 << 30)], ids=str)
def test_the_lowest_ranks_are_found_by_counting(scores: tuple[int, int], num_threads: int) -> None:
    draw = np.random.default_rng(num_threads)
    for size in (1, 5, 64, 65, 3000):
        counts = np.array([draw.integers(0, size // num_threads + 1) for _ in range(num_threads)])
        starts = [size * thread // num_threads for thread in range(num_threads)]
        highs = draw.choice([scores[0], scores[0] + 3, scores[1] - 7, scores[1]], size)  # many alike, as uses are
        ranks = (highs << 32) | draw.permutation(1 << 20)[:size]
        given = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts)])
        for count in {0, 1, given.size // 2, max(0, given.size - 1), given.size, given.size + 2}:
            out = np.full(count, -1)
            num_taken = victims._lowest(ranks.copy(), np.arange(size), counts, out)
            assert num_taken == min(count, given.size)
            expected = given[np.argsort(ranks[given])][:count]
            assert sorted(out[:num_taken].tolist()) == sorted(expected.tolist())
