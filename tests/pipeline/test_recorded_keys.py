"""Law 1 where a recording takes keys that were made before: dynamic ids, sequences, weights that want a gradient.

Plans are replayed, here launch by launch under Triton's interpreter; none is made the eager way.
"""

import importlib.util

import pytest
import torch

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.errors import IdError, ShapeError
from hotbed.ids import Admit, Expire
from hotbed.pipeline.eager import EagerPlanner

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton"),
    pytest.mark.usefixtures("lanes_on_cpu", "nothing_eager"),
]
SIZES = [6, 6, 9, 0, 6, 1, 6, 3, 11, 6, 6, 2]


@pytest.fixture
def nothing_eager(monkeypatch, lanes_on_cpu):
    monkeypatch.setattr(EagerPlanner, "arrive", lambda *_: pytest.fail("a batch was planned launch by launch"))


def jagged(size, draw, most, *, weighted=False):
    offsets = torch.nn.functional.pad(torch.randint(0, 6, (size,), generator=draw).cumsum(0), (1, 0))
    count = int(offsets[-1])
    weights = torch.rand(count, generator=draw).requires_grad_() if weighted else None
    return Jagged((torch.rand(count, generator=draw) ** 3 * most).long(), offsets, weights)


def run(tables, batches, feed):
    """Losses, and the gradients of weights."""
    found = []
    for batch in batches if feed is None else hotbed.prefetch(batches, tables, **feed):
        vectors = tables(batch)
        parts = vectors.values() if isinstance(vectors, dict) else [vectors]
        loss = sum(((part.tanh() + part).pow(2).sum() for part in parts), torch.zeros(()))
        loss.backward()
        found.append(loss.item())
        for bag in batch.values() if isinstance(batch, dict) else ():
            if isinstance(bag, Jagged) and bag.weights is not None:
                found.append(bag.weights.grad.clone())
                bag.weights.grad = None
    return found


def assert_alike(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("window", [1, 2])
def test_sequences_and_weights_with_a_gradient(window):
    def make(**cache):
        tables = {"a": Table(120, 3, pooling="none"), "b": Table(90, 3, pooling="mean"), "c": Table(60, 5)}
        return hotbed.EmbeddingTables(tables, optim.Adam(lr=0.1), output="dict", **cache)

    draw = torch.Generator().manual_seed(1)
    batches = [
        {"a": jagged(n, draw, 120), "b": jagged(n, draw, 90), "c": jagged(n, draw, 60, weighted=True)} for n in SIZES
    ]
    plain, cached = make(), make(cache=0.45)
    assert_alike(run(cached, batches, {"window": window, "look_ahead": 4}), run(plain, batches, None))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, cached.state_dict()[name]), name
    assert cached.counters().misses > cached.counters().created
    for group in cached.caches:
        group.cache.check_integrity()


@pytest.mark.parametrize("rules", [{}, {"admit": Admit(after=2)}, {"expire": Expire(unused_steps=6, every=3)}])
@pytest.mark.parametrize("window", [1, 2])
def test_dynamic_ids(window, rules):
    """Ids that come and go, in training and in evaluation between batches; the plain loop waits for every batch."""
    results = []
    for feed in (None, {"window": window, "look_ahead": 4}):
        tables = hotbed.EmbeddingTables(
            {"a": Table(None, 3, **rules), "b": Table(None, 3)}, optim.Adam(lr=0.1), hbm="14KiB", memory="4MiB"
        )
        draw, found = torch.Generator().manual_seed(2), []
        for number in range(2):
            loader = [
                (torch.rand(n, 2, generator=draw) ** 3 * 150).long() * 7919 + 10**12 + 40 * k
                for k, n in enumerate(SIZES)
            ]
            found += run(tables, loader, feed)
            with torch.no_grad():
                held = [ids.clone() for ids in loader[:3]]
                fed = held if feed is None else hotbed.prefetch(held, tables, **feed)
                found += [tables(ids).sum().item() for ids in fed]
            if number == 0:
                found += run(tables, loader[:4], None)  # without a feed, in between
        rows = {name: tables.rows(name) for name in ("a", "b")}
        results.append((found, rows, tables.id_counts()))
        assert tables.counters().evictions > 0
        for group in tables.caches:
            group.cache.check_integrity()
    assert_alike(results[0][0], results[1][0])
    for name, (ids, columns) in results[0][1].items():
        other_ids, others = results[1][1][name]
        assert torch.equal(ids, other_ids)
        for column, value in columns.items():
            assert torch.equal(value, others[column]), (name, column)
    assert results[0][2] == results[1][2]


def test_what_is_wrong_is_reported_at_its_turn():
    tables = hotbed.EmbeddingTables({"a": Table(40, 3, pooling="none")}, optim.SGD(lr=0.1), cache=0.5)
    draw = torch.Generator().manual_seed(3)
    for wrong, error in ((IdError, IdError), (ShapeError, ShapeError)):
        batches = [{"a": jagged(4, draw, 40)} for _ in range(8)]
        bag = jagged(4, draw, 40)
        if wrong is IdError:
            bag.values[0] = 40
        else:
            bag.offsets[2] = bag.offsets[3] + 1
        batches[5] = {"a": bag}
        with pytest.raises(error, match="'a'"):
            run(tables, batches, {"window": 1, "look_ahead": 3})
    assert len(run(tables, batches[:5], {"window": 1, "look_ahead": 3})) == 5
    tables.caches[0].cache.check_integrity()
