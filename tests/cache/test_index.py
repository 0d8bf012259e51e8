"""The hash table of the cache when it is crowded: searches end, keys stay where they can be found, and a full table says so."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from hotbed.cache.cache import Cache
from hotbed.cache.policies import ORACLE
from hotbed.cache.window import look_ahead_for, most_ahead
from hotbed.errors import HotbedError
from hotbed.ops.index import EMPTY, NEW_CELLS, NUM_KEYS, UNPLACED, WAYS, Cells, new_cells, new_slots, ops_for
from hotbed.ops.index.numba import _home
from hotbed.ops.inputs import Capacity, InputLayout, describe
from hotbed.ops.keys import Addresses

CUDA = torch.cuda.is_available()
BACKENDS = ["numba"] + ["triton"] * (importlib.util.find_spec("triton") is not None)
if "triton" in BACKENDS:
    from hotbed.cache.recorded_planner import RecordedCache
    from hotbed.ops.inputs.triton import Descriptions


def device_of(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "triton" and CUDA else "cpu")


def ops_of(backend: str) -> Any:
    if backend == "numba":
        return ops_for(torch.empty(0))
    from hotbed.ops.index import triton

    return triton


def cannot_be_found(table: Cells) -> list[int]:
    """Keys whose search would stop before it comes to their cell."""
    keys, spilled = table.key.tolist(), table.spilled.tolist()
    lost = []
    for cell, key in enumerate(keys):
        if key == EMPTY:
            continue
        bucket = int(_home(key, len(spilled)))
        while bucket != cell // WAYS and spilled[bucket]:
            bucket = (bucket + 1) % len(spilled)
        if bucket != cell // WAYS:
            lost.append(key)
    return lost


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_search_ends_where_every_bucket_is_marked(backend: str) -> None:
    device, ops = device_of(backend), ops_of(backend)
    table = new_cells(3 * WAYS, device)
    counts = torch.zeros(8, dtype=torch.int64, device=device)
    ops.arrive(table, torch.arange(20, device=device), 1, counts)
    table.spilled.fill_(1)
    counts.zero_()
    ops.arrive(table, torch.arange(15, 25, device=device), 2, counts)  # 20 to 24 have no cell yet
    assert (counts[NUM_KEYS].item(), counts[NEW_CELLS].item(), counts[UNPLACED].item()) == (10, 5, 0)
    assert sorted(table.key[table.key != EMPTY].tolist()) == list(range(25))


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_without_a_cell_are_counted_and_the_others_have_theirs(backend: str) -> None:
    device, ops = device_of(backend), ops_of(backend)
    table = new_cells(2 * WAYS, device)
    counts = torch.zeros(8, dtype=torch.int64, device=device)
    ops.arrive(table, torch.arange(40, device=device), 4, counts)
    assert (counts[NEW_CELLS].item(), counts[UNPLACED].item()) == (32, 8)
    assert torch.unique(table.key).shape[0] == 32
    assert table.future.tolist() == [4] * 32


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_index_is_reported_before_the_batch_is_planned(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.cache.cache.ops_for", lambda tensor: ops_of(backend))
    cache = Cache(WAYS, ORACLE, device_of(backend), name="the cache of clicks")
    monkeypatch.setattr(cache.index, "make_room", lambda num_lookups: None)  # the mistake that must not go unnoticed
    batches = [cache.arrive(torch.arange(n, n + 8, device=cache.device), None) for n in range(0, 40, 8)]
    for batch in batches[:4]:
        cache.plan([batch], train=True)
    with pytest.raises(
        HotbedError, match="index of the cache of clicks is full: 8 keys found no place among its 32 cells"
    ):
        cache.plan(batches[4:], train=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_crowded_table_is_tidied(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.9 of the cells in use, every batch of new keys: all buckets came to be marked, and keys strayed ever farther."""
    ops = ops_of(backend)
    monkeypatch.setattr("hotbed.cache.cache.ops_for", lambda tensor: ops)
    draw = torch.Generator().manual_seed(0)
    cache = Cache(100, ORACLE, device_of(backend))
    monkeypatch.setattr(cache.index, "make_room", lambda num_lookups: None)
    cache.reserve(28 * WAYS)  # 448 cells, of which 100 are slots' and 304 of 19 batches ahead
    tidied = []
    monkeypatch.setattr(ops, "tidy", lambda *parts, tidy=ops.tidy: tidied.append(tidy(*parts)))
    ahead: list[Any] = []
    for _ in range(90):
        while len(ahead) < 19:
            keys = torch.sort(torch.randint(0, 10**9, (16,), generator=draw)).values.to(cache.device)
            ahead.append(cache.arrive(keys, None))
        cache.plan([ahead.pop(0)], train=True)
        cache.counters.publish()
    cells, _ = cache.parts()
    assert 0.85 < (cells.key != EMPTY).double().mean() < 0.95
    assert len(tidied) > (10 if backend == "triton" else 4)
    assert not cannot_be_found(cells)
    cache.check_integrity()
    if backend == "triton":  # on the CPU batches remember cells, and none moves
        assert cells.spilled.double().mean() < 0.9


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_half_empty_table_is_tidied_when_as_many_cells_were_taken_as_it_has(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = ops_of(backend)
    monkeypatch.setattr("hotbed.cache.cache.ops_for", lambda tensor: ops)
    cache = Cache(32, ORACLE, device_of(backend))
    cache.reserve(16 * WAYS)  # 256 cells, of which 32 are slots' and 64 of four batches ahead
    tidied = []
    monkeypatch.setattr(ops, "tidy", lambda *parts, tidy=ops.tidy: tidied.append(tidy(*parts)))
    ahead: list[Any] = []
    for n in range(40):  # 640 new keys
        ahead.append(cache.arrive(torch.arange(16 * n, 16 * n + 16, device=cache.device), None))
        if len(ahead) == 4:
            cache.plan([ahead.pop(0)], train=True)
        cache.counters.publish()
    assert cache.parts()[0].key.shape[0] == 256
    assert len(tidied) == 2
    cache.check_integrity()


@pytest.mark.skipif("triton" not in BACKENDS, reason="no triton")
def test_keys_go_back_towards_their_homes_with_all_that_belongs_to_them() -> None:
    device, ops = device_of("triton"), ops_of("triton")
    table, slots = new_cells(4 * WAYS, device), new_slots(60, device)
    counts = torch.zeros(8, dtype=torch.int64, device=device)
    numbers = {1000 + 7 * n * n: n for n in range(60)}  # of each key, which stands for its slot
    ops.arrive(table, torch.tensor(list(numbers), device=device), 2, counts)
    full = table.key.tolist()
    strayed = [k for c, k in enumerate(full) if k != EMPTY and _home(k, 4) != c // WAYS]
    assert len(strayed) >= 3
    for cell, key in enumerate(full):  # every key in the slot of its number, with a future of its own
        if key != EMPTY:
            table.slot[cell], slots.cell[numbers[key]], table.future[cell] = numbers[key], cell, key
    gone = [cell for cell, key in enumerate(full) if key != EMPTY and key not in strayed]
    for cell in gone:
        slots.cell[numbers[full[cell]]], table.slot[cell], table.future[cell], table.key[cell] = -1, -1, 0, EMPTY
    ops.tidy(table, slots)
    after = table.key.tolist()
    assert sorted(key for key in after if key != EMPTY) == sorted(strayed)
    assert all(_home(key, 4) == cell // WAYS for cell, key in enumerate(after) if key != EMPTY)
    assert not table.spilled.any()
    for cell, key in enumerate(after):
        expected = (-1, 0) if key == EMPTY else (numbers[key], key)
        assert (table.slot[cell].item(), table.future[cell].item()) == expected
        assert key == EMPTY or slots.cell[numbers[key]] == cell


def test_a_bounded_index_counts_every_batch_before_it_takes_another() -> None:
    cache = Cache(16, ORACLE, torch.device("cpu"), bounded=True)
    num_cells = cache.parts()[0].key.shape[0]
    batches = [cache.arrive(torch.arange(15 * n, 15 * n + 15), None) for n in range(1 + num_cells // 15)]
    assert cache.parts()[0].key.shape[0] > num_cells
    for batch in batches:
        assert cache.plan([batch], train=True).num_misses == 15
    cache.check_integrity()


def test_one_large_batch_does_not_make_later_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that took many cells makes room doubtful, and room that is doubtful is counted, which waits for the device."""
    cache = Cache(200, ORACLE, torch.device("cpu"))
    waits: list[bool] = []
    count = cache.index.count_live
    monkeypatch.setattr(cache.index, "count_live", lambda *, wait: waits.append(wait) or count(wait=wait))
    cache.plan([cache.arrive(torch.arange(150), None)], train=True)
    cache.counters.publish()
    cache.plan([cache.arrive(torch.arange(150), None)], train=True)
    assert True in waits
    for _ in range(30):
        cache.counters.publish()
        cache.plan([cache.arrive(torch.arange(5), None)], train=True)
    waits.clear()
    cache.counters.publish()
    cache.plan([cache.arrive(torch.arange(5), None)], train=True)
    assert waits
    assert True not in waits


def test_lookups_of_few_keys_do_not_make_a_batch_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What batches have taken lately says how many cells the next one takes, not its lookups."""
    cache = Cache(200, ORACLE, torch.device("cpu"))
    num_cells = cache.parts()[0].key.shape[0]
    cache.plan([cache.arrive(torch.arange(5), None)], train=True)
    cache.counters.publish()
    waits: list[bool] = []
    count = cache.index.count_live
    monkeypatch.setattr(cache.index, "count_live", lambda *, wait: waits.append(wait) or count(wait=wait))
    cache.plan([cache.arrive(torch.arange(5).repeat(num_cells // 6), None)], train=True)
    assert waits
    assert True not in waits


def test_the_table_grows_for_a_first_batch_that_would_crowd_it() -> None:
    cache = Cache(200, ORACLE, torch.device("cpu"))
    num_cells = cache.parts()[0].key.shape[0]
    cache.arrive(torch.arange(int(0.9 * num_cells)), None)
    assert cache.parts()[0].key.shape[0] > num_cells


@pytest.mark.parametrize("stride", [1, 2, 3, 8])
def test_no_two_steps_of_batches_ahead_share_a_bit(stride: int) -> None:
    cache = Cache(16, ORACLE, torch.device("cpu"))
    cache.stride = stride
    for before in range(stride):  # the first batch ahead may be any of its step
        cache.num_arrived = cache.num_planned = before
        bits = [cache.note_arrival() for _ in range(most_ahead(stride))]
        steps = [(before + n) // stride for n in range(most_ahead(stride))]
        assert len(set(zip(steps, bits))) == len(set(bits)) == len(set(steps))
        with pytest.raises(AssertionError, match="batches are ahead"):
            cache.note_arrival()


@pytest.mark.parametrize(
    ("num_keys", "num_slots", "given", "bounded", "expected"),
    [
        (100, 100, None, False, (1, 30)),
        (10, 150, None, False, (2, 59)),  # four caches of batches: 60
        (1, 10**6, None, False, (8, 233)),
        (10, 1000, 1, False, (1, 1)),
        (10, 1000, 31, False, (2, 31)),
        (10, 100, None, True, (1, 20)),  # two caches of keys
        (500, 100, None, True, (1, 1)),
    ],
)
def test_how_far_to_look(num_keys: int, num_slots: int, given: int | None, bounded: bool, expected: tuple) -> None:
    assert look_ahead_for(num_keys, num_slots, given, bounded) == expected


@pytest.mark.skipif("triton" not in BACKENDS, reason="no triton")
def test_a_recorded_planner_learns_that_the_table_has_grown() -> None:
    device = device_of("triton")
    cache = Cache(8, ORACLE, device)
    cache._ops = cache.index._ops = ops_of("triton")
    addresses = Addresses(*(np.array([value]) for value in (0, 1000, False, False, 0)))
    recorded = RecordedCache(cache, Descriptions(InputLayout(addresses, is_bags=False), device), Capacity(8, 8), 1)
    for n in range(6):
        ids = torch.arange(8 * n, 8 * n + 8, device=device)
        recorded.arrive(describe([[ids.data_ptr(), 1, 0, 8, 0, 1, 0, 0]], 8, 8, True, kept=ids))
        plan, (placed,) = recorded.plan(1)
        keys, slots = cache.resident()
        assert dict(zip(slots.tolist(), keys.tolist())) == dict(zip(placed.slots.tolist(), ids.tolist()))
        assert sorted(plan.miss_keys.tolist()) == ids.tolist()
        assert recorded._stamps.shape == cache.parts()[0].key.shape
        cache.reserve(2 * cache.parts()[0].key.shape[0])


@pytest.mark.parametrize("bounded", [False, True])
def test_an_index_that_may_not_grow_is_filled_higher(bounded: bool) -> None:
    cache = Cache(160, ORACLE, torch.device("cpu"), bounded=bounded)
    num_cells = cache.parts()[0].key.shape[0]
    assert cache.index.has_room(int(0.69 * num_cells), 1)
    assert cache.index.has_room(int(0.71 * num_cells), 1) == bounded
    assert not cache.index.has_room(int(0.96 * num_cells), 1)
    assert cache.index.has_room(round((0.95 if bounded else 0.7) * num_cells), 1)  # just so
    assert cache.index.has_room(1, num_cells)  # likewise
    assert not cache.index.has_room(1, num_cells + 1)


@pytest.mark.skipif("triton" not in BACKENDS, reason="no triton")
def test_a_recorded_planner_reports_a_full_index(monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of("triton")
    cache = Cache(WAYS, ORACLE, device, name="the cache of clicks")
    cache._ops = cache.index._ops = ops_of("triton")
    addresses = Addresses(*(np.array([value]) for value in (0, 1000, False, False, 0)))
    recorded = RecordedCache(cache, Descriptions(InputLayout(addresses, is_bags=False), device), Capacity(8, 8), 1)
    monkeypatch.setattr(recorded, "_make_room", lambda batches: True)  # the mistake that must not go unnoticed
    for n in range(0, 32, 8):
        ids = torch.arange(n, n + 8, device=device)
        assert (
            recorded.num_keys(recorded.arrive(describe([[ids.data_ptr(), 1, 0, 8, 0, 1, 0, 0]], 8, 8, True, kept=ids)))
            == 8
        )
    ids = torch.arange(32, 40, device=device)
    number = recorded.arrive(describe([[ids.data_ptr(), 1, 0, 8, 0, 1, 0, 0]], 8, 8, True, kept=ids))
    with pytest.raises(HotbedError, match="index of the cache of clicks is full: 8 keys found no place"):
        recorded.num_keys(number)
