"""Laws 1, 4 and 6 for tables on one rank, for columns of rows on all, and for all placements at once."""

import dataclasses
import re

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import ConfigError
from hotbed.parallel.sharded import ShardedTables, _check_once_by_row
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import FEATURES, OPTIMIZERS, STEPS, TABLES, alone, train

EVERY_ELEMENT = {  # optimizers that work by element
    "sgd": OPTIMIZERS["sgd"],
    "adagrad": OPTIMIZERS["adagrad"],
    "adam": optim.Adam(lr=0.1, l2=0.01, weight_decay=0.1),
    "ftrl": OPTIMIZERS["ftrl"],
    "by_count": optim.Adagrad(lr=0.1, scale_by_count=True),
}
PLACES = {
    "table": dict.fromkeys(TABLES, "table"),
    "column": dict.fromkeys(TABLES, "column"),
    "mixed": {"a": "row", "b": "table", "c": "column"},
    "mixed otherwise": {"a": "table", "b": "row", "c": "row"},
    "columns next to tables": {"a": "column", "b": "table", "c": "table"},
}


def placed(places):
    return {name: dataclasses.replace(table, placement=places[name]) for name, table in TABLES.items()}


def in_ranks(places, optimizers, rank_options, ahead=False):
    import torch.distributed as dist

    rank, world, results = dist.get_rank(), dist.get_world_size(), []
    for optimizer in optimizers.values():
        options = {"pooled": "never", **rank_options}
        tables = ShardedTables(placed(places), optimizer, seed=5, gradients="sum", output="dict", **options)
        result = train(tables, rank, world, ahead)
        for cache in tables.caches:
            cache.cache.check_integrity()
        results.append((*result, tables.counters()))
    return results


def expected_of(name, optimizers):
    if OPTIMIZERS.get(name) == optimizers[name]:
        return alone(name)
    return train(hotbed.EmbeddingTables(TABLES, optimizers[name], seed=5, output="dict"), 0, 1)


