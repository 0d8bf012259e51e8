"""Law 6: W ranks give the rows of one on the same global batch, and W ranks behind caches those of W without."""

import functools

import pytest
import torch

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.errors import HotbedError, IdError, RankError
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks

OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.1),
    "adagrad": optim.Adagrad(lr=0.1),
    "rowwise_adagrad": optim.RowwiseAdagrad(lr=0.1, l2=0.01),
    "adam": optim.Adam(lr=0.1, clip_norm=4.0),
    "ftrl": optim.FTRL(lr=0.1, l1=0.01),
}
TABLES = {
    "a": Table(rows=700, dim=4),
    "b": Table(rows=31, dim=4, padding_id=0),
    "c": Table(rows=90, dim=8, features=("c1", "c2"), pooling="mean"),
}
FEATURES = ["a", "b", "c1", "c2"]
STEPS, BATCH = 9, 24


def global_batch(step):
    """Ids of every feature as bags; the weights of the loss are such that sums of gradients are exact in any order."""
    generator = torch.Generator().manual_seed(step)
    bags = {}
    for name, rows in zip(FEATURES, (700, 31, 90, 90)):
        lengths = torch.ones(BATCH).long() if name == "a" else 2 ** torch.randint(0, 3, [BATCH], generator=generator)
        values = (torch.rand(int(lengths.sum()), generator=generator) ** 3 * rows).long()
        bags[name] = Jagged(values, torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]))
    dims = {"a": 4, "b": 4, "c1": 8, "c2": 8}
    weights = {name: torch.randint(-8, 9, [BATCH, dim], generator=generator) / 4 for name, dim in dims.items()}
    return bags, weights


def part_of(batch, first, stop):
    bags, weights = batch
    cut = {}
    for name, bag in bags.items():
        begin, end = int(bag.offsets[first]), int(bag.offsets[stop])
        cut[name] = Jagged(bag.values[begin:end], bag.offsets[first : stop + 1] - begin)
    return cut, {name: weight[first:stop] for name, weight in weights.items()}


def borders(world, step):
    """Uneven parts; one rank in turn has none."""
    if world == 1:
        return [0, BATCH]
    sizes = torch.tensor([r + 1 for r in range(world)]).roll(step)
    sizes[step % world] = 0
    stops = (sizes.cumsum(0) * BATCH // int(sizes.sum())).tolist()
    return [0, *stops]


def train(tables, rank, world, ahead=False):
    batches = []
    for step in range(STEPS):
        cut = borders(world, step)
        batches.append(part_of(global_batch(step), cut[rank], cut[rank + 1]))
    losses = []
    for bags, weights in hotbed.prefetch(batches, tables) if ahead else batches:
        vectors = tables(bags)
        loss = sum((vectors[name] * weights[name].to(vectors[name].dtype)).sum() for name in FEATURES)
        loss.backward()
        losses.append({name: vector.detach() for name, vector in vectors.items()})
    return losses, {name: tables.rows(name) for name in TABLES}


def in_ranks(optimizer, rank_options, ahead=False, double=False):
    import torch.distributed as dist

    tables = ShardedTables(TABLES, OPTIMIZERS[optimizer], seed=5, gradients="sum", output="dict", **rank_options)
    if double:
        tables.double()
    result = train(tables, dist.get_rank(), dist.get_world_size(), ahead)
    return *result, tables.counters(), (tables.mesh.traffic.in_node, tables.mesh.traffic.across)


@functools.cache
def alone(optimizer, double=False):
    tables = hotbed.EmbeddingTables(TABLES, OPTIMIZERS[optimizer], seed=5, output="dict")
    if double:
        tables.double()
    return train(tables, 0, 1)


def assert_as_one(results, expected):
    losses, rows = expected
    for step in range(STEPS):
        for name in FEATURES:
            assert torch.equal(torch.cat([result[0][step][name] for result in results]), losses[step][name])
    for name in TABLES:
        ids = torch.cat([result[1][name][0] for result in results])
        assert torch.equal(ids.sort().values, rows[name][0])
        for column, value in rows[name][1].items():
            found = torch.cat([result[1][name][1][column] for result in results])
            assert torch.equal(found[ids.argsort()], value), (name, column)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_give_the_rows_of_one(optimizer, world):
    assert_as_one(run_ranks(in_ranks, world, optimizer, {}), alone(optimizer))


def test_in_float64():
    assert_as_one(run_ranks(in_ranks, 3, "adam", {}, False, True), alone("adam", True))
