"""mode="auto": both modes are timed, ranks always agree on the faster one, and no bit depends on it."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hotbed import Table, optim, prefetch
from hotbed.parallel import auto
from hotbed.parallel.auto import AutoFront, ExchangeTimer, ModeChoice, ModeTime
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import DYNAMIC, OPTIMIZERS, alone, assert_as_one, in_ranks, train_dynamic

# Seconds (sharded, replicated) that each rank is made to find: ranks alone would often choose otherwise.
TIMES = {
    "sharded": [(2.0, 9.0), (3.0, 1.0), (1.0, 2.0)],
    "replicated": [(9.0, 3.0), (1.0, 2.0), (1.0, 4.0)],
}


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def with_times(choice):
    """The trial is short, and this rank finds the times of TIMES."""
    auto.IGNORED, auto.TIMED = 1, 2
    found = iter(())

    def measured(self):
        nonlocal found
        seconds = next(found, None)
        if seconds is None:
            found = iter(TIMES[choice][dist.get_rank()])
            seconds = next(found)
        return ModeTime(seconds, 10.0)

    ExchangeTimer.found = property(measured)


def logged():
    lines, logger = Lines(), logging.getLogger("hotbed.parallel")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    return lines


@pytest.mark.parametrize("choice", TIMES)
@pytest.mark.parametrize("ahead", [False, True], ids=["as asked", "ahead"])
def test_the_faster_mode_is_chosen(choice, ahead):
    """By the slowest rank, on all ranks; rows and vectors are those of one process."""
    results = run_ranks(choosing, 3, choice, ahead)
    assert_as_one([result[0] for result in results], alone("adagrad"))
    lines = [result[1] for result in results]
    assert lines[1:] == [[], []]
    assert [line.split(": ")[0] for line in lines[0]] == [
        f"tables of dim 4 (a, b) are {choice}",
        f"tables of dim 8 (c) are {choice}",
    ]
    assert all("measured: medians of 2 batches each, of the slowest rank" in line for line in lines[0])


def choosing(choice, ahead):
    with_times(choice)
    lines = logged()
    result = in_ranks("adagrad", {"mode": "auto", "cache": 0.25}, ahead)
    return result, lines.found


def test_real_times_give_one_choice_on_all_ranks():
    """Nothing is faked here: whatever is measured, ranks have the same numbers."""
    results = run_ranks(measured_choices, 3)
    assert results[0] == results[1] == results[2]
    (choice,) = results[0]
    assert choice["batches"] == 3
    assert choice["mode"] == min(("sharded", "replicated"), key=lambda mode: choice[mode]["seconds"])
    assert all(choice[mode]["seconds"] > 0 and choice[mode]["num_bytes"] > 0 for mode in ("sharded", "replicated"))
    assert choice["said"].startswith(f"tables of dim 4 (a) are {choice['mode']}: ")


def measured_choices():
    auto.IGNORED, auto.TIMED = 1, 3
    tables = ShardedTables({"a": Table(400, 4)}, mode="auto", hbm="64KiB")
    for step in range(2 * 4 + 3):
        if step == 8:
            assert tables.exchange.modes == []
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tables(torch.randint(400, (30, 1), generator=draw)).sum().backward()
    return tables.exchange.modes


@pytest.mark.parametrize("choice", TIMES)
def test_dynamic_ids(choice):
    results, sharded = (run_ranks(dynamic_rows, 2, mode, choice) for mode in ("auto", "sharded"))
    for (mine, counts), (theirs, expected) in zip(results, sharded):
        assert counts == expected
        for name, (ids, columns) in theirs.items():
            assert torch.equal(mine[name][0], ids)
            assert all(torch.equal(mine[name][1][column], values) for column, values in columns.items())


def dynamic_rows(mode, choice):
    with_times(choice)
    options = {"hbm": "64KiB", "memory": "32MiB", "gradients": "sum", "mode": mode}
    tables = ShardedTables(DYNAMIC, OPTIMIZERS["adagrad"], **options)
    return train_dynamic(tables, dist.get_rank(), dist.get_world_size(), True)


@pytest.mark.parametrize("large", [3, 12], ids=["in the trial", "after it"])
@pytest.mark.parametrize("ahead", [False, True], ids=["as asked", "ahead"])
def test_a_batch_that_does_not_fit_the_replicas_makes_rows_sharded(large, ahead):
    for rank, (lines, rows, expected) in enumerate(run_ranks(one_large_batch, 2, large, ahead)):
        assert torch.equal(rows, expected)
        assert all("do not fit into the" in line and "are sharded" in line for line in lines[-1:])
        assert len(lines) == (0 if rank else 1 + (large == 12))


def one_large_batch(large, ahead):
    with_times("replicated")
    lines, rows = logged(), []
    batches = []
    for step in range(16):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        batches.append(torch.randint(4000, (400 if step == large else 20, 1), generator=draw))
    for mode in ("auto", "sharded"):
        tables = ShardedTables({"a": Table(4000, 4)}, optim.Adagrad(lr=0.3), mode=mode, hbm="128KiB")
        for ids in prefetch(batches, tables) if ahead else batches:
            tables(ids).square().sum().backward()
        rows.append(tables.rows("a")[1]["weight"])
    return lines.found, *rows


def test_the_first_batches_of_each_mode_are_not_timed(monkeypatch):
    monkeypatch.setattr(auto, "IGNORED", 2)
    monkeypatch.setattr(auto, "TIMED", 1)
    front = AutoFront.__new__(AutoFront)
    front._sharded, front._replicated, front._timers = "sharded", "replicated", ["first", "second"]
    seen = []
    front._choose = lambda: seen.append("chosen")
    for number in range(1, 8):
        front._try(number)
        seen.append((front._front, front._timer))
    assert seen[:3] == [("sharded", None), ("sharded", None), ("sharded", "first")]
    assert seen[3:6] == [("replicated", None), ("replicated", None), ("replicated", "second")]
    assert seen[6] == "chosen"


def test_the_time_of_a_mode_is_that_of_the_median_batch():
    mesh = Mesh.from_environment()
    timer = ExchangeTimer(mesh, torch.device("cpu"))
    timer._lookups, timer._updates, timer._sent = [5.0, 1.0, 2.0], [9.0, 3.0, 4.0], 30
    assert timer.found == ModeTime(2.0 + 4.0, 10.0)
    assert timer.lookup(lambda: "vectors", 100.0) == "vectors"
    assert timer._lookups[-1] >= 100.0
    timer._updates = []  # batches that are only looked up
    assert timer.found.seconds == pytest.approx(3.5)


def test_a_choice_without_times_gives_its_reason():
    choice = ModeChoice(4, ("a",), "sharded", reason="why")
    assert str(choice) == "tables of dim 4 (a) are sharded: why"
    assert choice.figures()["replicated"] is None
    assert SimpleNamespace(**choice.figures()).tables == ["a"]
