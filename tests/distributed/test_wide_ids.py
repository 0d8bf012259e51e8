"""Ids out of 10^11: a budget of kilobytes holds what a batch needs, and rows are those of a dense table of the ids met."""

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import ConfigError
from hotbed.ops.init_rows import init_rows, stream_of
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks

IDS, STEPS, BATCH, DIM, SEED = 10**11, 40, 96, 8, 7
NAMES = ("user", "item")
OPTIMIZER = optim.Adagrad(lr=0.1)
HBM, MEMORY = 48 << 10, 1 << 20


def batches():
    """Half of the ids come from a hundred that return, the others from all."""
    generator = torch.Generator().manual_seed(3)
    hot = torch.randint(0, IDS, [100, 2], generator=generator)
    for _ in range(STEPS):
        ids = torch.randint(0, IDS, [BATCH, 2], generator=generator)
        again = torch.randint(0, 100, [BATCH // 2], generator=generator)
        ids[: BATCH // 2] = hot[again]
        yield (
            ids[torch.randperm(BATCH, generator=generator)],
            torch.randint(-8, 9, [BATCH, 2, DIM], generator=generator) / 4,
        )


def train(tables, rank=0, world=1, rows_of=lambda ids: ids, ahead=False):
    cut = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    given = [(rows_of(ids)[cut], weights[cut]) for ids, weights in batches()]
    vectors = []
    for ids, weights in hotbed.prefetch(given, tables) if ahead else given:
        out = tables(ids)
        (out * weights).sum().backward()
        vectors.append(out.detach())
    return vectors


@pytest.fixture(scope="module")
def dense():
    """Vectors and rows of plain tables with a row for each id that is met, as it begins among 10^11."""
    met = [torch.cat([ids[:, n] for ids, _ in batches()]).unique() for n in range(2)]
    tables = hotbed.EmbeddingTables({name: Table(len(ids), DIM) for name, ids in zip(NAMES, met)}, OPTIMIZER)
    for name, ids in zip(NAMES, met):
        first = torch.empty(len(ids), DIM)
        init_rows(first, ids, stream_of(SEED, name), Table(None, DIM).init)
        tables.load_weight(name, first)

    def rows_of(ids):
        return torch.stack([torch.searchsorted(met[n], ids[:, n].contiguous()) for n in range(2)], dim=1)

    vectors = train(tables, rows_of=rows_of)
    return vectors, {name: (ids, tables.rows(name)[1]) for name, ids in zip(NAMES, met)}


def wide(kind, **options):
    return kind({name: Table(None, DIM) for name in NAMES}, OPTIMIZER, seed=SEED, hbm=HBM, **options)


def check_budget(tables):
    """The cache does not hold all rows, and keeps to its bytes; so does what is below."""
    (group,) = tables.groups
    assert group.num_slots < group.keyspace.num_used
    assert group.num_bytes <= HBM
    if (found := tables.tiers()) is not None:
        assert found.sizes.memory_bytes <= MEMORY
    else:
        assert group.keyspace.index_bytes + group.keyspace.num_used * (group.layout.width * 4 + 1) <= MEMORY
    group.cache.check_integrity()


def assert_rows(parts, expected):
    for name, (ids, columns) in expected.items():
        found = torch.cat([rows[name][0] for rows in parts])
        order = found.argsort()
        assert torch.equal(found[order], ids)
        for column, value in columns.items():
            assert torch.equal(torch.cat([rows[name][1][column] for rows in parts])[order], value), (name, column)


@pytest.mark.parametrize("ahead", [False, True], ids=["as asked", "ahead"])
@pytest.mark.parametrize("where", ["memory", "ssd"])
def test_one_rank(dense, tmp_path, where, ahead):
    below = {"memory": MEMORY} | ({"ssd": f"{tmp_path}/ssd:64MiB"} if where == "ssd" else {})
    tables = wide(hotbed.EmbeddingTables, **below)
    for found, expected in zip(train(tables, ahead=ahead), dense[0]):
        assert torch.equal(found, expected)
    check_budget(tables)
    assert_rows([{name: tables.rows(name) for name in NAMES}], dense[1])


@pytest.mark.parametrize("placement", ["row", "table"])
def test_two_ranks(dense, placement):
    results = run_ranks(in_ranks, 2, placement)
    for step, expected in enumerate(dense[0]):
        assert torch.equal(torch.cat([vectors[step] for vectors, _ in results]), expected)
    assert_rows([rows for _, rows in results], dense[1])


def in_ranks(placement):
    import torch.distributed as dist

    tables = wide(ShardedTables, memory=MEMORY, gradients="sum", placement=placement)
    vectors = train(tables, dist.get_rank(), dist.get_world_size(), ahead=True)
    check_budget(tables)
    return vectors, {name: tables.rows(name) for name in NAMES}


def test_numbered_rows_beyond_32_bits_in_one_group():
    """Each table has fewer than 2^32 rows, their keys do not."""
    rows = (1 << 32) - 1
    ids = torch.tensor([[0, rows - 1], [rows - 1, 0], [5, 6], [5, rows - 1]])
    tables = hotbed.EmbeddingTables({name: Table(rows, 4) for name in NAMES}, OPTIMIZER, seed=SEED, hbm="1KiB")
    small = hotbed.EmbeddingTables({name: Table(None, 4) for name in NAMES}, OPTIMIZER, seed=SEED, hbm="64KiB")
    for some in [*ids.split(2), *ids.split(1)]:
        found, expected = tables(some), small(some)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()


def test_numbered_rows_beyond_32_bits_in_one_table_are_refused():
    with pytest.raises(ConfigError, match=r"2\^32 rows or more: a \(100,000,000,000\).*Give rows=None.*hashing=True"):
        hotbed.EmbeddingTables({"a": Table(IDS, 4)}, hbm="1MiB")
