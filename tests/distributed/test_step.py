"""One step of ranks whose parts of a batch differ in size is one step of a process that has all of it."""

import functools

import pytest
import torch

from hotbed.models import MODELS
from hotbed.optim import SGD, KStepAdam
from hotbed.parallel.sharded import ShardedTables
from hotbed.parallel.world import World
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.spec import Table
from hotbed.train.step import Learner
from hotbed.types import Batch
from tests.distributed.ranks import run_ranks

SIZES = {"uneven": (5, 1), "one has none": (0, 6), "even": (3, 3)}
TABLES = {"a": Table(7, 4), "b": Table(5, 4)}


def learner_of(kind, make_optimizer, world):
    torch.manual_seed(3)
    model = MODELS["dnn"](2, 4, 1, hidden=[8], dropout=0.0)
    tables = kind(TABLES, SGD(lr=0.5), seed=1)
    return Learner(tables, model, make_optimizer(model.parameters()), 0.5, torch.device("cpu"), world=world)


def batch_of(first, stop):
    generator = torch.Generator().manual_seed(6)
    whole = torch.randint(0, 5, (6, 2), generator=generator), torch.randn(6, 1, generator=generator)
    ids, dense = (part[first:stop] for part in whole)
    return Batch(labels=(torch.arange(6) % 2).float()[first:stop], dense=dense, ids=ids)


def values(learner):
    rows = {f"{name}": learner.tables.rows(name) for name in TABLES}
    return rows, [parameter.detach() for parameter in learner.model.parameters()]


def one_step(sizes):
    import torch.distributed as dist

    rank = dist.get_rank()
    optimizer = functools.partial(KStepAdam, lr=0.5, k=1, merge="params", inner="sgd")
    learner = learner_of(functools.partial(ShardedTables, gradients="sum"), optimizer, World(rank, 2))
    first = sum(sizes[:rank])
    learner.step(batch_of(first, first + sizes[rank]), global_size=sum(sizes))
    learner.merge()
    return values(learner)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_step_of_uneven_ranks_is_that_of_one_process(sizes):
    one = learner_of(EmbeddingTables, functools.partial(torch.optim.SGD, lr=0.5), World())
    before = {name: one.tables.weight(name).clone() for name in TABLES}
    one.step(batch_of(0, 6))
    expected_rows, expected_dense = values(one)
    results = run_ranks(one_step, 2, sizes)
    for name in TABLES:
        assert not torch.allclose(before[name], expected_rows[name][1]["weight"], atol=1e-3)
        ids = torch.cat([rows[name][0] for rows, _ in results])
        weight = torch.cat([rows[name][1]["weight"] for rows, _ in results])
        torch.testing.assert_close(weight[ids.argsort()], expected_rows[name][1]["weight"], rtol=1e-5, atol=1e-6)
    for _, dense in results:
        for found, expected in zip(dense, expected_dense):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
