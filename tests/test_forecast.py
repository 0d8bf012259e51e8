"""What does not fit is told before it is built, with numbers and ways out."""

import pytest
import torch

from hotbed import Batch, Jagged, Table, optim
from hotbed.errors import BudgetError
from hotbed.forecast import Storage, rows_of_batch, table_problems, too_small

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TABLES = {"user": Table(rows=1000, dim=16), "ad": Table(rows=24, dim=16)}  # records of 32 floats under Adagrad
WHOLE = 1024 * 128


@pytest.fixture
def free(monkeypatch):
    """free(cpu=..., cuda=...) sets what is left."""

    def left(**amounts):
        monkeypatch.setattr("hotbed.forecast.available_memory", lambda device: amounts[device.type])

    return left


def problems(device, storage=Storage(), most_used=None):  # noqa: B008
    return table_problems(TABLES, optim.Adagrad(lr=0.1), device, storage, most_used)


def test_whole_tables(free):
    free(cpu=WHOLE, cuda=WHOLE - 1)
    assert problems(CPU) == []
    (told,) = problems(CUDA)
    assert "1,024 rows with the state of adagrad take 128.0 KiB, and cuda:0 has 128.0 KiB left" in told
    assert "--cache 0.015" in told
    free(cpu=WHOLE - 1, cuda=0)
    assert "--cache" not in problems(CPU)[0]
    free(cpu=None, cuda=None)
    assert problems(CPU) == problems(CUDA) == []


def test_weights_of_16_bits_take_less(free):
    free(cpu=WHOLE * 3 // 4)
    assert problems(CPU)
    assert problems(CPU, Storage(precision="bf16")) == []


@pytest.mark.parametrize("storage", [Storage(cache=0.25), Storage(hbm="32KiB")])
def test_behind_a_cache(free, storage):
    free(cpu=WHOLE, cuda=WHOLE // 4)
    assert problems(CUDA, storage) == []
    free(cpu=WHOLE, cuda=WHOLE // 4 - 1)
    assert "the cache does not fit: it takes 32.0 KiB, and cuda:0 has 32.0 KiB left" in problems(CUDA, storage)[0]
    free(cpu=WHOLE - 1, cuda=WHOLE)
    assert "the rows behind the cache do not fit: up to 128.0 KiB" in problems(CUDA, storage)[0]
    free(cpu=0, cuda=0)
    assert len(problems(CUDA, storage)) == 2


def test_on_the_host_cache_and_rows_share_the_memory(free):
    free(cpu=WHOLE + WHOLE // 4)
    assert problems(CPU, Storage(cache=0.25)) == []
    assert problems(CPU, Storage(cache=0.26)) != []


def test_rows_that_are_never_used_take_no_memory(free):
    free(cpu=(100 + 24) * 128, cuda=WHOLE)
    assert problems(CUDA, Storage(cache=0.5)) != []
    assert problems(CUDA, Storage(cache=0.5), {"user": 100, "ad": 100}) == []
    assert problems(CUDA, Storage(cache=0.5), {"user": 101, "ad": 100}) != []


def test_a_budget_beyond_the_tables_is_not_counted(free):
    free(cpu=WHOLE, cuda=2 * WHOLE)
    assert problems(CUDA, Storage(hbm="1TiB")) == []


def test_rows_of_a_batch_are_distinct_per_table():
    tables = {"a": Table(rows=10, dim=4), "tags": Table(rows=9, dim=4), "b": Table(rows=5, dim=4, hashing=True)}
    ids = torch.tensor([[1, 5], [1, 10], [2, 7]])  # b: 0, 0, 2
    bags = {"tags": Jagged(torch.tensor([1, 1, 8, 3]), torch.tensor([0, 2, 2, 4]))}
    assert rows_of_batch(tables, Batch(torch.zeros(3), torch.zeros(3, 0), ids, bags)) == 2 + 3 + 2


def test_the_smallest_cache_that_will_do():
    error = too_small("a batch", 400, {"slots": 10, "device_bytes": 10 * 160}, TABLES)
    assert isinstance(error, BudgetError)
    assert error.num_slots == 480
    assert "a batch needs 400 rows at once, and the cache holds 10. Take --cache 0.4688 or --hbm 78.8KiB" in str(error)
    assert 0.4688 * 1024 >= 480
    assert "--cache 1 or" in str(too_small("a batch", 1020, {"slots": 10, "device_bytes": 1600}, TABLES))
