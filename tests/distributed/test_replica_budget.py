"""Replicas are a part of hbm=: measured bytes stay within it, rows are those of one process, and what cannot fit is refused."""

import pytest
import torch
import torch.distributed as dist

from hotbed import EmbeddingTables, Table, optim, prefetch
from hotbed.errors import BudgetError, ConfigError
from hotbed.host.memory import parse_bytes
from hotbed.parallel.sharded import ShardedTables
from hotbed.tables.sizing.budget import Budgets, rooms_of
from tests.distributed.ranks import run_ranks
from tests.laws.test_budgets_hold import num_bytes, taken

ROWS, DIM, BATCH, STEPS, HBM = 3000, 4, 60, 24, 24 << 10
MODES = ("replicated", "all-reduce", "auto")


def ids_of(step, dynamic=False):
    """[BATCH, 1], the same on all ranks; a rank takes its part."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(ROWS, (BATCH, 1), generator=draw)
    return ids * 7**15 if dynamic else ids


def part_of(ids):
    rank, world = dist.get_rank(), dist.get_world_size()
    return ids[rank * BATCH // world : (rank + 1) * BATCH // world]


def on_device(tables):
    """Arrays of caches and of replicas; the store below is memory's."""
    stores = [group.residency.store for group in tables.groups]
    keyspaces = [group.keyspace for group in tables.groups]
    below = num_bytes(stores + keyspaces)
    replicas = [way._replicas for way in tables.ranks.replicated.values()]
    replicas += [way._replicated._replicas for way in tables.ranks._ways if hasattr(way, "_replicated")]
    arrays = 0
    for one in replicas:
        arrays += num_bytes(one.rows)
        if one._cache is not None:
            arrays += num_bytes([one._cache.index.cells, one._cache._slots, one._cache._victims])
        assert one.num_bytes >= arrays - 4096
    return taken(tables) - below + arrays


def trained(mode, dynamic):
    """(most bytes on the device, most replicas' bytes, ids and weights here, evictions)."""
    options = {"hbm": HBM, "memory": "64MiB", "gradients": "sum"}
    table = Table(None if dynamic else ROWS, DIM)
    tables = ShardedTables({"a": table}, optim.SGD(lr=0.5), mode=mode, **options)
    batches = [part_of(ids_of(step, dynamic)) for step in range(STEPS)]
    most = replicas = 0
    for ids in prefetch(batches, tables):
        tables(ids).square().sum().backward()
        most, replicas = max(most, on_device(tables)), max(replicas, tables.exchange.replica_bytes)
    ids, columns = tables.rows("a")
    return most, replicas, ids, columns["weight"], tables.counters().evictions


def in_all_modes(dynamic):
    return {mode: trained(mode, dynamic) for mode in MODES}


@pytest.mark.parametrize(("world", "dynamic"), [(2, True), (3, False)], ids=["dynamic", "preset"])
def test_bytes_stay_within_hbm_and_rows_are_those_of_one(world, dynamic):
    alone = EmbeddingTables({"a": Table(None if dynamic else ROWS, DIM)}, optim.SGD(lr=0.5), hbm="1MiB")
    for step in range(STEPS):
        alone(ids_of(step, dynamic)).square().sum().backward()
    ids, columns = alone.rows("a")
    weight = dict(zip(ids.tolist(), columns["weight"]))
    for result in run_ranks(in_all_modes, world, dynamic):
        for mode, (most, replicas, own, found, evictions) in result.items():
            assert 0 < replicas <= HBM // 2, mode
            assert most <= HBM, mode
            assert evictions > STEPS, mode
            expected = torch.stack([weight[one] for one in own.tolist()])
            assert (
                torch.equal(found, expected) if mode != "all-reduce" or world == 2 else torch.allclose(found, expected)
            )


def test_a_batch_that_does_not_fit_is_refused_on_all_ranks_and_the_way_out_works():
    for said, amount, is_same, is_usable in run_ranks(refused, 2):
        assert said.startswith("a batch of all ranks needs ")
        assert "rows of tables of dim 4 (a) at once, and hbm= has room for 64 replicas" in said
        assert "or mode='sharded' (parallel.mode), which has no replicas." in said
        assert is_usable
        assert is_same
        assert parse_bytes(amount, "hbm") < 64 << 10


