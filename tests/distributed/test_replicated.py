"""Replicated rows give those of one process and of sharded tables to the bit."""

import functools

import pytest
import torch
import torch.distributed as dist

from benchmarks.modes import expected_bytes
from hotbed import EmbeddingTables, Jagged, Table, optim
from hotbed.errors import ConfigError
from hotbed.parallel.auto import choose_front
from hotbed.parallel.collect import gather
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.order import RankOrder
from hotbed.parallel.replicated import ReplicaRoom, RowTally
from hotbed.parallel.shard_front import FrontContext, ShardFront
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import (
    DYNAMIC,
    OPTIMIZERS,
    alone,
    assert_as_one,
    assert_each_as_one,
    in_ranks,
    train_dynamic,
    with_all_optimizers,
)

REPLICATED = {"mode": "replicated"}


@pytest.mark.parametrize("world", [2, 4])  # three: behind caches, below
def test_ranks_give_the_rows_of_one(world):
    assert_each_as_one(run_ranks(with_all_optimizers, world, REPLICATED))


def test_in_float64():
    expected = alone("adam", True)
    assert_as_one(run_ranks(in_ranks, 3, "adam", REPLICATED, False, True), expected)


def test_on_two_nodes():
    expected = alone("adagrad")
    assert_as_one(run_ranks(in_ranks, 4, "adagrad", REPLICATED, nodes=2), expected)


@pytest.mark.parametrize("ahead", [False, True], ids=["as asked", "ahead"])
def test_caches_that_evict(ahead):
    results = run_ranks(with_all_optimizers, 3, {"cache": 0.25, **REPLICATED}, ahead)
    assert_each_as_one(results)
    assert all(one[2].written_back > 20 for result in results for one in result)


@pytest.mark.parametrize("ahead", [False, True], ids=["as asked", "ahead"])
def test_dynamic_ids(ahead):
    replicated, sharded = (run_ranks(dynamic_rows, 3, mode, ahead) for mode in ("replicated", "sharded"))
    for (mine, counts), (theirs, expected) in zip(replicated, sharded):
        assert counts == expected
        for name, (ids, columns) in theirs.items():
            assert torch.equal(mine[name][0], ids)
            for column, values in columns.items():
                assert torch.equal(mine[name][1][column], values)


def dynamic_rows(mode, ahead):
    options = {"hbm": "24KiB", "memory": "32MiB", "gradients": "sum", "mode": mode}
    tables = ShardedTables(DYNAMIC, OPTIMIZERS["adagrad"], **options)
    return train_dynamic(tables, dist.get_rank(), dist.get_world_size(), ahead)


@pytest.mark.parametrize("traffic", ["fp32", "bf16"])
def test_any_gradients_give_the_rows_of_sharded_tables(traffic):
    """Sums here depend on their order, which is the same both ways."""
    replicated, sharded = (run_ranks(with_rough_gradients, 3, mode, traffic) for mode in ("replicated", "sharded"))
    for mine, theirs in zip(replicated, sharded):
        for a, b in zip(mine, theirs):
            assert torch.equal(a, b)


