"""Law 1 where the reader thread works on dynamic ids ahead of time: matrices, bags, groups of both kinds, ids that come and go.

Plans are replayed, here launch by launch under Triton's interpreter; keys come from maps, none is made when a batch arrives.
"""

import importlib.util

import numpy as np
import pytest
import torch

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.errors import ShapeError
from hotbed.ids import Admit, Expire
from hotbed.ops.inputs import LENGTH, OFFSETS, SPAN
from hotbed.pipeline.batches import IdFinder
from hotbed.pipeline.encodings import NARROW, WIDE, KeyEncoding, MapEncoding
from hotbed.pipeline.ids_ahead import IdReader, _offsets_rise
from hotbed.tables.group.ahead import IdsAhead
from hotbed.tables.group.cached import CachedRows

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton"),
    pytest.mark.usefixtures("lanes_on_cpu"),
]
SIZES = [6, 6, 9, 0, 6, 1, 6, 3, 11, 6]


@pytest.fixture
def widths(monkeypatch):
    """The keys of every batch that was prepared."""
    found = []
    prepare = MapEncoding.prepare
    monkeypatch.setattr(
        MapEncoding, "prepare", lambda self, *given: found.append(self.kinds[0]) or prepare(self, *given)
    )
    monkeypatch.setattr(KeyEncoding, "prepare", lambda *_: pytest.fail("keys were made when a batch arrived"))
    return found


def jagged(size, draw, most, *, weighted=False):
    offsets = torch.nn.functional.pad(torch.randint(0, 5, (size,), generator=draw).cumsum(0), (1, 0))
    count = int(offsets[-1])
    weights = torch.rand(count, generator=draw) if weighted else None
    return Jagged((torch.rand(count, generator=draw) ** 3 * most).long() * 7919 - 3, offsets, weights)


def matrices(draw, width):
    return [(torch.rand(n, width, generator=draw) ** 3 * 90).long() * 7919 + 10**12 + k for k, n in enumerate(SIZES)]


def bags(draw):
    return [
        {
            "a": jagged(n, draw, 60),
            "b": jagged(n, draw, 40),
            "c": jagged(n, draw, 9, weighted=True),
            "d": torch.arange(n),
        }
        for n in SIZES
    ]


def train(tables, batches, feed, *, between=False):
    found = []
    for number, batch in enumerate(batches if feed is None else hotbed.prefetch(batches, tables, **feed)):
        vectors = tables(batch)
        parts = vectors.values() if isinstance(vectors, dict) else [vectors]
        loss = sum(((part.tanh() + part).pow(2).sum() for part in parts), torch.zeros(()))
        # rows are moved before the update; ids ahead are set aside, and taken back when somebody asks again
        for _ in range(number % 3 if between else 0):
            with torch.no_grad():
                seen = tables(batches[0])
            found.append(sum(part.sum().item() for part in (seen.values() if isinstance(seen, dict) else [seen])))
        loss.backward()
        found.append(loss.item())
    return found


def result_of(make, batches, feed, **how):
    tables = make()
    found = train(tables, batches, feed, **how)
    with torch.no_grad():
        held = batches[:3] if feed is None else hotbed.prefetch(batches[:3], tables, **feed)
        for batch in held:
            vectors = tables(batch)
            found += [part.sum().item() for part in (vectors.values() if isinstance(vectors, dict) else [vectors])]
    found += train(tables, batches[:4], feed)
    rows = {name: tables.rows(name) for name in tables.tables}
    for group in tables.caches:
        group.cache.check_integrity()
    return found, rows, tables.id_counts()


def assert_alike(ours, theirs):
    assert ours[0] == theirs[0]
    assert ours[2] == theirs[2]
    for name, (ids, columns) in theirs[1].items():
        assert torch.equal(ours[1][name][0], ids), name
        for column, value in columns.items():
            assert torch.equal(ours[1][name][1][column], value), (name, column)


RULES = [
    {},
    {"admit": Admit(after=2), "padding_id": 10**12},
    {"expire": Expire(unused_steps=4, every=2)},
]


