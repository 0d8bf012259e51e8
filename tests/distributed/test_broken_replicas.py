"""A replica that did not arrive is never read: what is broken off on the way is refused from then on, on all ranks."""

import sys

import pytest
import torch
import torch.distributed as dist

from hotbed import Table, optim
from hotbed.errors import HotbedError, RankError
from hotbed.parallel import replicated
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks

# mode, and the function that fails: before rows are gathered for replicas, after it, and when updated rows come back
PLACES = [
    ("replicated", "place", False),
    ("replicated", "place", True),
    ("replicated", "refresh", False),
    ("all-reduce", "place", False),
    ("all-reduce", "place", True),
]


class TooLargeError(Exception):
    """As out of memory."""


class FailingGather:
    """Instead of `gather` in replicated.py: the n-th call from one function fails, before it or after it."""

    def __init__(self, function, after, number):
        self._function, self._after, self._left, self._real = function, after, number, replicated.gather

    def __call__(self, *arguments):
        fails = False
        if sys._getframe(1).f_code.co_name == self._function:
            self._left -= 1
            fails = self._left == 0
        if fails and not self._after:
            raise TooLargeError
        found = self._real(*arguments)
        if fails:
            raise TooLargeError
        return found


def tables_of(mode):
    return ShardedTables({"a": Table(40, 4), "b": Table(40, 4)}, optim.Adagrad(lr=0.1), mode=mode)


def batches():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [(torch.rand(12, 2, generator=generator) ** 2 * 40).long() for _ in range(6)]


def outcomes():
    """Of every place: what the step after the failure says."""
    found = []
    for mode, function, after in PLACES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replicated, "gather", FailingGather(function, after, 3))
            tables, said = tables_of(mode), []
            for ids in batches():
                try:
                    tables(ids).square().sum().backward()
                except (TooLargeError, HotbedError) as error:
                    said.append(error)
            found.append([type(said[0]).__name__, *(str(error) for error in said[1:])])
    return found


def test_all_ranks_run_out_of_memory_at_once():
    for found in run_ranks(outcomes, 2):
        for first, *others in found:
            assert first == "TooLargeError"
            assert len(others) >= 3
            assert all("lost rows when" in one for one in others)


def fail_alone(mode):
    """Rank 1 fails while all evaluate, and catches it; both continue with the next batch."""
    tables, given = tables_of(mode), batches()
    tables(given[0]).square().sum().backward()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if dist.get_rank() == 1:
            patch.setattr(replicated, "gather", FailingGather("place", True, 1))
            with pytest.raises(TooLargeError):
                tables(given[1])
        else:
            tables(given[1])
    with pytest.raises(RankError if dist.get_rank() == 0 else HotbedError) as caught, torch.no_grad():
        tables(given[2])
    return str(caught.value)


@pytest.mark.parametrize("mode", ["replicated", "all-reduce"])
def test_one_rank_runs_out_of_memory(mode):
    here, there = run_ranks(fail_alone, 2, mode)
    assert "this rank stops because of another. rank 1: HotbedError: these tables lost rows" in here
    assert "lost rows when bringing in replicas of rows was broken off (TooLargeError" in there
