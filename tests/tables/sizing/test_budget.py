"""Budgets in bytes: they hold the rows and all that finds them, and are not exceeded."""

import re

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import BudgetError, ConfigError
from hotbed.tables.sizing.budget import BYTES_PER_ID, Budgets, rooms_of

TABLES = {"a": Table(20_000, 8), "b": Table(5_000, 8), "c": Table(9_000, 30)}


@pytest.mark.parametrize("budget", ["64KiB", "1MiB", 300_000])
def test_a_budget_holds_rows_and_index(budget):
    tables = hotbed.EmbeddingTables(TABLES, optim.Adam(), hbm=budget, memory="1GiB")
    taken = sum(group.records.nbytes + group.residency.cache.num_bytes for group in tables.groups)
    limit = {"64KiB": 1 << 16, "1MiB": 1 << 20}.get(budget, budget)
    assert 0.93 * limit < taken <= limit
    shares = [group.num_slots / group.num_rows for group in tables.groups]
    assert shares[0] == pytest.approx(shares[1], rel=0.05)


def test_a_budget_for_all_rows_takes_no_more_slots_than_rows():
    tables = hotbed.EmbeddingTables(TABLES, hbm="1GiB")
    assert [group.num_slots for group in tables.groups] == [25_000, 9_000]


def test_a_batch_that_cannot_fit_names_a_budget_that_works():
    tables = hotbed.EmbeddingTables({"a": Table(1000, 8)}, hbm="16KiB")
    ids = torch.arange(400).unsqueeze(1)
    with pytest.raises(BudgetError, match="one batch needs 400 rows at once") as caught:
        tables(ids)
    budget = str(caught.value).split("hbm='")[1].split("'")[0].replace(" ", "")
    assert hotbed.EmbeddingTables({"a": Table(1000, 8)}, hbm=budget)(ids).shape == (400, 1, 8)


@pytest.mark.parametrize("rows", [3000, None])
def test_the_budget_that_is_named_is_enough_with_the_parts_of_other_groups(rows):
    tables = {"a": Table(rows=5000, dim=40), "b": Table(rows=rows, dim=4)}

    def call(hbm):
        ids = {"a": torch.arange(200) % 3, "b": torch.arange(200)}
        return hotbed.EmbeddingTables(tables, output="dict", hbm=hbm)(ids)

    with pytest.raises(BudgetError) as caught:
        call("8KiB")
    named = re.search(r"--hbm ([\w.]+)\)", str(caught.value))[1]
    assert call(named)["b"].shape == (200, 4)


