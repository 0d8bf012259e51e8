"""Owners that pool their parts of bags: rows are those of one process to the bit, vectors to rounding, bytes are fewer."""

import dataclasses
import functools
from functools import partial

import pytest
import torch
import torch.distributed as dist

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.ops.parts import count_ways, split
from hotbed.parallel import auto, routes
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.requests import make_request
from hotbed.parallel.routes import tables_in_parts
from hotbed.parallel.sharded import ShardedTables
from hotbed.tables.inputs import read_inputs
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import OPTIMIZERS, part_of

TABLES = {
    "long": Table(rows=3000, dim=8),
    "mean": Table(rows=1700, dim=8, pooling="mean", padding_id=0),
    "few": Table(rows=7, dim=8),  # hardly any row: never in parts
    "two": Table(rows=2500, dim=4, features=("two1", "two2")),
}
FEATURES = ["long", "mean", "few", "two1", "two2"]
SIZES = {"long": 3000, "mean": 1700, "few": 7, "two1": 2500, "two2": 2500}
STEPS, BATCH = 5, 24

ALONE = partial(hotbed.EmbeddingTables, independent=True)  # on every rank the same


def global_batch(step):
    """Samples of the first half have bags of 16 and 32 ids, the others of one: ranks choose differently.

    Weights of the loss are such that sums of gradients are exact in any order, 1 / bag size included.
    """
    generator = torch.Generator().manual_seed(step)
    bags, weights = {}, {}
    for name, rows in SIZES.items():
        lengths = 2 ** torch.randint(4, 6, [BATCH], generator=generator)
        lengths[BATCH // 2 :] = 1
        lengths[step] = 0
        values = (torch.rand(int(lengths.sum()), generator=generator) * rows).long()
        if name == "mean":  # every other id of a long bag is padding: a power of two is left
            values[1 : int(lengths[: BATCH // 2].sum()) : 2] = 0
            values[values == 0] = 0
            values[0 : int(lengths[: BATCH // 2].sum()) : 2].clamp_(min=1)
        bags[name] = Jagged(values, torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]))
        dim = 4 if name.startswith("two") else 8
        weights[name] = torch.randint(-8, 9, [BATCH, dim], generator=generator) / 4
    return bags, weights


def batches_of(rank, world):
    """The last rank has a sample or none."""
    borders = [*(BATCH * r // max(1, world - 1) for r in range(world)), BATCH] if world > 1 else [0, BATCH]
    found = []
    for step in range(STEPS):
        cut = [min(b, BATCH - step % 2) for b in borders[:-1]] + [BATCH]
        found.append(part_of(global_batch(step), cut[rank], cut[rank + 1]))
    return found


def train(tables, batches, ahead=False, share=1.0):
    vectors = []
    for bags, weights in hotbed.prefetch(batches, tables) if ahead else batches:
        found = tables(bags)
        sum((found[name] * (weights[name] * share)).sum() for name in FEATURES).backward()
        vectors.append({name: vector.detach() for name, vector in found.items()})
    return vectors, {name: tables.rows(name) for name in TABLES}


@functools.cache
def alone(optimizer):
    """What one process gives; shared tables of one rank give the same, and have the kernels compiled for others."""
    results = []
    shared = functools.partial(ShardedTables, gradients="sum")
    for kind in (hotbed.EmbeddingTables, shared, functools.partial(shared, cache=0.5)):
        tables = kind(TABLES, OPTIMIZERS[optimizer], seed=5, output="dict")
        results.append(train(tables, batches_of(0, 1)))
        assert_rows_of_one([results[-1]], results[0][1])
    places, keys, starts = torch.arange(4), torch.arange(4), torch.tensor([0, 2, 4])
    assert count_ways(places, starts, torch.zeros(2).long(), [2, 2], 0).rows == [2]
    assert split(places, starts, torch.ones(2).bool(), keys, [2, 2]).num_vectors == [1, 1]
    return results[0]


def in_ranks(options, ahead=False, optimizers=tuple(OPTIMIZERS), share=1.0):
    found = []
    for optimizer in optimizers:
        tables = ShardedTables(TABLES, OPTIMIZERS[optimizer], seed=5, gradients="sum", output="dict", **options)
        settled, asks = [], []
        tables.ranks.requested_lookups = functools.partial(watched, tables.ranks.requested_lookups, settled)
        routes.make_request = functools.partial(asking, asks)
        result = train(tables, batches_of(dist.get_rank(), dist.get_world_size()), ahead, share)
        traffic = tables.mesh.traffic
        found.append((*result, tables.counters(), traffic.in_node + traffic.across, settled, asks))
    return found


def watched(asked, settled, given, learns):
    """Notes of every group whether this rank is asked for parts."""
    settled += [route.starts is not None for route in given]
    return asked(given, learns)


def asking(asks, want):
    """Notes whether this rank asks for parts."""
    ask = make_request(want)
    asks.append(sum(ask.num_keys) > sum(ask.num_vectors))
    return ask


def assert_rows_of_one(results, rows):
    for name in TABLES:
        ids = torch.cat([result[1][name][0] for result in results])
        assert torch.equal(ids.sort().values, rows[name][0])
        for column, value in rows[name][1].items():
            found = torch.cat([result[1][name][1][column] for result in results])
            assert torch.equal(found[ids.argsort()], value), (name, column)


def assert_near(results, vectors):
    for step in range(STEPS):
        for name in FEATURES:
            found = torch.cat([result[0][step][name] for result in results])
            torch.testing.assert_close(found, vectors[step][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, 3])  # four: on two nodes, below
def test_ranks_give_the_rows_of_one(world):
    """Ranks with long bags ask for parts, those with bags of one id for rows: owners get both in one batch."""
    expected = [alone(optimizer) for optimizer in OPTIMIZERS]
    results = run_ranks(in_ranks, world, {})
    for n, (vectors, rows) in enumerate(expected):
        of_ranks = [result[n] for result in results]
        assert_rows_of_one(of_ranks, rows)
        assert_near(of_ranks, vectors)
    assert all(any(result[0][4]) for result in results)
    if world == 3:  # every batch: two groups of the first rank in parts, of the others none
        assert [result[0][5] for result in results] == [[True] * 2 * STEPS, [False] * 2 * STEPS, [False] * 2 * STEPS]


ROUGH = (tuple(OPTIMIZERS), 1 / 3)  # sums of gradients depend on their order


@pytest.fixture(scope="module")
def without_caches():
    for optimizer in OPTIMIZERS:
        alone(optimizer)
    return run_ranks(in_ranks, 3, {}, False, *ROUGH)


@pytest.mark.parametrize("ahead", [False, True], ids=["as asked", "ahead"])
def test_caches_that_evict_change_no_bit(without_caches, ahead):
    cached = run_ranks(in_ranks, 3, {"cache": 0.3}, ahead, *ROUGH)
    for mine, theirs in zip(cached, without_caches):
        for a, b in zip(mine, theirs):
            assert a[2].written_back > 20
            for step in range(STEPS):
                assert all(torch.equal(a[0][step][name], b[0][step][name]) for name in FEATURES)
            for name in TABLES:
                assert all(torch.equal(a[1][name][1][column], value) for column, value in b[1][name][1].items())


def test_on_two_nodes_and_with_every_bag_in_parts():
    vectors, rows = alone("adagrad")
    for options in ({}, {"pooled": "always"}):
        results = [result[0] for result in run_ranks(in_ranks, 4, options, False, ("adagrad",), nodes=2)]
        assert_rows_of_one(results, rows)
        assert_near(results, vectors)


def test_what_is_chosen_moves_fewer_bytes():
    """And as many as either way where that is better for every table."""
    vectors, rows = alone("sgd")
    sent = {}
    for pooled in ("auto", "always", "never"):
        results = run_ranks(in_ranks, 3, {"pooled": pooled}, False, ("sgd",))
        sent[pooled] = [result[0][3] for result in results]
        if pooled == "never":
            for step in range(STEPS):
                for name in FEATURES:
                    assert torch.equal(torch.cat([r[0][0][step][name] for r in results]), vectors[step][name])
            assert_rows_of_one([result[0] for result in results], rows)
    assert sum(sent["auto"]) < 0.6 * sum(sent["never"])
    assert sum(sent["auto"]) < 0.95 * sum(sent["always"])  # table "few" has 7 rows


def test_traffic_in_16_bits_is_close():
    vectors, _ = alone("sgd")
    options = {"pooled": "always", "traffic": "bf16"}
    results = [result[0] for result in run_ranks(in_ranks, 2, options, False, ("sgd",))]
    found = torch.cat([result[0][0]["long"] for result in results])
    assert not torch.allclose(found, vectors[0]["long"], rtol=1e-5, atol=1e-6)
    assert torch.allclose(found, vectors[0]["long"], rtol=0.02, atol=0.01)


def bytes_of_parts():
    mesh = Mesh(nodes=1, local=2)
    tables = ShardedTables({"a": Table(400, 4)}, optim.SGD(lr=1.0), mesh=mesh)
    ids = torch.arange(200)[None] if mesh.rank == 0 else torch.zeros(1, 1).long()
    before = dataclasses.replace(mesh.traffic)
    tables({"a": ids}).sum().backward()
    away = int((tables.groups[0].shard.owner_of(torch.arange(200)) != 0).sum())
    return mesh.traffic.in_node - before.in_node, away


def test_bytes_of_parts_are_counted_by_hand():
    (sent, away), (other, _) = run_ranks(bytes_of_parts, 2)
    numbers, row = 3 * 8, 4 * 4  # keys and vectors of the group, and that the rank goes on
    # The first sends the keys of its bag and one gradient; the second, which owns id 0 or not, a key and a gradient or a row.
    assert sent in (numbers + 4 * away + row, numbers + 4 * away + row + row)
    assert other in (numbers + row, numbers + row + 4 + row)
    assert 80 < away < 120


def weighted():
    """(vectors by weights, gradient of the weights, vectors without) of one process, those of ranks, lookups left."""
    generator = torch.Generator().manual_seed(3)
    values, offsets = torch.randint(0, 500, [60], generator=generator), torch.tensor([0, 30, 30, 60])
    strengths = torch.randint(1, 5, [60], generator=generator) / 4
    found = []
    for kind in (ALONE, ShardedTables):  # every rank has the same batch
        tables = kind({"w": Table(500, 4), "s": Table(600, 4)}, optim.SGD(lr=0.5), output="dict")
        weights = strengths.clone().requires_grad_()
        inputs = {"w": Jagged(values, offsets, weights), "s": Jagged(values, offsets)}
        for _ in range(2):
            vectors = tables(inputs)
            weights.grad = None
            sum(vector.sum() for vector in vectors.values()).backward()
        found.append((vectors["w"].detach(), weights.grad, vectors["s"].detach()))
    (route,) = tables.ranks.routes(read_inputs(tables.features, inputs, None, tables.device))
    return *found, route.own.slots.shape[0]


def test_weighted_bags_go_by_rows_and_others_beside_them_in_parts():
    for one, ranks, num_left in run_ranks(weighted, 2):
        assert num_left == 60 + 2 * 2  # every lookup with a weight; two bags that are not empty, in two parts
        assert torch.equal(one[0], ranks[0])  # by rows: to the bit
        torch.testing.assert_close(one[1], ranks[1])
        torch.testing.assert_close(one[2], ranks[2])


@pytest.mark.parametrize("mode", ["replicated", "auto"])
def test_replicas_take_rows(mode):
    vectors, rows = alone("adagrad")
    results = [result[0] for result in run_ranks(in_ranks, 2, {"mode": mode}, False, ("adagrad",))]
    assert_rows_of_one(results, rows)
    for step in range(STEPS):
        assert all(torch.equal(torch.cat([r[0][step][n] for r in results]), vectors[step][n]) for n in FEATURES)


def chosen():
    auto.IGNORED, auto.TIMED = 0, 1
    auto.ExchangeTimer.found = property(lambda self: auto.ModeTime(1.0, 1.0))  # sharded: the other is not faster
    return in_ranks({"mode": "auto", "cache": 0.4}, False, ("adagrad",))[0]


def test_what_auto_chooses_changes_no_bit():
    vectors, rows = alone("adagrad")
    results = run_ranks(chosen, 2)
    assert not any(any(result[4]) for result in results)
    assert_rows_of_one(results, rows)
    for step in range(STEPS):
        assert all(torch.equal(torch.cat([r[0][step][n] for r in results]), vectors[step][n]) for n in FEATURES)


def dynamic():
    """Rows travel: the vectors of one process."""
    declared = {"u": Table(None, 4)}
    tables = [kind(declared, optim.SGD(lr=0.5), hbm="64KiB", memory="32MiB") for kind in (ALONE, ShardedTables)]
    ids = torch.arange(40)[None] * 7**20
    found = []
    for each in tables:
        each({"u": ids}).sum().backward()
        found.append(each({"u": ids}).detach())
    return torch.equal(*found)


def test_dynamic_ids_go_by_rows():
    assert all(run_ranks(dynamic, 2))


def test_tables_in_parts():
    """One that has bags, unless a feature of it has weights or is a sequence."""
    tables = {
        "plain": Table(9, 4),
        "bags": Table(9, 4, features=("b1", "b2")),
        "weighted": Table(9, 4, features=("w1", "w2")),
        "sequence": Table(9, 4, pooling="none"),
    }
    shared = ShardedTables(tables, output="dict")
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    bag = Jagged(ids, offsets)
    inputs = {"plain": ids[:2], "b1": bag, "b2": ids[:2], "w1": bag, "w2": Jagged(ids, offsets, torch.ones(3))}
    given = read_inputs(shared.features, {**inputs, "sequence": bag}, None, shared.device)
    assert tables_in_parts(shared.group_inputs[0], given) == (-1, 0, 0, -1, -1, -1)
    inputs = dict.fromkeys(("plain", "b1", "b2", "w1", "w2", "sequence"), ids[:2])
    assert tables_in_parts(shared.group_inputs[0], read_inputs(shared.features, inputs, None, shared.device)) is None
