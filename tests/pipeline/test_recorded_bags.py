"""Law 1 on the recorded way for every kind of batch: bags of fixed and varying length, samples that vary, caches that evict.

All batches replay recordings, here launch by launch under Triton's interpreter; none is planned the eager way.
"""

import importlib.util

import pytest
import torch

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.errors import IdError, ShapeError
from hotbed.pipeline.eager import EagerPlanner
from hotbed.types import Batch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton"),
    pytest.mark.usefixtures("lanes_on_cpu", "nothing_eager"),
]
ROWS = {"a": 120, "again": 120, "b": 50, "c": 90}  # by feature; two of them read one table
SIZES = [6, 6, 9, 0, 6, 1, 6, 3, 11, 6, 6, 2]  # an empty batch, one sample, more than the first, and the last is short


@pytest.fixture
def nothing_eager(monkeypatch, lanes_on_cpu):
    monkeypatch.setattr(EagerPlanner, "arrive", lambda *_: pytest.fail("a batch was planned launch by launch"))


def tables_of(pooling="sum", **cache):
    tables = {
        "ab": Table(120, 3, pooling=pooling, features=("a", "again"), padding_id=7),
        "b": Table(50, 3),
        "c": Table(90, 5, pooling=pooling),
    }
    return hotbed.EmbeddingTables(tables, optim.Adam(lr=0.1), output="concat", **cache)


def draw_ids(name, count, draw):
    return (torch.rand(count, generator=draw) ** 3 * ROWS[name]).long()


def jagged(name, size, draw, *, weighted=False):
    """Bags of 0 to 5 ids."""
    offsets = torch.nn.functional.pad(torch.randint(0, 6, (size,), generator=draw).cumsum(0), (1, 0))
    count = int(offsets[-1])
    weights = torch.rand(count, generator=draw) if weighted else None
    return Jagged(draw_ids(name, count, draw), offsets, weights)


def fixed(size, draw):
    """Bags of one to three ids, as many for every sample."""
    return {name: draw_ids(name, size * n, draw).reshape(size, n) for name, n in zip(ROWS, (2, 1, 1, 3))}


def varying(size, draw):
    return {name: jagged(name, size, draw) for name in ROWS}


def mixed(size, draw):
    """Bags with weights, one id, bags of two, bags of int32."""
    bag = jagged("c", size, draw)
    return {
        "a": draw_ids("a", size, draw),
        "again": draw_ids("again", 2 * size, draw).reshape(size, 2),
        "b": jagged("b", size, draw, weighted=True),
        "c": Jagged(bag.values.int(), bag.offsets.int()),
    }


def single(size, draw):
    return torch.stack([draw_ids(name, size, draw) for name in ROWS], dim=1)


def beside(size, draw):
    """A matrix of single ids, of which two features are not, as a loader yields it."""
    ids = torch.stack([draw_ids(name, size, draw) for name in ("a", "c")], dim=1)
    return Batch(torch.zeros(size), torch.zeros(size, 0), ids, {n: jagged(n, size, draw) for n in ("again", "b")})


KINDS = {"single": single, "fixed": fixed, "varying": varying, "mixed": mixed, "beside": beside}
SHARES = {
    "single": 0.2,
    "fixed": 0.35,
    "varying": 0.5,
    "mixed": 0.35,
    "beside": 0.35,
}  # what one batch needs, and little more


def look_up(tables, batch):
    return tables(batch.ids, batch.bags) if isinstance(batch, Batch) else tables(batch)


def train(tables, batches, **feed):
    losses = []
    for batch in hotbed.prefetch(batches, tables, **feed) if tables.caches else batches:
        vectors = look_up(tables, batch)
        loss = (vectors.tanh() + vectors).pow(2).sum()
        loss.backward()
        losses.append(loss.item())
    return losses


def assert_same(plain, cached):
    for name, value in plain.state_dict().items():
        assert torch.equal(value, cached.state_dict()[name]), name
    for group in cached.caches:
        group.cache.check_integrity()


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_whatever_a_batch_holds(kind, pooling):
    draw = torch.Generator().manual_seed(3)
    batches = [KINDS[kind](size, draw) for size in SIZES]
    plain, cached = tables_of(pooling), tables_of(pooling, cache=SHARES[kind])
    expected = train(plain, batches)
    assert train(cached, batches, window=1, look_ahead=4) == expected
    assert_same(plain, cached)
    counts = cached.counters()
    assert counts.batches == 2 * len(SIZES)  # two groups
    assert counts.misses > counts.created  # rows left and came back
    assert counts.evictions >= counts.windows