def test_memory_that_is_the_cache_and_holds_no_batch_names_memory(tmp_path):
    """Not hbm=, which there is none of."""
    ids, given = torch.arange(400).unsqueeze(1), {"ssd": f"{tmp_path}:8MiB"}
    tables = hotbed.EmbeddingTables({"a": Table(1000, 8)}, memory="24KiB", **given)
    with pytest.raises(BudgetError, match=r"memory='\d+KiB' \(--memory \d+KiB\)") as caught:
        tables(ids)
    enough = re.search(r"--memory (\d+KiB)", str(caught.value))[1]
    del tables
    other = {"ssd": f"{tmp_path / 'other'}:8MiB"}
    assert hotbed.EmbeddingTables({"a": Table(1000, 8)}, memory=enough, **other)(ids).shape == (400, 1, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hbm": "2GiB", "cache": 0.5}, "both say how large the cache is"),
        ({"hbm": "lots"}, "hbm: must be an amount of memory"),
        ({"hbm": 10}, "does not hold one row"),
        ({"cache": 15}, "at most 1, not 15; 15 % is 0.15"),
        ({"memory": "1GiB"}, "give cache= or hbm= too"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ConfigError, match=message):
        hotbed.EmbeddingTables(TABLES, **arguments)


def test_host_memory_is_a_promise():
    with pytest.raises(BudgetError, match=r"need .* of host memory once all are used, and memory is 1.0 MiB"):
        hotbed.EmbeddingTables(TABLES, cache=0.1, memory="1MiB")


def test_host_memory_counts_the_byte_that_says_whether_a_row_was_written():
    groups = [(1000, 64), (10, 32)]
    needed = 1000 * (64 + 1) + 10 * (32 + 1)
    assert len(rooms_of(Budgets(cache=0.1, memory=needed), groups, "cpu")) == 2
    with pytest.raises(BudgetError, match="of host memory once all are used"):
        rooms_of(Budgets(cache=0.1, memory=needed - 1), groups, "cpu")


@pytest.mark.parametrize(
    ("budgets", "device", "said"),
    [
        ({"ssd": "/fast:1GiB"}, "cpu", "holds what memory does not; give memory= too"),
        (
            {"ssd": "/fast", "memory": "1GiB"},
            "cpu",
            "must be a folder and bytes, such as '/fast/rows:500GiB', not '/fast'",
        ),
        ({"ssd": ":1GiB", "memory": "1GiB"}, "cpu", "must be a folder and bytes"),
        ({"ssd": "/fast:much", "memory": "1GiB"}, "cpu", "ssd"),
        ({"ssd": "/fast:1GiB", "memory": "1GiB"}, "cuda", "needs a cache there; give cache= or hbm= too"),
        ({"memory": "1GiB"}, "cpu", "give cache= or hbm= too, or ssd="),
    ],
)
def test_what_contradicts_itself_about_an_ssd(budgets, device, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        rooms_of(Budgets(**budgets), [(1000, 64)], device)


def test_memory_that_does_not_hold_the_index_of_an_ssd():
    rows = 1_000_000
    with pytest.raises(
        BudgetError,
        match=r"does not hold the index of 1,000,000 rows.*Give memory='12\.4MiB' \(--memory 12\.4MiB\) or more",
    ):
        rooms_of(Budgets(cache=0.01, memory="8MiB", ssd="/fast:1GiB"), [(rows, 64)], "cpu")
    (room,) = rooms_of(Budgets(cache=0.01, memory="16MiB", ssd="/fast:1GiB"), [(rows, 64)], "cpu")
    assert room.num_slots == rows // 100
    assert room.place.memory_slots == (16 * 2**20 - 13 * rows) // (64 + 29)
    assert room.place.ssd_bytes == 2**30


@pytest.mark.parametrize("groups", [[(1000, 64)], [(1_000_000, 64), (5, 32)], [(1000, 64), (None, 32), (None, 480)]])
def test_all_files_on_an_ssd_stay_within_its_budget(groups):
    dynamic = any(rows is None for rows, _ in groups)
    least = 4 * 2**20 * len(groups)
    for budget in (least, least + 1, 3 * least + 7, 2**34):
        given = {"hbm": "1MiB"} if dynamic else {"cache": 0.1}
        rooms = rooms_of(Budgets(memory="64MiB", ssd=f"/fast:{budget}", **given), groups, "cpu")
        assert sum(room.place.ssd_bytes for room in rooms) <= budget
        assert min(room.place.ssd_bytes for room in rooms) >= 4 * 2**20
    with pytest.raises(BudgetError, match=r"the files of every dim take 4\.0 MiB at least"):
        rooms_of(Budgets(memory="64MiB", ssd=f"/fast:{least - 1}", **given), groups, "cpu")


@pytest.mark.parametrize(
    ("budgets", "bounded"),
    [({"cache": 0.1}, False), ({"hbm": "16KiB"}, True), ({"memory": "1MiB", "ssd": "/fast:1GiB"}, True), ({}, False)],
)
def test_the_index_of_a_cache_is_bounded_where_its_bytes_are_given(budgets, bounded):
    (room,) = rooms_of(Budgets(**budgets), [(1000, 64)], "cpu")
    assert room.bounded == bounded


def test_dynamic_ids_have_as_many_rows_as_memory_holds_with_their_index():
    fixed, dynamic = rooms_of(Budgets(hbm="1MiB", memory="1MiB"), [(1000, 64), (None, 128)], "cpu")
    part = 2**20 - 1000 * (64 + 1)
    assert fixed.ids is None
    assert dynamic.ids == (part // (128 + 1 + BYTES_PER_ID), part, 128 + 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_group_of_few_rows_has_room_for_one_of_them(rows):
    """Next to many, of which a budget holds a small part: in proportion it would have less than a row."""
    preset, dynamic = [(rows, 144), (100_000, 80)], [(None, 64), (rows, 144), (100_000, 80)]
    ssd = {"memory": "8MiB", "ssd": "folder:64MiB"}
    for groups in (preset, dynamic):
        for budgets in (Budgets(hbm="1MiB"), Budgets(hbm="1MiB", **ssd), Budgets(**ssd)):
            rooms = rooms_of(budgets, groups, "cpu")
            assert all(room.num_slots >= 1 for room in rooms)
            if budgets.ssd is None or budgets.hbm is None:
                budget, per_slot = (1 << 20, 80) if budgets.hbm else (8 << 20, 80)
                taken = sum(room.num_slots * (record + per_slot) for room, (_, record) in zip(rooms, groups))
                assert 0.3 * budget < taken <= budget + 224
            else:
                assert all(room.place.memory_slots >= 1 for room in rooms)
