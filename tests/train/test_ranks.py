"""What ranks agree on: an interval of all of them, its first bad step, and when to stop."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hotbed
from hotbed import Table, optim
from hotbed.checkpoint import Saver, State
from hotbed.checkpoint.chain import find
from hotbed.checkpoint.files import DENSE, OPTIMIZER, dense_tensors
from hotbed.models import MODELS
from hotbed.parallel.world import World
from hotbed.train.interval import Interval
from hotbed.train.ranks import AgreedStop, first_bad, load_all, summary_of
from hotbed.train.step import Learner
from hotbed.types import Batch
from tests.distributed.ranks import run_ranks

STEPS = [  # (loss, logits, labels) of rank 0 and of rank 1, for each step
    ((0.5, [1.0, -1.0, 0.3], [1.0, 0.0, 1.0]), (2.0, [0.2], [1.0])),
    ((1.0, [0.7], [0.0]), (0.25, [0.9, -0.4], [0.0, 0.0])),
]


def interval_of(steps):
    interval = Interval()
    for loss, logits, labels in steps:
        interval.add(torch.tensor(loss), torch.tensor(logits), torch.tensor(labels))
    return interval


def told(bad_step):
    rank = dist.get_rank()
    world = World(rank, 2)
    mine = interval_of([step[rank] for step in STEPS])
    found = summary_of(mine, world)
    if rank == 1 and bad_step:
        mine.add(torch.tensor(math.nan), torch.zeros(1), torch.zeros(1))
    stop = AgreedStop(lambda: rank == 1, world)
    collected = [part.tolist() for part in world.collect(np.arange(rank + 2.0))]
    return found, first_bad(mine, world), [stop() for _ in range(3)], collected


def test_two_ranks_tell_of_all_their_samples():
    joined = [
        ((3 * 0.5 + 2.0) / 4, [1.0, -1.0, 0.3, 0.2], [1.0, 0.0, 1.0, 1.0]),
        ((1.0 + 2 * 0.25) / 3, [0.7, 0.9, -0.4], [0.0, 0.0, 0.0]),
    ]
    expected = interval_of(joined).summary()
    for rank, (found, bad, stops, collected) in enumerate(run_ranks(told, 2, True)):
        assert (found.samples, found.auc) == (7, expected.auc)
        assert found.loss == pytest.approx(expected.loss)
        assert bad == 2
        assert stops == [True] * 3
        assert collected == ([] if rank else [[0, 1], [0, 1, 2]])


def test_one_process_tells_of_its_own():
    mine = interval_of([step[0] for step in STEPS])
    assert summary_of(mine, World()) == mine.summary()
    assert first_bad(mine, World()) is None
    answers = iter([False, True, False])
    stop = AgreedStop(lambda: next(answers), World())
    assert [stop() for _ in range(3)] == [False, True, False]


def learner():
    torch.manual_seed(2)
    model = MODELS["dnn"](1, 4, 0, hidden=[3], dropout=0.0)
    tables = hotbed.EmbeddingTables({"a": Table(9, 4)}, optim.Adagrad(lr=0.1), seed=1)
    return Learner(tables, model, torch.optim.Adam(model.parameters(), lr=0.1), 0.1, torch.device("cpu"))


def test_the_state_of_the_dense_optimizer_comes_with_the_weights(tmp_path):
    one, other = learner(), learner()
    batch = Batch(labels=torch.tensor([1.0, 0.0]), dense=torch.zeros(2, 0), ids=torch.tensor([[1], [2]]))
    one.step(batch)
    Saver(tmp_path, one.tables).save(State(1, dense_tensors(one.model, one.optimizer), {}), wait=True)
    load_all([find(tmp_path)], other)
    for each in (one, other):
        each.step(batch)
    assert torch.equal(one.tables.weight("a"), other.tables.weight("a"))
    expected, found = (dense_tensors(each.model, each.optimizer) for each in (one, other))
    assert expected.keys() == found.keys() == {DENSE, OPTIMIZER}
    for name in expected:
        assert expected[name].keys() == found[name].keys() != set()
        for key, value in expected[name].items():
            assert torch.equal(value, found[name][key]), (name, key)