def with_rough_gradients(mode, traffic):
    tables = ShardedTables({"a": Table(60, 8), "b": Table(9, 8)}, mode=mode, traffic=traffic, cache=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    vectors = []
    for _ in range(12):
        ids = (torch.rand(20, 2, generator=generator) ** 2 * torch.tensor([60, 9])).long()
        found = tables(ids)
        (found * torch.randn(found.shape, generator=generator)).sum().backward()
        vectors.append(found.detach())
    return [*vectors, tables.rows("a")[1]["weight"], tables.rows("b")[1]["weight"]]


def test_precision_of_16_bits():
    """Rounding at random goes by key, and the owner does it."""
    assert all(run_ranks(rounded_alike, 2))


def rounded_alike():
    rows = []
    for mode in ("replicated", "sharded"):
        tables = ShardedTables({"a": Table(40, 6)}, optim.Adagrad(lr=0.3), mode=mode, precision="bf16")
        for step in range(6):
            tables((torch.arange(8)[:, None] * (step + 1) + dist.get_rank()) % 40).square().sum().backward()
        rows.append(tables.rows("a")[1])
    return all(torch.equal(rows[0][name], rows[1][name]) for name in rows[1])


def test_rows_that_stay_travel_once():
    """Batches of the same ids: the first brings the rows, those that follow only exchange what has changed."""
    first, second, again = run_ranks(bytes_by_batch, 2)[0]
    record = 16 * 4
    assert first - second == 20 * record  # the own 20 of the 40 rows go to the other rank
    assert again == first


def bytes_by_batch():
    tables = ShardedTables({"a": Table(40, 16)}, mode="replicated")
    found = []
    for step in range(3):
        if step == 2:
            tables.restore()
        before = tables.mesh.traffic.in_node
        tables(torch.arange(40)[:, None]).sum().backward()
        found.append(tables.mesh.traffic.in_node - before)
    return found


def test_two_looks_before_two_updates():
    """Replicas of the first batch make room for the second, and its rows are brought in again."""
    for one, other in run_ranks(two_then_two, 2):
        assert torch.equal(one, other)


def two_then_two():
    rows = []
    for mode in ("replicated", "sharded"):
        tables = ShardedTables({"a": Table(4000, 4)}, optim.Adagrad(lr=0.5), mode=mode)
        for step in range(4):
            batches = [(torch.arange(60)[:, None] * 7 + offset * 600 + dist.get_rank()) for offset in (step, 4 - step)]
            losses = [tables(ids).square().sum() for ids in batches]
            for loss in losses:
                loss.backward()
        rows.append(tables.rows("a")[1]["weight"])
    return rows


def test_nothing_at_first_then_inference_then_training():
    for vectors, updated in run_ranks(from_nothing, 2):
        assert torch.equal(updated, vectors - 1.0 - 1.0)


def from_nothing():
    tables = ShardedTables({"a": Table(40, 4)}, optim.SGD(lr=1.0), mode="replicated", gradients="sum")
    ids = torch.arange(9)[:, None]
    tables(ids[:0]).sum().backward()
    with torch.inference_mode():
        vectors = tables(ids).clone()
    for _ in range(2):
        tables(ids).sum().backward() if dist.get_rank() == 0 else tables(ids[:0]).sum().backward()
    return vectors, tables(ids).detach()


def test_replicas_follow_loaded_rows():
    for found, expected in run_ranks(loaded_between, 2):
        assert torch.equal(found, expected)


def loaded_between():
    tables = ShardedTables({"a": Table(40, 4)}, optim.SGD(lr=1.0), mode="replicated")
    ids = torch.arange(40)[:, None]
    with torch.no_grad():
        expected = tables(ids).clone()
    with tables.snapshot() as snapshot:
        parts = [part._replace(columns={k: v.clone() for k, v in part.columns.items()}) for part in snapshot.parts()]
    tables(ids).sum().backward()
    sink = tables.restore()
    sink.begin()
    for part in parts:
        sink.add(part)
    sink.end()
    return tables(ids).detach(), expected


def test_gathered_rows():
    expected = torch.cat([rows_of_rank(rank) for rank in range(4)])
    for nodes in (1, 2, 4):
        for found in run_ranks(gathered, 4, nodes):
            assert torch.equal(found, expected)


def rows_of_rank(rank):
    return torch.arange(6).view(3, 2)[: (3 * rank) % 4] + 10 * rank


def gathered(nodes):
    mesh = Mesh(nodes=nodes, local=4 // nodes)
    return gather(mesh, rows_of_rank(mesh.rank), [(3 * rank) % 4 for rank in range(4)])


def test_expected_bytes_are_those_that_are_sent():
    for expected, counted in run_ranks(forecast_and_count, 4):
        for num_bytes, sent in zip(expected, counted):
            assert num_bytes == pytest.approx(sent, rel=0.1)


def forecast_and_count():
    """Of batches after the first, which fills the replicas; keys to the owners are the same both ways and not counted."""
    sent, dim = [], 32
    for mode in ("sharded", "replicated"):
        tables = ShardedTables({"a": Table(4000, dim)}, mode=mode)
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            ids = (torch.rand(600, 1, generator=generator) ** 3 * 4000).long()
            if step == 1:
                before, earlier = tables.mesh.traffic.in_node, getattr(tables.fronts[0], "tally", None)
            asked = ids.unique()
            tables(ids).sum().backward()
            if step:
                before += int((tables.groups[0].shard.owner_of(asked) != dist.get_rank()).sum()) * 4
        sent.append((tables.mesh.traffic.in_node - before) / 5)
    rows = RowTally(*(now - then for now, then in zip(tables.fronts[0].tally, earlier)))
    return expected_bytes(rows, dim * 4), sent


def test_one_rank_has_no_replicas_to_forget():
    """Views of the rows may be written to between two batches."""
    tables = ShardedTables({"a": Table(40, 4)}, mode="replicated")
    ids = torch.arange(5)[:, None]
    tables(ids).sum().backward()
    tables.weight("a").fill_(3.0)
    assert (tables(ids) == 3.0).all()


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_weights_of_bags_get_their_gradient_though_rows_were_moved(mode):
    expected = gradient_of_weights(EmbeddingTables)
    assert torch.equal(gradient_of_weights(functools.partial(ShardedTables, mode=mode)), expected)


def gradient_of_weights(kind):
    tables = kind({"a": Table(400, 4)}, cache=0.1, output="dict")
    weights = torch.ones(8, requires_grad=True)
    vectors = tables({"a": Jagged(torch.arange(8), torch.arange(9), weights)})["a"]
    for first in range(8, 128, 30):
        with torch.no_grad():
            tables({"a": Jagged(torch.arange(first, first + 30), torch.arange(31))})
    vectors.sum().backward()
    return weights.grad


@pytest.mark.parametrize("rows", [None, 100], ids=["dynamic", "preset"])
def test_weights_of_bags_get_their_gradient_from_rows_that_another_batch_has_updated(rows):
    expected = gradient_after_another(
        EmbeddingTables({"a": Table(rows, 4)}, optim.SGD(lr=0.5), hbm="1MiB", output="dict")
    )
    for mode in ("sharded", "replicated", "all-reduce", "auto"):
        found = run_ranks(gradient_in_ranks, 2, rows, mode)
        assert torch.equal(torch.cat(found), expected), mode


def gradient_in_ranks(rows, mode):
    options = {"hbm": "1MiB", "output": "dict", "gradients": "sum", "pooled": "never"}
    return gradient_after_another(
        ShardedTables({"a": Table(rows, 4)}, optim.SGD(lr=0.5), mode=mode, **options), dist.get_rank(), 2
    )


def gradient_after_another(tables, rank=0, world=1):
    """Two batches of the same ids are looked up, and both backward passes follow."""
    ids = torch.arange(8)[rank * 8 // world : (rank + 1) * 8 // world]
    offsets, weights = torch.arange(ids.shape[0] + 1), torch.ones(ids.shape[0], requires_grad=True)
    first = tables({"a": Jagged(ids, offsets)})["a"]
    second = tables({"a": Jagged(ids, offsets, weights)})["a"]
    first.sum().backward()
    second.sum().backward()
    return weights.grad


def test_settings_that_cannot_be():
    with pytest.raises(
        ConfigError, match=r"mode must be one of 'sharded', 'replicated', 'all-reduce', 'auto', not 'mixed'"
    ):
        ShardedTables({"a": Table(40, 4)}, mode="mixed")
    with pytest.raises(ConfigError, match=r"decay_scope='table' changes all rows.*mode='sharded'"):
        ShardedTables({"a": Table(40, 4)}, optim.SGD(lr=0.1, decay_scope="table"), mode="replicated")


@pytest.mark.parametrize("mode", ["replicated", "all-reduce"])
def test_tables_whose_copies_would_go_stale_are_refused(mode):
    decays = {"a": Table(40, 4), "b": Table(40, 4, optimizer=optim.SGD(lr=0.1, decay_scope="table"))}
    with pytest.raises(ConfigError, match=rf"mode='{mode}' keeps copies .*decay_scope='table'.* \(tables b\)"):
        ShardedTables(decays, optim.SGD(lr=0.1), mode=mode)
    own = {"a": Table(40, 4, optimizer=optim.SGD(lr=0.1))}
    ShardedTables(own, optim.SGD(lr=0.1, decay_scope="table"), mode=mode)  # no row decays so
    with pytest.raises(ConfigError, match=rf"mode='{mode}' keeps copies .*store_precision='int8' rounds rows when"):
        ShardedTables({"a": Table(40, 4)}, mode=mode, cache=0.5, store_precision="int8")


@pytest.mark.parametrize("options", [{"cache": 0.5, "store_precision": "int8"}, {}], ids=["int8", "decay"])
def test_such_tables_are_sharded_where_the_mode_is_chosen(options):
    optimizer = optim.SGD(lr=0.1, decay_scope="touched" if options else "table")
    tables = ShardedTables({"a": Table(40, 4)}, optimizer, mode="auto", **options)
    order = RankOrder(tables.mesh)
    front = ShardFront(FrontContext(tables.mesh, order), tables.groups[0], 0, 1.0, "fp32")
    room = ReplicaRoom(None, 40, 0, "hbm")
    assert choose_front("auto", front, tables.mesh, tables.groups[0], room) is front
