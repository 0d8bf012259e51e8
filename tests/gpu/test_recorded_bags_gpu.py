"""Law 1 on the recorded way for every kind of batch, on CUDA: graphs with a capacity, compiled transfers, caches that evict."""

import pytest
import torch

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.errors import IdError, ShapeError

pytestmark = pytest.mark.gpu
ROWS = {"a": 4000, "again": 4000, "b": 900, "c": 12000}
SIZES = [*([200] * 12), 77, 0, 1, 333, *([200] * 8), 250, *([90] * 10), *([40] * 10), 13]


def make(pooling="sum", dim=16, **cache):
    tables = {
        "ab": Table(4000, 16, pooling=pooling, features=("a", "again"), padding_id=7),
        "b": Table(900, 16, hashing=True),
        "c": Table(12000, dim, pooling=pooling),
    }
    return hotbed.EmbeddingTables(tables, optim.Adam(lr=0.1), device="cuda", output="concat", **cache)


def draw_ids(name, count, draw):
    return (torch.rand(count, generator=draw) ** 4 * ROWS[name]).long().cuda()


def jagged(name, size, draw, longest=9, weighted=False):
    offsets = torch.nn.functional.pad(torch.randint(0, longest, (size,), generator=draw).cumsum(0), (1, 0))
    count = int(offsets[-1])
    weights = torch.rand(count, generator=draw).cuda() if weighted else None
    return Jagged(draw_ids(name, count, draw), offsets.cuda(), weights)


def single(size, draw):
    return torch.stack([draw_ids(name, size, draw) for name in ROWS], dim=1)


def fixed(size, draw):
    return {name: draw_ids(name, size * n, draw).reshape(size, n) for name, n in zip(ROWS, (2, 1, 1, 40))}


def varying(size, draw):
    return {name: jagged(name, size, draw, longest) for name, longest in zip(ROWS, (9, 3, 2, 100))}


def mixed(size, draw):
    return {
        "a": draw_ids("a", size, draw),
        "again": draw_ids("again", 2 * size, draw).reshape(size, 2),
        "b": jagged("b", size, draw, weighted=True),
        "c": Jagged(*(part.int() for part in jagged("c", size, draw)[:2])),
    }


CACHES = {
    ("single", 16): 0.09,
    ("single", 24): 0.15,
    ("mixed", 16): 0.3,
}  # small enough that rows come back; others: 0.55
KINDS = {"single": single, "fixed": fixed, "varying": varying, "mixed": mixed}


def train(tables, loader):
    losses = []
    for batch in loader:
        vectors = tables(batch)
        loss = (vectors.tanh() + vectors).pow(2).mean() if vectors.numel() else vectors.sum()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def assert_same(plain, other, leaving_out=()):
    for name, value in plain.state_dict().items():
        assert name in leaving_out or torch.equal(value.cpu(), other.state_dict()[name].cpu()), name


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("dim", [16, 24])  # one group, and two
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(kind, pooling, dim, window):
    draw = torch.Generator().manual_seed(3)
    loader = [KINDS[kind](size, draw) for size in SIZES]
    plain = make(pooling, dim)
    plain.stop_recording()
    expected = train(plain, loader)
    resident = make(pooling, dim)
    assert train(resident, loader) == expected
    assert_same(plain, resident)
    for way in ("recorded", "eager"):
        cached = make(pooling, dim, cache=CACHES.get((kind, dim), 0.55))
        if way == "eager":
            cached.stop_recording(feeds=True)
        assert train(cached, hotbed.prefetch(loader, cached, window=window)) == expected, way
        assert_same(plain, cached)
        for group in cached.caches:
            group.cache.check_integrity()
        assert cached.counters().misses > cached.counters().created
        assert bool(cached.ownership.planners) is (way == "recorded")


def test_a_loader_on_the_host():
    """Batches are moved by the reader, and their memory is used again while plans are on their way."""
    draw = torch.Generator().manual_seed(5)
    loader = [varying(200, draw) for _ in range(40)]
    on_host = [{name: Jagged(*(part.cpu() for part in bag[:2])) for name, bag in batch.items()} for batch in loader]
    plain, cached = make("mean"), make("mean", cache=0.55)
    assert train(cached, hotbed.prefetch(on_host, cached)) == train(plain, loader)
    assert_same(plain, cached)


@pytest.mark.parametrize("wrong", ["id", "offsets"])
@pytest.mark.parametrize("cache", [{}, {"cache": 0.6}])
def test_what_is_wrong_is_reported_and_teaches_nothing(wrong, cache):
    draw = torch.Generator().manual_seed(7)
    loader = [varying(64, draw) for _ in range(20)]
    bag = loader[11]["c"]
    if wrong == "id":
        bag.values[5] = 12000
    else:
        bag.offsets[30] = bag.offsets[31] + 1
    tables = make(**cache)
    seen = []

    def go_on():
        for batch in hotbed.prefetch(loader, tables) if cache else loader:
            tables(batch).sum().backward()
            seen.append(batch)
        tables.state_dict()

    with pytest.raises(IdError if wrong == "id" else ShapeError, match="'c'"):
        go_on()
    del loader[11]
    expected = make()
    good = loader[: len(seen) if cache else 11]
    train_sum(expected, good)
    assert_same(expected, tables, () if cache else ("num_updates",))  # the one that was refused later counts
    go_on()


def train_sum(tables, loader):
    for batch in loader:
        tables(batch).sum().backward()
