"""Ids that must be admitted, in ranks: rows, shared rows and counts are those of one process on the same global batches."""

import functools

import pytest
import torch

import hotbed
from hotbed import Admit, Expire, Table, optim
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import BATCH, borders

TABLES = {
    "u": Table(None, 4, padding_id=7, admit=Admit(after=3), expire=Expire(unused_steps=4, every=2)),
    "v": Table(None, 4),
    "w": Table(None, 4, admit=Admit(probability=0.2), expire=Expire(score_below=0.5, half_life=2, every=3)),
    "x": Table(None, 4, admit=Admit(after=1000)),  # nobody ever is
}
STEPS, HALF = 14, 7
OPTIMIZERS = {
    "adagrad": optim.Adagrad(lr=0.1),
    "by_count": optim.Adagrad(lr=0.1, scale_by_count=True),
    "adam": optim.Adam(lr=0.1, l2=0.01, clip_norm=4.0),  # moves rows whose gradient is zero, if they are in the batch
}


def batch_of(step):
    """The shared rows of u and w rest in some batches; sums of gradients are exact in any order."""
    generator = torch.Generator().manual_seed(step)
    ids = (torch.rand(BATCH, 4, generator=generator) ** 2 * 60).long() * torch.tensor([-7046029254386353131, 1, 3, 1])
    ids[::5, 0] = 7
    if step % 4 == 3:
        ids[:, 0] = 7
    return ids, torch.randint(-8, 9, [BATCH, 4, 4], generator=generator) / 4


def train(tables, rank, world, steps, ahead=False):
    batches = []
    for step in steps:
        cut = borders(world, step)
        batches.append(tuple(part[cut[rank] : cut[rank + 1]] for part in batch_of(step)))
    vectors = []
    for number, (ids, weights) in enumerate(hotbed.prefetch(batches, tables) if ahead else batches):
        found = tables(ids)
        (found * weights).sum().backward()
        vectors.append(found.detach())
        if number == 4:
            with torch.no_grad():
                tables.eval()
                vectors.append(tables(torch.tensor([[5, 6, 9, 2], [7, 8, 3, 1]])))  # the same on every rank
                tables.train()
    return vectors


def state_of(tables):
    rows = {name: tables.rows(name) for name in TABLES}
    return rows, {name: tables.shared_row(name) for name in TABLES}, tables.id_counts()


def one_process(optimizer):
    return hotbed.EmbeddingTables(TABLES, OPTIMIZERS[optimizer], hbm="1MiB", memory="64MiB", seed=3)


@functools.cache
def alone(optimizer):
    tables = one_process(optimizer)
    return train(tables, 0, 1, range(STEPS)), state_of(tables)


def in_ranks(optimizer, ahead, options):
    import torch.distributed as dist

    tables = ShardedTables(TABLES, OPTIMIZERS[optimizer], memory="64MiB", gradients="sum", seed=3, **options)
    vectors = train(tables, dist.get_rank(), dist.get_world_size(), range(STEPS), ahead)
    return vectors, state_of(tables), tables.counters()


def assert_same_state(ranks, expected):
    rows, shared, counts = expected
    for name in TABLES:
        ids = torch.cat([found[name][0] for found, _, _ in ranks])
        assert torch.equal(ids.sort().values, rows[name][0]), name
        for column, value in rows[name][1].items():
            found = torch.cat([own[name][1][column] for own, _, _ in ranks])
            assert torch.equal(found[ids.argsort()], value), (name, column)
        for _, own, _ in ranks:
            assert (own[name] is None) == (shared[name] is None)
            for column, value in (shared[name] or {}).items():
                assert torch.equal(own[name][column], value), (name, column)
        for part, count in counts[name]._asdict().items():
            assert sum(getattr(own[name], part) for _, _, own in ranks) == count, (name, part)


def test_the_batches_are_worth_testing():
    _, (_, _, counts) = alone("adagrad")
    assert min(counts["u"][:3]) > 20
    assert min(counts["w"]) > 10
    assert counts["u"].expired > 5
    assert (counts["x"].admitted, counts["v"].rejected) == (0, 0)


@pytest.mark.parametrize(
    ("world", "optimizer", "ahead", "options"),
    [
        (2, "adam", False, {"hbm": "5KiB"}),
        (2, "adagrad", True, {"hbm": "8KiB", "mode": "replicated"}),
        (3, "adagrad", False, {"hbm": "8KiB", "mode": "auto"}),
        (3, "adam", True, {"hbm": "4KiB"}),
        (2, "by_count", False, {"hbm": "4KiB"}),
    ],
)
def test_ranks_give_the_rows_of_one(world, optimizer, ahead, options):
    vectors, state = alone(optimizer)
    results = run_ranks(in_ranks, world, optimizer, ahead, options)
    for step, expected in enumerate(vectors):
        parts = [found[step] for found, _, _ in results]
        assert torch.equal(parts[0] if step == 5 else torch.cat(parts), expected), step
    assert_same_state([found for _, found, _ in results], state)
    assert all(counts.written_back > 5 for _, _, counts in results)


def saved(optimizer):
    """The first half in two ranks: what a checkpoint holds."""
    import torch.distributed as dist

    tables = ShardedTables(TABLES, OPTIMIZERS[optimizer], hbm="6KiB", gradients="sum", seed=3)
    train(tables, dist.get_rank(), dist.get_world_size(), range(HALF))
    with tables.snapshot() as snapshot:
        parts = [part._replace(columns={k: v.clone() for k, v in part.columns.items()}) for part in snapshot.parts()]
        return parts, snapshot.rest()


def goes_on(optimizer, ranks):
    """The second half in another number of ranks."""
    import torch.distributed as dist

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tables = ShardedTables(TABLES, OPTIMIZERS[optimizer], hbm="6KiB", gradients="sum", seed=3)
    if world == 1:
        tables = one_process(optimizer)
    sink = tables.restore()
    sink.begin()
    for part in (part for parts, _ in ranks for part in parts):
        sink.add(part._replace(columns={name: one for name, one in part.columns.items() if name != "row"}))
    sink.rest_of_ranks([rest for _, rest in ranks])
    sink.end()
    train(tables, rank, world, range(HALF, STEPS))
    return state_of(tables)


def test_another_number_of_ranks_continues_with_those_who_wait_and_last_uses():
    ranks = run_ranks(saved, 2, "adam")
    _, state = alone("adam")
    assert_same_state([goes_on("adam", ranks)], state)
    assert_same_state(run_ranks(goes_on, 3, "adam", ranks), state)


def sketched(ranks):
    """Ids seen twice by two ranks, in a sketch; then the third time by others."""
    import torch.distributed as dist

    tables = ShardedTables(
        {"u": Table(None, 4, admit=Admit(after=3, sketch="64KiB"))}, hbm="64KiB", gradients="sum", seed=3
    )
    if ranks:
        sink = tables.restore()
        sink.begin()
        sink.rest_of_ranks([rest for _, rest in ranks])
        sink.end()
    ids = torch.arange(40)[:, None] * 97 + dist.get_rank()
    for _ in range(1 if ranks else 2):
        tables(ids).sum().backward()
    with tables.snapshot() as snapshot:
        return int(tables.id_counts()["u"].admitted), snapshot.rest()


def test_no_count_of_a_sketch_is_too_low_in_another_number_of_ranks():
    ranks = run_ranks(sketched, 2, [])
    assert [admitted for admitted, _ in ranks] == [0, 0]
    ids = {number * 97 + rank for rank in range(2) for number in range(40)}
    assert sum(admitted for admitted, _ in run_ranks(sketched, 3, ranks)) >= len(ids)