def whole_rows(results, name, placement):
    """(ids ascending, columns) of a table, from what every rank has of it."""
    parts = [result[1][name] for result in results]
    if placement == "column":
        ids = parts[0][0]
        assert all(torch.equal(ids, other) for other, _ in parts)
        dim = TABLES[name].dim
        assert all(columns["weight"].shape[1] == dim // len(parts) for _, columns in parts)
        columns = {}
        for column, first in parts[0][1].items():
            slices = [one[column] for _, one in parts]
            if first.shape[1] == dim // len(parts) and column != "step":
                columns[column] = torch.cat(slices, dim=1)
            else:
                assert all(torch.equal(first, one) for one in slices)
                columns[column] = first
        return ids, columns
    if placement == "table":
        assert sum(bool(ids.shape[0]) for ids, _ in parts) == 1, "one rank has all of it"
    ids = torch.cat([ids for ids, _ in parts])
    order = ids.argsort()
    return ids[order], {column: torch.cat([one[column] for _, one in parts])[order] for column in parts[0][1]}


def assert_as_one(results, expected, places):
    losses, rows = expected
    for step in range(STEPS):
        for name in FEATURES:
            assert torch.equal(torch.cat([result[0][step][name] for result in results]), losses[step][name])
    for name in TABLES:
        ids, columns = whole_rows(results, name, places[name])
        assert torch.equal(ids, rows[name][0])
        for column, value in rows[name][1].items():
            assert torch.equal(columns[column], value), (name, column)


def optimizers_for(places):
    return EVERY_ELEMENT if "column" in places.values() else OPTIMIZERS


def assert_each_as_one(world, places, rank_options, ahead=False):
    optimizers = optimizers_for(places)
    results = run_ranks(in_ranks, world, places, optimizers, rank_options, ahead)
    for n, name in enumerate(optimizers):
        assert_as_one([result[n] for result in results], expected_of(name, optimizers), places)
    return results


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_give_the_rows_of_one(world, places):
    assert_each_as_one(world, places, {})


@pytest.mark.parametrize(
    "places", [PLACES["table"], PLACES["mixed"], PLACES["column"]], ids=["table", "mixed", "column"]
)
def test_caches_that_evict(places):
    results = assert_each_as_one(2, places, {"cache": 0.1}, ahead=True)
    assert sum(one[2].written_back for result in results for one in result) > 100


def test_tiers(tmp_path):
    places, world = PLACES["mixed"], 2
    results = run_ranks(in_tiers, world, places, str(tmp_path))
    assert_as_one([result[0] for result in results], alone("adagrad"), places)


def in_tiers(places, folder):
    import torch.distributed as dist

    options = {"cache": 0.1, "memory": "256KiB", "ssd": f"{folder}/{dist.get_rank()}:32MiB"}
    return in_ranks(places, {"adagrad": OPTIMIZERS["adagrad"]}, options, True)


@pytest.mark.parametrize("places", [PLACES["table"], PLACES["column"]], ids=["table", "column"])
def test_bags_summed_by_their_only_owner_are_those_of_one(places):
    """A whole bag is summed in one place, so no partial sums round."""
    optimizers = {"adagrad": OPTIMIZERS["adagrad"]}
    results = run_ranks(in_ranks, 2, places, optimizers, {"pooled": "always"})
    assert_as_one([result[0] for result in results], alone("adagrad"), places)


@pytest.mark.parametrize("mode", ["replicated", "all-reduce", "auto"])
def test_tables_on_one_rank_in_all_modes(mode):
    optimizers = {"adagrad": OPTIMIZERS["adagrad"]}
    results = run_ranks(in_ranks, 2, PLACES["table"], optimizers, {"mode": mode})
    assert_as_one([result[0] for result in results], alone("adagrad"), PLACES["table"])


def test_columns_with_automatic_mode():
    optimizers = {"adagrad": OPTIMIZERS["adagrad"]}
    results = run_ranks(in_ranks, 2, PLACES["mixed"], optimizers, {"mode": "auto"})
    assert_as_one([result[0] for result in results], alone("adagrad"), PLACES["mixed"])


BUDGET = 64 << 10


@pytest.mark.parametrize(
    "places", [PLACES["table"], PLACES["mixed"], PLACES["column"]], ids=["table", "mixed", "column"]
)
def test_budgets_hold(places):
    for device_bytes, slots, rows in run_ranks(bytes_of, 2, places):
        assert device_bytes <= BUDGET
        assert slots < rows, "the cache holds everything, so this shows nothing"


def bytes_of(places):
    import torch.distributed as dist

    tables = ShardedTables(placed(places), OPTIMIZERS["adagrad"], output="dict", hbm=BUDGET, gradients="sum")
    train(tables, dist.get_rank(), dist.get_world_size())
    groups = [group for group in tables.groups if group.num_rows > 1]
    return (
        sum(group.num_bytes for group in tables.groups),
        sum(group.num_slots for group in groups),
        sum(group.num_rows for group in groups),
    )


def test_the_largest_tables_are_on_different_ranks():
    tables = {name: Table(rows, 4, placement="table") for name, rows in zip("abcde", (900, 500, 400, 300, 30))}
    (here, sizes), (there, others) = run_ranks(tables_of_rank, 2, tables)
    assert (here, there) == (["a", "d"], ["b", "c", "e"])  # a | b | c to b | d to a (900 = 900) | e
    assert (sizes, others) == ([1200], [930])


def tables_of_rank(tables):
    made = ShardedTables(tables)
    return [name for name in tables if made.ids(name).shape[0]], [group.num_rows for group in made.groups]


def dynamic(placement):
    return {name: Table(None, 4, placement=placement) for name in ("user", "item", "site")}


def in_dynamic_ranks(placement):
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    tables = ShardedTables(dynamic(placement), optim.Adagrad(lr=0.1), seed=5, gradients="sum", hbm="1MiB")
    return train_dynamic(tables, rank, world)


def train_dynamic(tables, rank, world):
    outs = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 60, [24, 3], generator=generator) * 1_000_003 - (1 << 50)
        part = ids[rank * 24 // world : (rank + 1) * 24 // world]
        out = tables(part)
        out.sum().backward()
        outs.append(out.detach())
    return outs, {name: tables.rows(name) for name in tables.tables}


def test_dynamic_ids_on_one_rank():
    alone_tables = hotbed.EmbeddingTables(dynamic(None), optim.Adagrad(lr=0.1), seed=5, hbm="1MiB")
    outs, rows = train_dynamic(alone_tables, 0, 1)
    results = run_ranks(in_dynamic_ranks, 2, "table")
    for step, expected in enumerate(outs):
        assert torch.equal(torch.cat([result[0][step] for result in results]), expected)
    owned = [[name for name in rows if result[1][name][0].shape[0]] for result in results]
    assert sorted(map(len, owned)) == [1, 2]  # three tables on two ranks
    for name, (ids, columns) in rows.items():
        found = next(result[1][name] for result in results if result[1][name][0].shape[0])
        assert torch.equal(found[0], ids)
        assert all(torch.equal(found[1][column], value) for column, value in columns.items())


@pytest.mark.parametrize(
    ("table", "options", "match"),
    [
        (Table(9, 4, placement="rows"), {}, "placement must be one of 'row', 'table', 'column', not 'rows'"),
        (Table(9, 4), {"placement": "all"}, "placement must be one of 'row', 'table', 'column', not 'all'"),
        (Table(9, 5, placement="column"), {}, "2 does not divide dim=5"),
        (Table(None, 4, placement="column"), {"hbm": "1MiB"}, r"dynamic ids \(rows=None\)"),
        (
            Table(9, 4, placement="column", optimizer=optim.RowwiseAdagrad()),
            {},
            r"rowwise_adagrad needs the mean square.*works by element \(sgd, adagrad, adam, ftrl\)",
        ),
        (Table(9, 4, placement="column", optimizer=optim.SGD(clip_norm=1.0)), {}, "clip_norm=1 needs the norm"),
        (Table(9, 4, placement="column", precision="bf16"), {}, "precision='bf16' rounds an element"),
        (Table(9, 4), {"placement": "column", "cache": 0.5, "store_precision": "int8"}, "store_precision='int8'"),
        (Table(9, 4), {"placement": "column", "mode": "replicated"}, "keeps copies of whole rows"),
    ],
    ids=["word", "words of all", "dim", "dynamic", "rowwise", "clip", "16 bits", "int8", "replicas"],
)
def test_what_cannot_be_placed_is_refused(table, options, match):
    for error in run_ranks(refused, 2, table, options):
        assert re.search(match, error), error


def refused(table, options):
    try:
        ShardedTables({"a": table}, optim.Adagrad(), **options)
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_one_process_ignores_it():
    tables = hotbed.EmbeddingTables({"a": Table(9, 5, placement="column"), "b": Table(9, 5, placement="table")})
    assert len(tables.groups) == 1
    assert tables.weight("a").shape == (9, 5)


def test_rows_once_per_node_need_tables_by_row():
    with pytest.raises(ConfigError, match="needs placement='row' for all tables, and a by table is not"):
        _check_once_by_row(True, {"a": Table(10, 4), "b": Table(10, 4, placement="row")}, "table")
    _check_once_by_row(True, {"a": Table(10, 4, placement="row")}, "table")
    _check_once_by_row(False, {"a": Table(10, 4)}, "column")
