"""What does not fit is told before it is built, with numbers and ways out."""

import re

import numpy as np
import pytest
import torch

from hotbed import Batch, EmbeddingTables, Jagged, Table, optim
from hotbed.cache import BYTES_PER_SLOT
from hotbed.errors import BudgetError
from hotbed.forecast.optimum import check_fits
from hotbed.forecast.trace import trace_of
from hotbed.tables.sizing.budget import Budgets
from hotbed.tables.sizing.fit import BatchSample, amounts_of, rows_of_batch, table_problems, too_small

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TABLES = {"user": Table(rows=1000, dim=16), "ad": Table(rows=24, dim=16)}  # records of 32 floats under Adagrad
AMOUNTS = amounts_of(TABLES, optim.Adagrad(lr=0.1))
WHOLE = 1024 * 128


@pytest.fixture
def free(monkeypatch):
    """free(cpu=..., cuda=...) sets what is left."""

    def left(**amounts):
        monkeypatch.setattr("hotbed.tables.sizing.fit.available_memory", lambda device: amounts[device.type])

    return left


def test_amounts():
    assert (AMOUNTS.rows, AMOUNTS.record, AMOUNTS.whole) == (1024, 128, WHOLE)
    assert AMOUNTS.cached(10) == 10 * (128 + BYTES_PER_SLOT)
    assert amounts_of(TABLES, optim.Adagrad(lr=0.1), "bf16").record == 96


def test_whole_tables(free):
    free(cpu=WHOLE, cuda=WHOLE - 1)
    assert table_problems(Budgets(), AMOUNTS, CPU) == []
    (told,) = table_problems(Budgets(), AMOUNTS, CUDA)
    assert "1,024 rows with their optimizer state take 128.0 KiB, and cuda:0 has 128.0 KiB left" in told
    assert "--cache 0.015" in told
    free(cpu=WHOLE - 1, cuda=0)
    assert "--cache" not in table_problems(Budgets(), AMOUNTS, CPU)[0]
    free(cpu=None, cuda=None)
    assert table_problems(Budgets(), AMOUNTS, CPU) == table_problems(Budgets(), AMOUNTS, CUDA) == []


@pytest.mark.parametrize("storage", [Budgets(cache=0.25), Budgets(hbm=str(AMOUNTS.cached(256)))])
def test_behind_a_cache(free, storage):
    below, cache = WHOLE + 1024, AMOUNTS.cached(256)
    free(cpu=below, cuda=cache)
    assert table_problems(storage, AMOUNTS, CUDA) == []
    free(cpu=below, cuda=cache - 200)
    assert "the cache does not fit: it takes 52.0 KiB, and cuda:0 has 51.8 KiB left" in str(
        table_problems(storage, AMOUNTS, CUDA)
    )
    free(cpu=below - 1, cuda=cache)
    assert "the rows behind the cache do not fit: up to 129.0 KiB will be used, and the host" in str(
        table_problems(storage, AMOUNTS, CUDA)
    )
    free(cpu=0, cuda=0)
    assert len(table_problems(storage, AMOUNTS, CUDA)) == 2


def test_on_the_host_cache_and_rows_share_the_memory(free):
    free(cpu=WHOLE + 1024 + AMOUNTS.cached(256))
    assert table_problems(Budgets(cache=0.25), AMOUNTS, CPU) == []
    assert table_problems(Budgets(cache=0.26), AMOUNTS, CPU) != []


def test_rows_that_are_never_used_take_no_memory(free):
    free(cpu=124 * 128 + 1024, cuda=WHOLE)
    assert table_problems(Budgets(cache=0.5), AMOUNTS, CUDA) != []
    assert table_problems(Budgets(cache=0.5), AMOUNTS, CUDA, most_used=124) == []
    assert table_problems(Budgets(cache=0.5), AMOUNTS, CUDA, most_used=125) != []


def test_rows_of_a_batch_are_distinct_per_table():
    tables = {"a": Table(rows=10, dim=4), "tags": Table(rows=9, dim=4), "b": Table(rows=5, dim=4, hashing=True)}
    ids = torch.tensor([[1, 5], [1, 10], [2, 7]])  # b: 0, 0, 2
    bags = {"tags": Jagged(torch.tensor([1, 1, 8, 3]), torch.tensor([0, 2, 2, 4]))}
    found = rows_of_batch(tables, Batch(torch.zeros(3), torch.zeros(3, 0), ids, bags))
    assert sorted(found.values()) == [2, 2, 3]


@pytest.mark.parametrize(("needed", "enough"), [(400, 480), (7, 15), (1020, 1024)])
def test_both_messages_give_the_same_amounts(needed, enough):
    """The one before training and the one of a batch that comes later."""
    before = str(too_small(BatchSample("train", 64, 9, 9), needed, 5, AMOUNTS))
    tables = EmbeddingTables(TABLES, optim.Adagrad(lr=0.1), hbm="2KiB")
    with pytest.raises(BudgetError) as caught:
        tables.caches[0].refuse_batch(needed)
    wanted = re.compile(r"--(cache|hbm) ([0-9.]+\w*)")
    assert wanted.findall(before) == wanted.findall(str(caught.value))
    assert len(wanted.findall(before)) == 4


@pytest.mark.parametrize(("needed", "enough"), [(400, 480), (7, 15), (1020, 1024)])
def test_the_smallest_cache_that_will_do(needed, enough):
    error = too_small(BatchSample("valid", 1000, 9, 20), needed, 5, AMOUNTS)
    assert isinstance(error, BudgetError)
    assert error.num_slots == enough
    assert "the largest of the first 9 of 20 batches of valid (1,000 samples each)" in str(error)
    assert f" needs {needed:,} rows at once, and the cache holds 5. Take --cache " in str(error)
    advice = "or smaller batches (--set data.eval_batch_size=N). Without a cache all rows take 128.0 KiB."
    assert str(error).endswith(advice)
    share, hbm = re.search(r"--cache (\S+) or --hbm (\S+) or more", str(error)).groups()
    assert round(float(share) * 1024) >= enough
    assert EmbeddingTables(TABLES, optim.Adagrad(lr=0.1), hbm=hbm).groups[0].num_slots >= enough
    said = re.search(
        r"which leaves some to spare \(--cache (\S+) or --hbm (\S+) holds the batches counted\)", str(error)
    )
    assert needed <= round(float(said[1]) * 1024) <= needed + 1
    least = EmbeddingTables(TABLES, optim.Adagrad(lr=0.1), hbm=said[2]).groups[0].num_slots
    assert needed <= least < needed + 10  # --hbm is in whole KiB
    with pytest.raises(BudgetError) as told:
        check_fits(trace_of([np.arange(needed)], num_rows=1024), 5)
    assert f"--cache {share} of" in str(told.value)
    assert f"({said[1]} holds the batches counted)" in str(told.value)


def test_a_batch_of_all_rows_has_nothing_to_spare():
    assert "to spare" not in str(too_small(BatchSample("train", 64, 9, 9), 1024, 5, AMOUNTS))
