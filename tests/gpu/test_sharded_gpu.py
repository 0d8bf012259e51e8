"""Law 6 with CUDA tensors: two ranks that share one GPU over Gloo, and the whole path over NCCL with one rank."""

import pytest
import torch
import torch.distributed as dist

import hotbed
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import FEATURES, OPTIMIZERS, STEPS, TABLES, borders, global_batch, part_of

pytestmark = pytest.mark.gpu


def moved(bags):
    return {name: hotbed.Jagged(bag.values.cuda(), bag.offsets.cuda()) for name, bag in bags.items()}


def train(tables, rank, world, ahead):
    batches = []
    for step in range(STEPS):
        cut = borders(world, step)
        bags, weights = part_of(global_batch(step), cut[rank], cut[rank + 1])
        batches.append((moved(bags), {name: weight.cuda() for name, weight in weights.items()}))
    for bags, weights in hotbed.prefetch(batches, tables) if ahead else batches:
        vectors = tables(bags)
        sum((vectors[name] * weights[name]).sum() for name in FEATURES).backward()
    found = {name: tables.rows(name) for name in TABLES}
    return {name: (ids.cpu(), {k: v.cpu() for k, v in columns.items()}) for name, (ids, columns) in found.items()}


def in_ranks(optimizer, backend, options, ahead):
    if backend == "nccl":
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29571", rank=0, world_size=1)
    tables = ShardedTables(
        TABLES, OPTIMIZERS[optimizer], seed=5, gradients="sum", output="dict", device="cuda", **options
    )
    return train(tables, dist.get_rank(), dist.get_world_size(), ahead)


def assert_as_one(results, rows):
    for name in TABLES:
        ids = torch.cat([result[name][0] for result in results])
        assert torch.equal(ids.sort().values, rows[name][0])
        for column, value in rows[name][1].items():
            assert torch.equal(torch.cat([result[name][1][column] for result in results])[ids.argsort()], value)


@pytest.mark.parametrize("ahead", [False, True], ids=["as asked", "ahead"])
@pytest.mark.parametrize(
    "options", [{}, {"cache": 0.1}, {"cache": 0.1, "mode": "replicated"}], ids=["plain", "cached", "replicated"]
)
@pytest.mark.parametrize(("backend", "world"), [("gloo", 2), ("nccl", 1)])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_ranks_give_the_rows_of_one(optimizer, backend, world, options, ahead):
    one = hotbed.EmbeddingTables(TABLES, OPTIMIZERS[optimizer], seed=5, output="dict", device="cuda")
    expected = train(one, 0, 1, False)
    arguments = (optimizer, backend, options, ahead)
    assert_as_one(run_ranks(in_ranks, world, *arguments, init=backend == "gloo"), expected)
