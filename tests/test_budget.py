"""Budgets in bytes: they hold the rows and all that finds them, and are not exceeded."""

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import BudgetError, ConfigError

TABLES = {"a": Table(20_000, 8), "b": Table(5_000, 8), "c": Table(9_000, 30)}


@pytest.mark.parametrize("budget", ["64KiB", "1MiB", 300_000])
def test_a_budget_holds_rows_and_index(budget):
    tables = hotbed.EmbeddingTables(TABLES, optim.Adam(), hbm=budget, memory="1GiB")
    taken = sum(group.records.nbytes + group.cache.num_bytes for group in tables.groups)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hbm": "2GiB", "cache": 0.5}, "both say how large the cache is"),
        ({"hbm": "lots"}, "hbm: must be an amount of memory"),
        ({"hbm": 10}, "does not hold one row"),
        ({"memory": "1GiB"}, "give cache= or hbm= too"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ConfigError, match=message):
        hotbed.EmbeddingTables(TABLES, **arguments)


def test_host_memory_is_a_promise():
    with pytest.raises(BudgetError, match=r"need .* of host memory once all are used, and memory is 1.0 MiB"):
        hotbed.EmbeddingTables(TABLES, cache=0.1, memory="1MiB")