@pytest.mark.parametrize("rules", RULES)
def test_matrices_of_ids_in_tables_that_share_features(widths, rules, monkeypatch):
    """Keys fit into 32 bits where rows learn; ids that nobody knows in an evaluation have wide ones."""

    def make():
        return hotbed.EmbeddingTables(
            {"a": Table(None, 3, features=("x", "y"), **rules), "b": Table(None, 3)},
            optim.Adam(lr=0.1), hbm="14KiB", memory="4MiB",
        )  # fmt: skip

    batches = matrices(torch.Generator().manual_seed(1), 3)
    feed = {"window": 2, "look_ahead": 4}
    moved, create = [], CachedRows._create
    monkeypatch.setattr(CachedRows, "_create", lambda self, *given: moved.append(1) or create(self, *given))
    assert_alike(result_of(make, batches, feed, between=True), result_of(make, batches, None, between=True))
    assert moved, "compiled code moved rows, and new ones were created"
    assert {NARROW, WIDE} == set(widths)
    assert widths.count(NARROW) > len(batches) + 4, "some are taken back, and settled again"


def test_bags_beside_groups_of_preset_keys(widths):
    def make():
        tables = {
            "a": Table(None, 3, pooling="mean", padding_id=-3),
            "b": Table(None, 5),
            "c": Table(None, 3),
            "d": Table(40, 4),
        }
        return hotbed.EmbeddingTables(tables, optim.Adam(lr=0.1), output="dict", hbm="40KiB", memory="8MiB")

    batches = bags(torch.Generator().manual_seed(2))
    feed = {"window": 2, "look_ahead": 4}
    assert_alike(result_of(make, batches, feed, between=True), result_of(make, batches, None, between=True))
    assert widths


def test_ids_that_are_known_need_no_copy(widths, monkeypatch):
    """The second time all ids are known when they are read, and maps stay as they are."""
    tables = hotbed.EmbeddingTables({"a": Table(None, 3)}, optim.SGD(lr=0.1), hbm="14KiB", memory="4MiB")
    batches = [torch.arange(k, k + 8).reshape(8, 1) for k in (0, 4, 8)]
    train(tables, batches, {"window": 1})
    found = []
    settle = IdsAhead.settle

    def settled(self, translate):
        before = self.map.clone()
        settle(self, translate)
        found.append(torch.equal(before, self.map))

    monkeypatch.setattr(IdsAhead, "settle", settled)
    train(tables, batches, {"window": 1})
    assert found == [True] * 3


@pytest.mark.parametrize(
    ("offsets", "length", "good"),
    [
        ([0, 2, 2, 5], 5, True),
        ([0, 3, 2, 5], 5, False),
        ([0, 2, 6, 5], 5, False),
        ([1, 2, 2, 5], 5, False),
        ([0, 2, 2, 5], 6, False),
    ],
)
def test_offsets_rise_from_0_to_the_number_of_values(offsets, length, good):
    memory = torch.tensor([9, 9, 9, *offsets])  # what stands before them does not count
    spans = np.zeros((2, SPAN), dtype=np.int64)
    spans[1, OFFSETS], spans[1, LENGTH] = memory[3:].data_ptr(), length
    assert _offsets_rise(spans, len(offsets) - 1) == good


def test_offsets_that_fall_teach_nothing():
    tables = hotbed.EmbeddingTables({"a": Table(None, 3)}, optim.SGD(lr=0.1), hbm="14KiB", memory="4MiB")
    draw = torch.Generator().manual_seed(3)
    batches = [{"a": jagged(4, draw, 40)} for _ in range(6)]
    batches[4]["a"].offsets[2] = batches[4]["a"].offsets[3] + 1
    trained = []
    with pytest.raises(ShapeError, match="'a'"):
        train(tables, (trained.append(batch) or batch for batch in ahead(batches, tables)), None)
    assert 0 < len(trained) <= 4
    plain = hotbed.EmbeddingTables({"a": Table(None, 3)}, optim.SGD(lr=0.1), hbm="14KiB", memory="4MiB")
    train(plain, trained, None)
    assert tables.id_counts() == plain.id_counts()


def ahead(batches, tables):
    return hotbed.prefetch(batches, tables, window=1, look_ahead=2)


def test_ids_that_were_written_to_after_they_were_read():
    tables = hotbed.EmbeddingTables({"a": Table(None, 3)}, optim.SGD(lr=0.1), hbm="14KiB", memory="4MiB")
    ids = torch.arange(8).reshape(8, 1)
    find = IdFinder(["a"])
    ahead = IdReader(tables, find).read(ids, ids)
    assert ahead.is_of(find(ids))
    assert not ahead.is_of(find(ids.clone()))
    ids.add_(100)
    assert not ahead.is_of(find(ids))
