"""verify: nothing to find in tables as they are, and every injected bit found and named."""

import pytest
import torch
from torch import nn

import hotbed
from hotbed import Table, optim
from hotbed.testing import assert_cache_invisible
from hotbed.verify import PLACES, TwinStorage, inject, verify

TABLES = {"user": Table(400, 8), "ad": Table(300, 8), "place": Table(200, 4)}
STEPS = 12


def batches(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def column(rows):
        return (torch.rand(16, generator=generator) ** 3 * rows).long()

    return [{name: column(table.rows) for name, table in TABLES.items()} for _ in range(STEPS)]


def maker(optimizer=None, dropout=0.2):
    def make(**where):
        torch.manual_seed(3)
        tables = hotbed.EmbeddingTables(TABLES, optimizer or optim.Adam(lr=0.1), seed=1, output="concat", **where)
        model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
        dense = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(ids):
            loss = model(tables(ids)).square().mean()
            dense.zero_grad()
            loss.backward()
            dense.step()
            return loss

        return tables, step

    return make


WAYS = [
    TwinStorage("as asked", {"cache": 0.1}, ahead=False),
    TwinStorage("looked ahead", {"cache": 0.1}),
    TwinStorage("lru", {"cache": 0.12, "policy": "lru"}, window=2, look_ahead=4),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_nothing_to_find(way):
    before = torch.get_rng_state()
    verdict = verify(maker(), batches(), way)
    assert verdict.same, verdict.difference
    assert verdict.steps == STEPS
    assert verdict.lookups == STEPS * 16 * 3
    assert verdict.evictions > 0
    assert verdict.rows > 100
    assert torch.equal(torch.get_rng_state(), before)


def test_tiers(tmp_path):
    way = TwinStorage("tiered", {"cache": 0.1, "memory": "8MiB", "ssd": f"{tmp_path}/rows:64MiB"})
    assert verify(maker(), batches(), way).same


WHAT = {"row": "row", "state": "optimizer state", "write-back": "write-back", "lookup": "lookup"}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("place", PLACES)
def test_an_injected_bit_is_found_and_named(place, way):
    verdict = verify(maker(), batches(), way, injected=inject(place))
    found = verdict.difference
    assert found is not None
    assert found.what == WHAT[place]
    assert found.table in TABLES
    assert 0 <= found.id < TABLES[found.table].rows
    assert found.step > 3 or place == "lookup"
    bits = [torch.tensor(value).view(torch.int32).item() for value in (found.plain, found.other)]
    assert bits[0] ^ bits[1] == 1
    assert f"id {found.id}" in found.text()


def test_a_model_that_does_not_repeat_itself_is_not_blamed_on_the_tables():
    def make(**where):
        tables, step = maker()(**where)
        return tables, (lambda ids: step(ids) * (1.0001 if where else 1.0))

    found = verify(make, batches(), WAYS[0]).difference
    assert found.what == "loss"
    assert "the model itself" in found.text()


def test_a_wrong_rule_is_an_update():
    def make(**where):
        return maker(optim.SGD(lr=0.5 if where else 0.25))(**where)

    found = verify(make, batches(), WAYS[0]).difference
    assert (found.what, found.step) == ("update", 1)


def test_a_wrong_first_value():
    def make(**where):
        torch.manual_seed(3)
        tables = hotbed.EmbeddingTables(TABLES, seed=1 if where else 2, output="concat", **where)
        return tables, lambda ids: tables(ids).sum()

    found = verify(make, batches(), WAYS[0]).difference
    assert found.what == "row"
    assert "initial value" in found.text()


def test_for_the_tests_of_users():
    verdicts = assert_cache_invisible(maker(), batches(), cache=0.1)
    assert [verdict.way.ahead for verdict in verdicts] == [False, True]
    with pytest.raises(AssertionError, match="proves little"):
        assert_cache_invisible(maker(), batches(), cache=0.9)
    with pytest.raises(TypeError, match="say how rows are kept"):
        assert_cache_invisible(maker(), batches())

    def drifting(**where):
        return maker(optim.SGD(lr=0.5 if where else 0.25))(**where)

    with pytest.raises(AssertionError, match="step 1, update"):
        assert_cache_invisible(drifting, batches(), cache=0.1)
