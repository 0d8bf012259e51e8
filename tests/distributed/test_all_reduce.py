"""mode="all-reduce", the published collective: every rank applies every update, and the rows are those of one process."""

import pytest
import torch
import torch.distributed as dist

from hotbed import Admit, Table, optim
from hotbed.errors import ConfigError
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import (
    DYNAMIC,
    OPTIMIZERS,
    alone,
    assert_as_one,
    in_ranks,
    train_dynamic,
)

ALL_REDUCE = {"mode": "all-reduce"}
BY_ALL = [name for name, optimizer in OPTIMIZERS.items() if not optimizer.scale_by_count]


def with_every_optimizer(options, ahead=False):
    return [in_ranks(optimizer, {**ALL_REDUCE, **options}, ahead) for optimizer in BY_ALL]


def assert_all_as_one(results):
    for n, optimizer in enumerate(BY_ALL):
        assert_as_one([result[n] for result in results], alone(optimizer))


def test_two_ranks_give_the_rows_of_one():
    """Three do so behind caches, below, and four on two nodes."""
    assert_all_as_one(run_ranks(with_every_optimizer, 2, {}))


def test_caches_that_evict():
    results = run_ranks(with_every_optimizer, 3, {"cache": 0.25}, True)
    assert_all_as_one(results)
    assert all(one[2].written_back > 20 for result in results for one in result)


def test_on_two_nodes_in_float64():
    expected = alone("adam", True)
    assert_as_one(run_ranks(in_ranks, 4, "adam", ALL_REDUCE, False, True, nodes=2), expected)


def test_dynamic_ids():
    everywhere, sharded = (run_ranks(dynamic_rows, 2, mode) for mode in ("all-reduce", "sharded"))
    for (mine, counts), (theirs, expected) in zip(everywhere, sharded):
        assert counts == expected
        for name, (ids, columns) in theirs.items():
            assert torch.equal(mine[name][0], ids)
            for column, values in columns.items():
                assert torch.equal(mine[name][1][column], values)


def dynamic_rows(mode):
    options = {"hbm": "24KiB", "memory": "32MiB", "gradients": "sum", "mode": mode}
    tables = ShardedTables(DYNAMIC, OPTIMIZERS["adagrad"], **options)
    return train_dynamic(tables, dist.get_rank(), dist.get_world_size(), True)


def test_replicas_are_the_rows_of_their_owners():
    """Gradients whose sums depend on their order: still the same bits on every rank, whoever owns the row."""
    for found in run_ranks(copies_and_rows, 3):
        for copies, rows in found:
            assert torch.equal(copies, rows)


def copies_and_rows():
    tables = ShardedTables({"a": Table(60, 8)}, optim.Adam(lr=0.1), cache=0.9, **ALL_REDUCE)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(12):
        ids = (torch.rand(20, 1, generator=generator) ** 2 * 60).long()
        vectors = tables(ids)
        (vectors * torch.randn(vectors.shape, generator=generator)).sum().backward()
        with torch.no_grad():
            again = tables(ids)
        fresh = [None] * dist.get_world_size()
        dist.all_gather_object(fresh, tables.rows("a"))  # ids and columns of every owner
        weight = torch.empty(60, 8)
        for own, columns in fresh:
            weight[own] = columns["weight"]
        found.append((again.view(20, 8), weight[ids.view(-1)]))
    return found


def test_what_only_owners_can_do_is_refused():
    for said in run_ranks(refusals, 2):
        assert "scale_by_count divides by the occurrences" in said[0]
        assert "precision='bf16' rounds at random, which only owners do; use mode='replicated'" in said[1]
        assert "ids that wait for admission share a row" in said[2]
    with pytest.raises(ConfigError, match=r"mode='all-reduce' keeps copies.*decay_scope"):
        ShardedTables({"a": Table(40, 4)}, optim.SGD(lr=0.1, decay_scope="table"), **ALL_REDUCE)


def refusals():
    dynamic = {"hbm": "1MiB", "memory": "8MiB"}
    said = []
    for table, optimizer, options in (
        (Table(40, 4), optim.SGD(lr=0.1, scale_by_count=True), {}),
        (Table(40, 4), optim.SGD(lr=0.1), {"precision": "bf16"}),
        (Table(None, 4, admit=Admit(after=2)), optim.SGD(lr=0.1), dynamic),
    ):
        with pytest.raises(ConfigError) as caught:
            ShardedTables({"a": table}, optimizer, **ALL_REDUCE, **options)
        said.append(str(caught.value))
    return said