@pytest.mark.parametrize("budgets", [{"memory": "22KiB"}, {"cache": 0.5, "memory": 6880}], ids=["ssd", "tiers"])
@pytest.mark.parametrize("window", [1, 2])
def test_the_same_bits_over_an_ssd(tmp_path, window, budgets):
    """Plans are replayed, and the transfer thread moves the rows: from the ssd, or from memory above it."""
    draw = torch.Generator().manual_seed(19)
    batches = [varying(size, draw) for size in [*SIZES, *SIZES[::-1]]]
    plain = tables_of("mean")
    cached = tables_of("mean", ssd=f"{tmp_path}:16MiB", **budgets)
    expected = train(plain, batches)
    assert train(cached, batches, window=window, look_ahead=4) == expected
    assert_same(plain, cached)
    assert cached.counters().misses > cached.counters().created
    assert not any(group.is_compiled for group in cached.caches)


@pytest.mark.parametrize("window", [1, 3])
def test_windows_of_batches_of_many_sizes(window):
    """Sizes go up and down, so that recordings of several capacities take turns, and small batches get their own."""
    draw = torch.Generator().manual_seed(5)
    sizes = [2, 8, 1, 20, 3, 0, 2, 1, 1, 2, 1, 1, 1, 30, 2, 1, 7]
    batches = [varying(size, draw) for size in sizes]
    plain, cached = tables_of("mean"), tables_of("mean", cache=0.85)
    expected = train(plain, batches)
    assert train(cached, batches, window=window, look_ahead=6) == expected
    assert_same(plain, cached)
    (planner,) = cached.ownership.planners  # those of less capacity have gone
    assert planner.capacities[0].num_samples >= 30


def test_counts_are_those_of_the_eager_way(monkeypatch):
    """Padding is no lookup, no key and no use: hits, misses, evictions and lookups are the same."""
    draw = torch.Generator().manual_seed(7)
    batches = [varying(size, draw) for size in sorted(SIZES, reverse=True)]  # so that one planner holds all
    recorded = tables_of(cache=0.5)
    train(recorded, batches, window=2, look_ahead=5)
    monkeypatch.undo()
    eager = tables_of(cache=0.5)
    train(eager, batches, window=2, look_ahead=5)
    ours, theirs = (tables.counters()._replace(stall_seconds=0) for tables in (recorded, eager))
    assert ours == theirs


def test_evaluation_between_batches_replays_what_training_recorded():
    """Of other sizes, in the midst of training and after it; rows that are only read are not written back."""
    results = []
    for cache in ({}, {"cache": 0.6}):
        draw = torch.Generator().manual_seed(11)
        tables, found = tables_of(**cache), []

        def feed(batches, tables=tables, cache=cache):
            return hotbed.prefetch(batches, tables, window=1) if cache else batches

        for _ in range(2):
            for n, batch in enumerate(feed([varying(size, draw) for size in (5, 5, 4, 5, 2)])):
                loss = tables(batch).pow(2).sum()
                loss.backward()
                found.append(loss.item())
                if n == 2:
                    with torch.no_grad():
                        held = [varying(size, torch.Generator().manual_seed(1)) for size in (8, 3, 0)]
                        found += [tables(other).sum().item() for other in feed(held)]
            with torch.no_grad():
                found += [tables(other).sum().item() for other in feed([varying(4, draw)])]
        results.append((found, tables.state_dict()))
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name
    assert len(tables.ownership.planners) <= 3


def test_a_backward_that_comes_after_its_rows_were_moved():
    results = []
    for cache in ({}, {"cache": 0.5}):
        draw = torch.Generator().manual_seed(13)
        tables, found = tables_of("mean", **cache), []
        batches = [varying(size, draw) for size in (5, 5, 4, 5, 2)]
        for n, batch in enumerate(hotbed.prefetch(batches, tables, window=1) if cache else batches):
            loss = tables(batch).pow(2).sum()
            if n == 2:
                found.append(tables(varying(9, torch.Generator().manual_seed(2))).sum().item())
            loss.backward()
            found.append(loss.item())
        results.append((found, tables.state_dict()))
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name


@pytest.mark.parametrize("wrong", ["id", "offsets", "end"])
def test_what_is_wrong_in_a_bag_is_reported_at_its_turn(wrong):
    draw = torch.Generator().manual_seed(17)
    tables = tables_of(cache=0.6)
    batches = [varying(5, draw) for _ in range(9)]
    bag = batches[5]["c"]
    if wrong == "id":
        bag.values[0] = 90
    elif wrong == "offsets":
        bag.offsets[2] = bag.offsets[3] + 1
    else:
        bag.offsets[-1] += 1
    trained = []

    def go_on():
        for batch in hotbed.prefetch(batches, tables, window=1, look_ahead=3):
            tables(batch).sum().backward()
            trained.append(batch)

    with pytest.raises(IdError if wrong == "id" else ShapeError, match="'c'"):
        go_on()
    assert len(trained) in (3, 4, 5)
    batches = batches[6:]
    go_on()  # nothing is left of it
    for group in tables.caches:
        group.cache.check_integrity()