def refused():
    hbm = 2 * 64 * (DIM * 4 + 80)
    tables = ShardedTables({"a": Table(ROWS, DIM)}, optim.SGD(lr=0.5), mode="replicated", hbm=hbm)
    few = torch.arange(20)[:, None] + 30 * dist.get_rank()
    many = torch.arange(50)[:, None] * 7 + dist.get_rank()
    before = tables(few).detach()
    with pytest.raises(BudgetError) as caught:
        tables(many)
    amount = str(caught.value).split("Give hbm='")[1].split("'")[0]
    larger = ShardedTables({"a": Table(ROWS, DIM)}, optim.SGD(lr=0.5), mode="replicated", hbm=amount)
    larger(many).sum().backward()
    return str(caught.value), amount, torch.equal(tables(few), before), larger.exchange.replica_bytes > 0


def test_ranks_with_different_budgets_have_as_many_replicas():
    first, second = run_ranks(by_own_budget, 2)
    assert first == second


def by_own_budget():
    tables = ShardedTables({"a": Table(ROWS, DIM)}, mode="replicated", hbm=HBM * (1 + dist.get_rank()))
    for step in range(4):
        tables(part_of(ids_of(step))).sum().backward()
    return tables.exchange.replica_bytes, next(iter(tables.ranks.replicated.values())).most_replicas


def test_rooms_leave_bytes_for_replicas():
    groups = [(1000, 64), (500, 128)]
    whole, shared = (rooms_of(Budgets(hbm="32KiB", replicas=share), groups, "cpu") for share in (0.0, 0.25))
    assert [room.replica_bytes for room in whole] == [None, None]
    cached = sum(room.num_slots * (record + 80) for room, (_, record) in zip(shared, groups))
    assert cached <= 24 << 10
    assert 8 << 10 >= sum(room.replica_bytes for room in shared) > (8 << 10) - 2
    assert cached + sum(room.replica_bytes for room in shared) > 0.97 * (32 << 10)
    with pytest.raises(ConfigError, match=r"hbm=150 does not hold.*150 bytes of hbm= are for replicas of rows"):
        rooms_of(Budgets(hbm=300, replicas=0.5), groups, "cpu")


PLACED = {
    "tables on single ranks": [Table(200, 4), Table(200, 8)],
    "next to dynamic ids": [Table(40, 4, placement="row"), Table(None, 8)],
    "next to dynamic ids, on one rank": [Table(40, 4), Table(None, 8, placement="row")],
}


@pytest.mark.parametrize("mode", MODES)
def test_replicas_are_of_the_rows_of_all_ranks(mode):
    """Whatever a rank has of a group itself: nothing, or all that a few rows need."""
    for tables in PLACED.values():
        alone = looked_up(EmbeddingTables(dict(zip("ab", tables)), optim.SGD(lr=0.5), hbm="1MiB"), 0, 1)
        ranks = run_ranks(placed_on_one, 2, tables, mode)
        for step, vectors in enumerate(alone):
            assert torch.equal(torch.cat([rank[step] for rank in ranks]), vectors)


def placed_on_one(tables, mode):
    given = {"hbm": "200KiB", "placement": "table", "gradients": "sum"}
    return looked_up(
        ShardedTables(dict(zip("ab", tables)), optim.SGD(lr=0.5), mode=mode, **given),
        dist.get_rank(),
        dist.get_world_size(),
    )


def looked_up(tables, rank, world):
    found = []
    for step in range(3):
        ids = (torch.arange(40)[:, None] + torch.tensor([0, step])).remainder(40)[
            rank * 40 // world : (rank + 1) * 40 // world
        ]
        vectors = tables({"a": ids[:, 0], "b": ids[:, 1]})
        sum(one.sum() for one in vectors.values()).backward()
        found.append(torch.cat([vectors["a"], vectors["b"]], dim=1).detach())
    return found


def test_a_share_that_cannot_be():
    with pytest.raises(
        ConfigError, match="replicas is the share of hbm= for replicas of rows, above 0 and below 1, not 1"
    ):
        ShardedTables({"a": Table(40, 4)}, replicas=1)
