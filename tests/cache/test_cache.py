"""The cache against its reference over dictionaries: random streams, every policy, on the CPU and as Triton kernels."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.cache import POLICIES, Arrival, Cache, CachePlan, make_policy
from hotbed.cache.reference import ReferenceCache
from hotbed.errors import BudgetError, ConfigError
from hotbed.ops.index import AHEAD_BITS
from hotbed.ops.inputs import Capacity, InputLayout, describe_ids
from hotbed.ops.keys import Addresses

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["numba", pytest.param("triton", marks=needs_triton)]


class Feeder:
    """Feeds the cache as its group does: sorted where the kernels are Triton's."""

    def __init__(self, num_slots: int, policy: str, backend: str) -> None:
        self.sorts = backend == "triton"
        self.device = torch.device(DEVICE if self.sorts else "cpu")
        self.cache = Cache(num_slots, make_policy(policy), self.device)
        if self.sorts:
            from hotbed.ops.index import triton

            self.cache._ops = self.cache.index._ops = triton

    def arrive(self, keys: list[int], at_once: bool = False) -> Arrival:
        tensor = torch.tensor(keys, dtype=torch.int64, device=self.device)
        arrive = self.cache.arrive_at_once if at_once else self.cache.arrive
        if not self.sorts:
            return arrive(tensor, None)
        return arrive(*torch.sort(tensor, stable=True))

    def slots(self, arrival: Arrival, plan: CachePlan) -> list[int]:
        return self.cache.slots_of(arrival, plan).tolist()

    def key_of_slot(self) -> dict[int, int]:
        keys, slots = self.cache.resident()
        return dict(zip(slots.tolist(), keys.tolist()))


STREAMS = st.lists(st.lists(st.integers(-1, 40), max_size=9), min_size=1, max_size=14)


def replay(
    stream: list[list[int]], policy: str, backend: str, window: int, ahead: int, num_slots: int, stride: int = 1
) -> None:
    """Windows of a stream through both caches, with as many batches ahead as allowed."""
    feeder, reference = Feeder(num_slots, policy, backend), ReferenceCache(num_slots, make_policy(policy))
    feeder.cache.stride = reference.stride = stride
    arrivals: list[Arrival] = []
    read = planned = 0
    while planned < len(stream):
        while read < len(stream) and read - planned < max(ahead, window):
            arrivals.append(feeder.arrive(stream[read]))
            reference.arrive(stream[read])
            read += 1
        batches = arrivals[planned : planned + window]
        train = planned % 3 != 1
        before = feeder.key_of_slot()
        plan = feeder.cache.plan(batches, train)
        after = feeder.key_of_slot()
        missed = 0
        expected = reference.plan(len(batches), train)
        for arrival, batch in zip(batches, stream[planned : planned + window]):
            slots = feeder.slots(arrival, plan)
            assert [after.get(slot, -1) for slot in slots] == batch
            missed += sum(key in expected.misses for key in batch)
        feeder.cache.counters.publish()
        assert plan.num_hits == expected.num_hits
        assert sorted(plan.miss_keys.tolist()) == sorted(expected.misses)
        assert [after[slot] for slot in plan.miss_slots.tolist()] == plan.miss_keys.tolist()
        assert sorted(plan.victim_keys.tolist()) == sorted(expected.written)
        assert [before[slot] for slot in plan.victim_slots.tolist()] == plan.victim_keys.tolist()
        assert plan.num_evictions == expected.num_evictions
        assert plan.num_missed_lookups == missed
        assert set(after.values()) == set(reference.rows)
        feeder.cache.check_integrity()
        planned += len(batches)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(stream=STREAMS, window=st.integers(1, 3), ahead=st.integers(1, AHEAD_BITS), stride=st.integers(1, 3))
def test_every_decision_is_that_of_the_reference(
    stream: list[list[int]], policy: str, window: int, ahead: int, stride: int
) -> None:
    replay(stream, policy, "numba", window, ahead, num_slots=28, stride=stride)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_share_a_plan(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("numba", "victims"):
        monkeypatch.setattr(f"hotbed.ops.index.{module}.threads_for", lambda num_values: num_threads)
    generator = torch.Generator().manual_seed(0)
    stream = [torch.randint(-1, 900, (150,), generator=generator).tolist() for _ in range(30)]
    replay(stream, "oracle", "numba", window=2, ahead=10, num_slots=300)


@needs_triton
@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=5)
@given(stream=STREAMS, window=st.integers(1, 3), ahead=st.integers(1, AHEAD_BITS), stride=st.integers(1, 3))
def test_the_kernels_decide_as_the_reference(
    stream: list[list[int]], policy: str, window: int, ahead: int, stride: int
) -> None:
    replay(stream, policy, "triton", window, ahead, num_slots=28, stride=stride)


