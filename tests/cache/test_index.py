"""The hash table of the cache when it is crowded: searches end, keys stay where they can be found, and a full table says so."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from hotbed.cache.cache import Cache
from hotbed.cache.policies import ORACLE
from hotbed.errors import HotbedError
from hotbed.ops.index import EMPTY, NEW_CELLS, NUM_KEYS, UNPLACED, WAYS, Cells, new_cells, new_slots, ops_for
from hotbed.ops.index.numba import _home

CUDA = torch.cuda.is_available()
BACKENDS = ["numba"] + ["triton"] * (importlib.util.find_spec("triton") is not None)


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
    monkeypatch.setattr(cache, "make_room", lambda num_lookups: None)  # the mistake that must not go unnoticed
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
    monkeypatch.setattr(cache, "make_room", lambda num_lookups: None)
    cache.reserve(28 * WAYS)  # 448 cells, of which 100 are slots' and 304 of 19 batches ahead
    tidied = []
    monkeypatch.setattr(ops, "tidy", lambda *parts, tidy=ops.tidy: tidied.append(tidy(*parts)))
    ahead: list[Any] = []
    for _ in range(90):
        while len(ahead) < 19:
            keys = torch.sort(torch.randint(0, 10**9, (16,), generator=draw)).values.to(cache.device)
            ahead.append(cache.arrive(keys, None))
        cache.plan([ahead.pop(0)], train=True)
        cache.numbers.publish()
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
        cache.numbers.publish()
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
