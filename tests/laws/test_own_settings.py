"""Tables with settings of their own train as they would alone with these settings, to the bit."""

from __future__ import annotations

import pytest
import torch

import hotbed
from hotbed import Jagged, Table
from hotbed.errors import ConfigError
from hotbed.optim import SGD, Adagrad, Adam, Cosine, RowwiseAdagrad

OWN = {
    "usual": {},
    "slow": {"optimizer": Adagrad(lr=0.01)},
    "adam": {"optimizer": Adam(lr=0.02)},
    "fading": {"optimizer": SGD(lr=Cosine(0.5, 9))},
    "half": {"precision": "bf16"},
    "other_half": {"precision": "bf16", "optimizer": RowwiseAdagrad(lr=0.1)},
    "small": {"cache": 0.5, "policy": "lru"},
    "same_small": {"cache": 0.5, "policy": "lru"},
    "wide": {"init": hotbed.Uniform(0.5)},
    "frozen": {"frozen": True},
}
USUAL = Adagrad(lr=0.1)
ROWS, STEPS = 40, 12


def table(name, own):
    return Table(ROWS, 6 if name == "wide" else 4, "mean" if name == "adam" else "sum", **own)


def batches():
    draws = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        yield {name: torch.randint(0, ROWS, (6, 2), generator=draws) for name in OWN}


def loss_of(vectors, name):
    return (vectors.square().sum(1) + vectors.sum(1).tanh()).sum() * (1 + len(name))


def alone(name, own, **options):
    """A table for itself, whose settings are those of the tables."""
    given = dict(own)
    arguments = {key: given.pop(key) for key in ("precision", "policy", "cache", "optimizer") if key in given}
    arguments.setdefault("optimizer", USUAL)
    is_frozen = given.pop("frozen", False)
    tables = hotbed.EmbeddingTables({name: table(name, given)}, output="dict", **{**options, **arguments})
    tables.requires_grad_(not is_frozen)
    for batch in batches():
        out = tables({name: batch[name]})[name]
        if not is_frozen:
            loss_of(out, name).backward()
    return tables


def state_of(tables, name):
    _, columns = tables.rows(name)
    return columns


@pytest.mark.parametrize("options", [{}, {"cache": 0.8}], ids=["whole", "cached"])
@pytest.mark.parametrize("ahead", [False, True])
def test_every_table_trains_as_it_would_alone(options, ahead):
    tables = hotbed.EmbeddingTables({name: table(name, own) for name, own in OWN.items()}, USUAL, **options)
    assert len(tables.groups) == 9  # two share theirs
    source = list(batches())
    for batch in hotbed.prefetch(source, tables, window=2) if ahead else source:
        out = tables(batch)
        sum(loss_of(vectors, name) for name, vectors in out.items()).backward()
    for name, own in OWN.items():
        expected = state_of(alone(name, own, **options), name)
        found = state_of(tables, name)
        states = set(found) if name != "frozen" else {"weight"}
        assert states == set(found)
        assert all(torch.equal(found[column], expected[column]) for column in states), name


def test_a_checkpoint_holds_all_of_them(tmp_path):
    def made():
        return hotbed.EmbeddingTables({name: table(name, own) for name, own in OWN.items()}, USUAL, cache=0.8)

    tables, other = made(), made()
    for batch in batches():
        sum(loss_of(vectors, name) for name, vectors in tables(batch).items()).backward()
    hotbed.checkpoint.save(tmp_path / "saved", tables, step=1)
    hotbed.checkpoint.load(tmp_path / "saved", other)
    for name in OWN:
        ours, theirs = state_of(other, name), state_of(tables, name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[column], theirs[column]) for column in ours), name
    again = made()
    again.load_state_dict(tables.state_dict())
    assert torch.equal(again.weight("adam"), tables.weight("adam"))
    batch = next(batches())
    for one in (tables, other):
        sum(loss_of(vectors, name) for name, vectors in one(batch).items()).backward()
    assert all(torch.equal(other.weight(name), tables.weight(name)) for name in OWN)


def test_frozen_tables_stay_and_accumulate_with_the_others():
    tables = hotbed.EmbeddingTables({"a": Table(9, 3, frozen=True), "b": Table(9, 3)}, SGD(lr=1.0)).accumulate()
    before = {name: tables.weight(name).clone() for name in "ab"}
    assert tables.states("a") == {}
    out = tables({"a": torch.tensor([1, 2]), "b": Jagged(torch.tensor([3]), torch.tensor([0, 1, 1]))})
    sum(vectors.sum() for vectors in out.values()).backward() if isinstance(out, dict) else out.sum().backward()
    assert tables.step()
    assert torch.equal(tables.weight("a"), before["a"])
    assert not torch.equal(tables.weight("b"), before["b"])
    whole = hotbed.EmbeddingTables({"a": Table(9, 3, frozen=True)})
    assert not whole(torch.tensor([[1]])).requires_grad


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"precision": "fp8"}, "precision must be one of fp32"),
        ({"policy": "fifo"}, "policy must be one of"),
        ({"optimizer": "adam"}, "optimizer must be one of hotbed.optim"),
        ({"cache": 1.5}, "cache is a share of its rows"),
        ({"frozen": True, "optimizer": USUAL}, "leave out optimizer= or frozen=True"),
    ],
)
def test_mistakes(own, message):
    with pytest.raises(ConfigError, match=message):
        hotbed.EmbeddingTables({"a": Table(9, 3, **own)})


def test_a_share_beside_bytes_is_refused():
    with pytest.raises(ConfigError, match="hbm= divides bytes among all tables"):
        hotbed.EmbeddingTables({"a": Table(9, 3, cache=0.5), "b": Table(9, 3)}, hbm="4KiB")