@pytest.mark.parametrize("backend", BACKENDS)
def test_buckets_spill_over_and_the_table_grows(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    stream = [torch.randint(-1, 5000, (150,), generator=generator).tolist() for _ in range(12)]
    replay(stream, "oracle", backend, window=1, ahead=10, num_slots=300)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_ahead_can_be_dropped(backend: str) -> None:
    feeder = Feeder(8, "oracle", backend)
    first = feeder.arrive([1, 2, 3, 3])
    feeder.arrive([3, 4, 5])
    feeder.arrive([5, 6])
    feeder.cache.plan([first], True)
    feeder.cache.drop_ahead()
    feeder.cache.check_integrity()
    assert feeder.cache.num_arrived == 0
    assert sorted(feeder.cache.resident()[0].tolist()) == [1, 2, 3]
    assert feeder.cache.index.count_live(wait=True) == 3
    again = feeder.arrive([4, 1])
    assert feeder.cache.plan([again], True).miss_keys.tolist() == [4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_are_gone_have_no_slot_and_no_cell_unless_a_batch_ahead_has_them(backend: str) -> None:
    feeder = Feeder(8, "oracle", backend)
    first = feeder.arrive([1, 2, 3, 4])
    ahead = feeder.arrive([4, 5])
    feeder.cache.plan([first], True)
    feeder.cache.forget(torch.tensor([1, 4, 9], device=feeder.device))
    assert sorted(feeder.cache.resident()[0].tolist()) == [2, 3]
    assert feeder.cache.index.num_live == 4
    feeder.cache.check_integrity()
    assert sorted(feeder.cache.plan([ahead], True).miss_keys.tolist()) == [4, 5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_oracle_lets_the_row_go_whose_next_use_is_farthest(backend: str) -> None:
    feeder = Feeder(3, "oracle", backend)
    first, second, *_ = [feeder.arrive(keys) for keys in ([1, 2, 3], [4], [3], [1], [2])]
    feeder.cache.plan([first], True)
    assert feeder.cache.plan([second], True).victim_keys.tolist() == [2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_at_once_leaves_the_look_ahead_alone(backend: str) -> None:
    feeder = Feeder(3, "oracle", backend)
    ahead = feeder.arrive([7, 8])
    at_once = feeder.arrive([1, 7, 7], at_once=True)
    assert sorted(feeder.cache.plan([at_once], True).miss_keys.tolist()) == [1, 7]
    other = feeder.arrive([2, 3], at_once=True)
    plan = feeder.cache.plan([other], True)  # one slot is free, one row must leave: 7 is used next, 1 is not
    assert plan.victim_keys.tolist() == [1]
    assert feeder.cache.plan([ahead], True).miss_keys.tolist() == [8]
    feeder.cache.check_integrity()


def test_what_does_not_fit_is_refused_with_the_number_that_would() -> None:
    feeder = Feeder(4, "lru", "numba")
    arrival = feeder.arrive([1, 2, 3, 4, 5, 5])
    with pytest.raises(BudgetError, match="needs 5 rows at once, but the cache has 4 slots") as caught:
        feeder.cache.plan([arrival], True)
    assert caught.value.num_slots == 5
    feeder.cache.check_integrity()


@pytest.mark.parametrize("backend", BACKENDS)
def test_hot_rows_stay_under_the_static_policy(backend: str) -> None:
    feeder = Feeder(4, "static", backend)
    feeder.cache.keep(torch.tensor([10, 11]))
    for keys in ([10, 11], [1, 2], [3, 4], [5, 6], [10, 11]):
        plan = feeder.cache.plan([feeder.arrive(keys)], True)
    assert plan.num_misses == 0
    feeder.cache.check_integrity()


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="no cache policy 'fifo'; there are lfu, lru, oracle, static"):
        make_policy("fifo")


@needs_triton
@settings(max_examples=8)
@given(
    stream=st.lists(st.lists(st.integers(-1, 40), max_size=9), min_size=1, max_size=12),
    window=st.integers(1, 2),
    ahead=st.integers(2, 6),
    stride=st.integers(1, 3),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_a_recorded_cache_decides_as_the_reference(
    stream: list[list[int]], window: int, ahead: int, stride: int, policy: str
) -> None:
    """Batches of any size up to its capacity, and plain ones in between, which the numbers on the device must catch up with."""
    from hotbed.cache.recorded_planner import RecordedCache
    from hotbed.ops.inputs.triton import Descriptions

    feeder, reference = Feeder(28, policy, "triton"), ReferenceCache(28, make_policy(policy))
    feeder.cache.stride = reference.stride = stride
    addresses = Addresses(*(np.array([value]) for value in (0, 41, False, True, -1)))
    inputs = Descriptions(InputLayout(addresses, is_bags=False), feeder.device)
    recorded = RecordedCache(feeder.cache, inputs, Capacity(9, 9), window)
    batches = [describe_ids(torch.tensor(keys, dtype=torch.int64, device=feeder.device)) for keys in stream]
    read = planned = 0
    while planned < len(stream):
        while read < len(stream) and read - planned < ahead:
            number = recorded.arrive(batches[read])
            reference.arrive(stream[read])
            assert recorded.num_keys(number) == len(reference.ahead[-1])
            read += 1
        if planned % 3 == 2:
            feeder.cache.plan([feeder.arrive([1, 2, 3, planned], at_once=True)], False)
            reference.plan_at_once([1, 2, 3, planned])
        before = feeder.key_of_slot()
        count = min(window, read - planned)
        arriving = batches[read : read + count] if len(stream) - read >= count and planned % 2 else []
        plan, placed = recorded.plan(count, arriving)
        after, expected = feeder.key_of_slot(), reference.plan(count, True)
        assert (plan.num_hits, sorted(plan.miss_keys.tolist())) == (expected.num_hits, sorted(expected.misses))
        assert sorted(plan.victim_keys.tolist()) == sorted(expected.written)
        assert [before[slot] for slot in plan.victim_slots.tolist()] == plan.victim_keys.tolist()
        assert [after[slot] for slot in plan.miss_slots.tolist()] == plan.miss_keys_on_device.tolist()
        for row, keys in zip(placed, stream[planned : planned + count]):
            assert [after.get(slot, -1) for slot in row.slots.tolist()] == keys
            assert row.sorted.keys.tolist() == sorted(keys)
            assert [keys[position] for position in row.sorted.order.tolist()] == sorted(keys)
        for keys in stream[read : read + len(arriving)]:
            reference.arrive(keys)
        read += len(arriving)
        planned += count
        recorded._count()
        feeder.cache.check_integrity()


@needs_triton
def test_a_recorded_cache_finds_room_by_waiting_for_its_oldest_window_and_not_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts come with events, as from a device that is behind; two batches that are not counted make room doubtful."""
    from hotbed.cache.recorded_planner import RecordedCache
    from hotbed.ops.inputs.triton import Descriptions

    feeder = Feeder(8, "oracle", "triton")
    waited: list[int] = []
    feeder.cache.reserve(64)
    addresses = Addresses(*(np.array([value]) for value in (0, 1000, False, False, 0)))
    inputs = Descriptions(InputLayout(addresses, is_bags=False), feeder.device)
    recorded = RecordedCache(feeder.cache, inputs, Capacity(8, 8), 1)
    ids = [describe_ids(torch.arange(8 * n, 8 * n + 8, device=feeder.device)) for n in range(6)]
    recorded.arrive(ids[0])
    recorded.arrive(ids[1])
    recorded.settle()
    there = recorded._host_arrivals, recorded._host_windows
    recorded._host_arrivals, recorded._host_windows = (counts.copy() for counts in there)

    class Late:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            waited.append(recorded._uncounted[0].number)
            for seen, now in zip((recorded._host_arrivals, recorded._host_windows), there):
                seen[:] = now

    monkeypatch.setattr("hotbed.cache.recorded_planner.mark", Late)
    monkeypatch.setattr(recorded, "settle", lambda: pytest.fail("all that is under way was waited for"))
    for n in range(2, 6):
        recorded.plan(1, [ids[n]])
    assert waited == [0, 1, 2]
    assert feeder.cache.parts()[0].key.shape[0] == 64


@needs_triton
def test_a_recorded_cache_waits_for_no_window_where_counts_that_are_there_show_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hotbed.cache.recorded_planner import RecordedCache, RecordedPlan
    from hotbed.ops.inputs.triton import Descriptions

    feeder = Feeder(8, "oracle", "triton")
    feeder.cache.reserve(64)
    addresses = Addresses(*(np.array([value]) for value in (0, 1000, False, False, 0)))
    inputs = Descriptions(InputLayout(addresses, is_bags=False), feeder.device)
    recorded = RecordedCache(feeder.cache, inputs, Capacity(8, 8), 1)
    ids = [describe_ids(torch.arange(8 * n, 8 * n + 8, device=feeder.device)) for n in range(6)]
    recorded.arrive(ids[0])
    recorded.arrive(ids[1])
    recorded.settle()
    monkeypatch.setattr(RecordedPlan, "wait", lambda plan: pytest.fail(f"window {plan.number} was waited for"))
    for n in range(2, 6):
        recorded.plan(1, [ids[n]])
        if feeder.device.type == "cuda":
            torch.cuda.synchronize(feeder.device)  # the counts are there
    assert feeder.cache.parts()[0].key.shape[0] == 64


@needs_triton
@pytest.mark.parametrize("reads", [False, True])
def test_a_recorded_cache_counts_what_windows_freed_whether_or_not_anybody_read_them(reads: bool) -> None:
    from hotbed.cache.recorded_planner import RecordedCache
    from hotbed.ops.inputs.triton import Descriptions

    feeder = Feeder(8, "oracle", "triton")
    addresses = Addresses(*(np.array([value]) for value in (0, 1000, False, False, 0)))
    inputs = Descriptions(InputLayout(addresses, is_bags=False), feeder.device)
    recorded = RecordedCache(feeder.cache, inputs, Capacity(8, 8), 1)
    for n in range(12):  # every one takes eight cells and frees those of the one before
        recorded.arrive(describe_ids(torch.arange(8 * n, 8 * n + 8, device=feeder.device)))
        plan, _ = recorded.plan(1)
        if reads:
            plan.wait()
    recorded.settle()
    assert feeder.cache.index.num_live == 8
    feeder.cache.check_integrity()


@needs_triton
def test_a_recorded_cache_that_is_settled_has_counted_the_batches_ahead() -> None:
    from hotbed.cache.recorded_planner import RecordedCache
    from hotbed.ops.inputs.triton import Descriptions

    feeder = Feeder(8, "oracle", "triton")
    addresses = Addresses(*(np.array([value]) for value in (0, 1000, False, False, 0)))
    inputs = Descriptions(InputLayout(addresses, is_bags=False), feeder.device)
    recorded = RecordedCache(feeder.cache, inputs, Capacity(8, 8), 1)
    recorded.arrive(describe_ids(torch.arange(8, device=feeder.device)))
    recorded.settle()
    assert feeder.cache.index.num_live == 8


@needs_triton
def test_a_planned_batch_without_its_padding() -> None:
    from hotbed.ops.lookups import BatchSlots, SortedKeys

    slots, keys, order = (torch.arange(9, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.int32))
    sorted_keys = SortedKeys(keys, order)
    whole = BatchSlots(slots, sorted_keys, torch.arange(7), torch.arange(9, dtype=torch.int32), torch.rand(9))
    cut = whole.cut(5, 3)
    found, given = ([one.slots, *one.sorted, one.starts, one.out_row, one.scale] for one in (cut, whole))
    assert [part.shape[0] for part in found] == [5, 5, 5, 4, 5, 5]
    assert all(torch.equal(part, one[: part.shape[0]]) for part, one in zip(found, given))
    assert BatchSlots(slots, sorted_keys).cut(5, 3)[2:] == (None, None, None)


def test_an_arrival_that_was_broken_off_is_not_missing_in_the_count(monkeypatch):
    cache = Cache(20, make_policy("oracle"), torch.device("cpu"))
    cache.arrive(torch.arange(6), None)
    real = cache._ops.arrive

    def broken_off(*arguments):
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._ops, "arrive", broken_off)
    with pytest.raises(KeyboardInterrupt):
        cache.arrive(torch.arange(4, 11), None)
    monkeypatch.setattr(cache._ops, "arrive", real)
    cache.drop_ahead()
    assert cache.index.num_live == 0
    cache.plan([cache.arrive(torch.arange(5), None)], train=True)
    cache.check_integrity()
