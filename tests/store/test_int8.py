"""A store of int8 rows against a dict of rounded rows, and tables over it."""

import pytest
import torch

import hotbed
from hotbed.errors import BudgetError, ConfigError
from hotbed.ops.int8 import pack, packed_width, unpack
from hotbed.ops.records import Layout
from hotbed.store import Int8Store

LAYOUT = Layout(5, (), ("sum",))


def first(keys):
    return keys[:, None].float().repeat(1, LAYOUT.width) + 0.25


def rounded(keys, records):
    out = torch.empty_like(records)
    unpack(pack(records, keys, LAYOUT), LAYOUT, out)
    return out


def read(store, keys):
    out = torch.full((len(keys), LAYOUT.width), torch.nan)
    store.read(torch.tensor(keys), out)
    return out


def test_rows_read_as_they_were_rounded_or_as_they_began():
    store, known = Int8Store(50, LAYOUT, first), {}
    draw = torch.Generator().manual_seed(1)
    for _ in range(40):
        keys = torch.randperm(50, generator=draw)[:7]
        records = torch.randn(7, LAYOUT.width, generator=draw)
        store.write(keys, records)
        known |= dict(zip(keys.tolist(), rounded(keys, records)))
        gone = torch.randperm(50, generator=draw)[:2]
        store.forget(gone)
        for key in gone.tolist():
            known.pop(key, None)
        asked = torch.randperm(50, generator=draw)[:20].tolist()
        for key, found in zip(asked, read(store, asked)):
            assert torch.equal(found, known[key] if key in known else first(torch.tensor([key]))[0])
    assert {int(key): True for keys, _ in store.items(3) for key in keys} == dict.fromkeys(known, True)
    for keys, records in store.items(3):
        assert torch.equal(records, torch.stack([known[int(key)] for key in keys]))


def test_fetch_packs_written_rows_and_names_those_expected():
    store = Int8Store(10, LAYOUT, first)
    keys, records = torch.tensor([2, 4]), torch.randn(2, LAYOUT.width)
    store.write(keys, records)
    store.expect(torch.tensor([7]))
    out, source = torch.full((4, LAYOUT.width), torch.nan), torch.empty(4, dtype=torch.int32)
    count, late = store.fetch(torch.tensor([4, 1, 7, 2]), out, source)
    assert (count, late.tolist(), source.tolist()[:2]) == (2, [2], [0, -1])
    assert torch.equal(out[:2], rounded(keys, records)[[1, 0]])


def test_a_snapshot_holds_the_rows_of_its_moment():
    store, keys, records = Int8Store(10, LAYOUT, first), torch.arange(3), torch.randn(3, LAYOUT.width)
    store.write(keys, records)
    held = store.holder()
    held.take(False)
    store.write(keys, -records)
    found = {int(key): row for some, rows in held.items() for key, row in zip(some, rows)}
    held.commit()
    assert all(torch.equal(found[key], row) for key, row in enumerate(rounded(keys, records)))
    again = store.holder()
    again.take(True)
    assert again.keys.tolist() == [0, 1, 2]
    again.give_back()


def test_memory_takes_the_bytes_of_packed_rows():
    store = Int8Store(1000, LAYOUT, first)
    assert store.num_bytes == 1000 * (4 * packed_width(LAYOUT) + 1)


def tables_of(**options):
    return hotbed.EmbeddingTables(
        {"user": hotbed.Table(rows=400, dim=16), "ad": hotbed.Table(rows=60, dim=16)},
        hotbed.optim.RowwiseAdagrad(lr=0.1),
        **{"cache": 0.2, "store_precision": "int8"} | options,
    )


def train(tables, steps, start=0):
    losses = []
    for step in range(start, start + steps):
        draw = torch.Generator().manual_seed(step)
        ids = torch.stack([torch.randint(400, (32,), generator=draw), torch.randint(60, (32,), generator=draw)], 1)
        loss = (tables(ids) - torch.linspace(-1, 1, 16)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def test_tables_learn_nearly_as_with_float32_and_repeat_to_the_bit():
    one, other, exact = tables_of(), tables_of(), tables_of(store_precision="same")
    losses = train(one, 150)
    assert losses == train(other, 150)
    assert torch.equal(one.weight("user"), other.weight("user"))
    plain = train(exact, 150)
    assert losses != plain
    assert abs(losses[-1] - plain[-1]) < 0.02 * plain[0]
    largest = one.weight("user").abs().amax()
    assert (one.weight("user") - exact.weight("user")).abs().amax() < largest / 10


def test_a_checkpoint_brings_back_the_rows_of_memory_bit_for_bit(tmp_path):
    tables, loaded, again = tables_of(), tables_of(), tables_of()
    train(tables, 40)
    hotbed.checkpoint.save(tmp_path / "saved", tables)
    hotbed.checkpoint.load(tmp_path / "saved", loaded)
    assert torch.equal(tables.weight("user"), loaded.weight("user"))
    hotbed.checkpoint.load(tmp_path / "saved", again)
    assert train(loaded, 40, start=40) == train(again, 40, start=40)
    assert torch.equal(loaded.weight("user"), again.weight("user"))


def test_looking_at_rows_does_not_change_training():
    one, other = tables_of(), tables_of()
    losses = train(one, 20)
    one.weight("user")
    assert losses + train(one, 20, start=20) == train(other, 40)


def test_prefetched_dynamic_ids_work_too():
    tables = hotbed.EmbeddingTables(
        {"user": hotbed.Table(rows=None, dim=16)}, hotbed.optim.Adam(lr=0.1), hbm="20KiB", store_precision="int8"
    )
    batches = [torch.randint(10**12, (30, 1)) for _ in range(10)] * 3
    losses = []
    for ids in hotbed.prefetch(batches, tables):
        loss = (tables(ids) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cache": None}, "cache="),
        ({"precision": "bf16"}, "bf16"),
        ({"memory": "10MB", "ssd": "FOLDER:100MB"}, "ssd="),
        ({"store_precision": "int4"}, "int4"),
    ],
)
def test_what_cannot_be_is_refused(options, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        tables_of(
            **{
                name: value.replace("FOLDER", str(tmp_path)) if name == "ssd" else value
                for name, value in options.items()
            }
        )


def test_a_budget_counts_packed_rows():
    packed = 460 * (24 + 1)
    tables_of(memory=packed)
    with pytest.raises(BudgetError):
        tables_of(memory=packed - 1)
    with pytest.raises(BudgetError):
        tables_of(memory=packed, store_precision="same")
