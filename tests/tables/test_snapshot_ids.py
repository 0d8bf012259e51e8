"""Checkpoints of tables with dynamic ids: training goes on bit for bit, whatever had been looked ahead, admitted or expired."""

import numpy as np
import pytest
import torch

import hotbed
from hotbed import Admit, Expire, Table, optim
from hotbed.ids import UNKNOWN
from hotbed.tables.snapshot.ids import IdsSink, _as_tensor
from hotbed.types import RowPart

KINDS = {
    "memory": {"memory": "64MiB"},
    "tiered": {"memory": "2MiB", "ssd": True},
}
RULES = {
    "none": {},
    "counted": {"admit": Admit(after=2), "expire": Expire(unused_steps=30, every=10)},
    "sketched": {"admit": Admit(after=3, sketch="4KiB"), "expire": Expire(score_below=0.4, half_life=12, every=5)},
    "chance": {"admit": Admit(probability=0.5)},
}


def new_tables(folder, kind, rules, hbm="8KiB"):
    budgets = dict(KINDS[kind])
    if budgets.get("ssd"):
        budgets["ssd"] = f"{folder}:32MiB"
    return hotbed.EmbeddingTables(
        {"user": Table(None, 4, **RULES[rules]), "item": Table(None, 4), "page": Table(50, 4)},
        optim.Adam(lr=0.05),
        seed=5,
        hbm=hbm,
        **budgets,
    )


def batches(start, stop):
    found = []
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        drift = step * 3
        user = (torch.rand(12, generator=generator) ** 3 * 60).long() * 2**40 - 5 + drift
        item = (torch.rand(12, generator=generator) * 30).long() - drift
        found.append(torch.stack([user, item, item.abs() % 50], dim=1))
    return found


def train(tables, loader, ahead=None):
    losses = []
    for ids in loader if ahead is None else hotbed.prefetch(loader, tables, look_ahead=ahead):
        loss = tables(ids).pow(2).sum(dim=2).tanh().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def rows(tables):
    return {table: tables.rows(table) for table in tables.tables}


def assert_same(one, other):
    for table, (ids, columns) in rows(one).items():
        theirs, their_columns = rows(other)[table]
        assert torch.equal(ids, theirs), table
        for name, column in columns.items():
            assert torch.equal(column, their_columns[name]), (table, name)
    assert one.id_counts() == other.id_counts()


def test_sketches_of_ranks_are_added_up_to_the_most_that_a_cell_holds(tmp_path):
    tables = new_tables(tmp_path, "memory", "sketched")
    train(tables, batches(0, 5))
    ids = next(group.keyspace for group in tables.groups if group.keyspace.is_dynamic)
    ((number, dtype),) = ids.translator.sketch_types().items()
    rest = {f"ids.g.{name}": _as_tensor(name, values) for name, values in ids.translator.rest_state().items()}
    name = f"ids.g.sketch_{number}"
    cells = rest[name].numpy().view(dtype)
    assert 0 < cells.max() < 8
    joined = IdsSink(ids).join("g", [rest, rest, rest])[name].numpy().view(dtype)
    assert (joined == 3 * cells).all()
    full = {**rest, name: torch.full_like(rest[name], 255)}
    assert (IdsSink(ids).join("g", [full, rest])[name] == 255).all()


def test_ids_that_come_without_a_row_number_get_rows_of_their_own(tmp_path):
    tables = new_tables(tmp_path, "memory", "none")
    ids = next(group.keyspace for group in tables.groups if group.keyspace.is_dynamic)
    sink = IdsSink(ids)
    given = torch.tensor([7, -3])
    keys = sink.add(RowPart("user", given, {}))
    sink.end("g", {}, lambda: iter(()))
    assert ids.translator.id_of(keys.numpy())[1].tolist() == given.tolist()
    found = ids.translator.translate(np.zeros(3, dtype=np.uint16), np.array([7, -3, 8]), learns=False).keys
    assert found.tolist() == [*keys.tolist(), UNKNOWN]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rules", RULES)
def test_training_continues_bit_for_bit(tmp_path, rules, kind):
    """In tables of every kind."""
    whole = new_tables(tmp_path / "whole", kind, rules)
    losses = train(whole, batches(0, 110))
    tables = new_tables(tmp_path / "one", kind, rules)
    feed = hotbed.prefetch(batches(0, 110), tables, look_ahead=9)
    for step, ids in enumerate(feed, start=1):
        tables(ids).pow(2).sum(dim=2).tanh().mean().backward()
        if step in (30, 45, 70):  # a full one, then two that add to it; nine batches are known ahead each time
            hotbed.checkpoint.save(tmp_path / "saved", tables, step=step)
        if step == 74:
            break
    feed.close()
    for into in KINDS:
        other = new_tables(tmp_path / into, into, rules)
        train(other, batches(300, 303))
        assert hotbed.checkpoint.load(tmp_path / "saved", other).step == 70
        assert train(other, batches(70, 110), ahead=7) == losses[70:]
        assert_same(whole, other)
    assert train(tables, batches(74, 110)) == losses[74:]
    assert_same(whole, tables)
    if rules == "counted":
        assert whole.id_counts()["user"].expired > 0
        assert whole.id_counts()["user"].rejected > 0


def test_ids_that_are_gone_are_in_the_checkpoints_that_add_to_others():
    """A full one has all rows there are, and says nothing about others."""
    tables = hotbed.EmbeddingTables(
        {"user": Table(None, 4, expire=Expire(unused_steps=20, every=10)), "item": Table(None, 4)},
        hbm="8KiB",
        memory="64MiB",
    )
    for step in range(90):
        tables(torch.tensor([[1, 7], [2, 8], [3 if step < 30 else 2, 9]])).sum().backward()
        if step == 29:
            with tables.snapshot() as whole:
                assert list(whole.gone()) == []
                whole.commit()
    with tables.snapshot(touched=True) as some:
        assert [(table, ids.tolist()) for table, ids in some.gone()] == [("user", [3])]
    with tables.snapshot() as whole:
        assert list(whole.gone()) == []


def test_a_shared_row_that_nobody_has_trained_is_saved(tmp_path):
    """It is the first row of its tables, no id has one of its own yet, and tables of another seed begin with another."""

    def new(seed):
        tables = {"user": Table(None, 4, admit=Admit(after=3))}
        return hotbed.EmbeddingTables(tables, seed=seed, hbm="8KiB", memory="1MiB")

    tables, other = new(2), new(3)
    assert tables.groups[0].keyspace.shared_key("user") == 0
    shared = tables.shared_row("user")["weight"]
    assert not torch.equal(other.shared_row("user")["weight"], shared)
    hotbed.checkpoint.save(tmp_path, tables)
    hotbed.checkpoint.warm_start(tmp_path, other)
    assert torch.equal(other.shared_row("user")["weight"], shared)
    other.groups[0].keyspace.translator.check_integrity()
