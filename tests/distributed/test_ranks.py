"""The helper that runs ranks: results in order, failures and hangs with their place."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks


def total(values):
    mine = torch.tensor(values[dist.get_rank()])
    dist.all_reduce(mine)
    return dist.get_rank(), mine, int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"]), torch.get_num_threads()


def test_ranks_answer_in_order():
    found = run_ranks(total, 4, [1.0, 2.0, 3.0, 4.0], nodes=2)
    assert found == [(0, 10.0, 0, 0, 1), (1, 10.0, 0, 1, 1), (2, 10.0, 1, 0, 1), (3, 10.0, 1, 1, 1)]


def fails(rank, how):
    if dist.get_rank() == rank:
        how()
    dist.barrier()


def broken():
    raise ValueError("the one that failed")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    time.sleep(1000)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (broken, r"(?s)rank 1 of 2 failed.*in broken.*the one that failed"),
        (killed, r"rank 1 of 2 failed:\nit ended with exit code -9"),
    ],
)
def test_a_failing_rank_is_shown(how, message):
    with pytest.raises(AssertionError, match=message):
        run_ranks(fails, 2, 1, how)


def test_a_hanging_rank_is_shown():
    with pytest.raises(AssertionError, match=r"(?s)ranks \[0, 1\] hung for 4.0 s.*barrier.*in hangs"):
        run_ranks(fails, 2, 1, hangs, timeout=4.0)
