"""What tables say of their tiers below the device."""

from types import SimpleNamespace

import pytest
import torch

import hotbed
from hotbed import Admit, Expire, Table, optim
from hotbed.cache import BYTES_PER_SLOT
from hotbed.store import tiered
from hotbed.store.counts import TierSizes
from hotbed.tables.group.fetch import StagedFetch
from hotbed.tables.sizing.budget import SSD_BYTES_PER_KEY

ROWS, DIM, RECORD = 2000, 4, 64


def train(tables, steps=30, features=1):
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        tables(torch.randint(ROWS, (64, features), generator=draw)).sum().backward()


@pytest.mark.parametrize("budgets", [{}, {"cache": 0.5}, {"hbm": "1MiB", "memory": "1MiB"}], ids=str)
def test_without_an_ssd_there_is_nothing_to_tell(budgets):
    tables = hotbed.EmbeddingTables({"a": Table(ROWS, DIM)}, optim.Adam(), **budgets)
    train(tables, 1)
    assert tables.tiers() is None


def test_three_tiers(tmp_path):
    slots = 100
    memory = ROWS * tiered.BYTES_PER_KEY + slots * (RECORD + tiered.BYTES_PER_SLOT)
    tables = hotbed.EmbeddingTables(
        {"a": Table(ROWS, DIM)}, optim.Adam(), cache=0.05, memory=memory, ssd=f"{tmp_path}:8MiB"
    )
    counts, sizes = tables.tiers()
    assert (sizes.memory_slots, sizes.memory_rows, sizes.memory_budget) == (slots, 0, memory)
    assert (sizes.ssd_bytes, sizes.ssd_cap, sizes.live_share) == (0, 8 << 20, 1.0)
    assert not any(counts)
    train(tables)
    counts, sizes = tables.tiers()
    assert counts.from_memory > 0
    assert counts.requested == tables.counters().misses - tables.counters().created
    assert counts.bytes_from_memory == counts.from_memory * RECORD
    assert counts.to_ssd * RECORD < counts.bytes_written
    assert sizes.memory_rows == slots
    assert sizes.memory_bytes == memory
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert sizes.ssd_bytes == on_disk == counts.bytes_written
    assert 0 < sizes.live_share < 1
    assert sizes.ssd_segments >= 1


def test_memory_that_is_the_cache(tmp_path):
    slots = 800
    memory = ROWS * SSD_BYTES_PER_KEY + slots * (RECORD + BYTES_PER_SLOT)
    tables = hotbed.EmbeddingTables({"a": Table(ROWS, DIM)}, optim.Adam(), memory=memory, ssd=f"{tmp_path}:8MiB")
    train(tables)
    counts, sizes = tables.tiers()
    assert (counts.from_memory, sizes.memory_slots) == (0, 0)
    assert counts.from_ssd == tables.counters().misses - tables.counters().created
    assert counts.to_ssd == tables.counters().written_back
    assert 0.9 * memory < sizes.memory_bytes <= memory, sizes


def test_groups_are_added_up(tmp_path):
    parts = {"a": Table(ROWS, DIM), "b": Table(ROWS, 2 * DIM)}
    tables = hotbed.EmbeddingTables(
        parts, optim.Adam(), output="concat", hbm="64KiB", memory="192KiB", ssd=f"{tmp_path}:16MiB"
    )
    train(tables, features=2)
    counts, sizes = tables.tiers()
    stores = [group.residency.store for group in tables.groups]
    assert len(stores) == 2
    assert counts == stores[0].counts.plus(stores[1].counts)
    assert sizes.memory_rows == sum(store.num_in_memory for store in stores)
    assert sizes.ssd_cap == sum(store.max_bytes for store in stores) <= 16 << 20
    assert sizes.memory_bytes <= sizes.memory_budget == 192 << 10


def test_sizes_add_up_and_shares_follow():
    one = TierSizes(ssd_live_bytes=30, ssd_stale_bytes=10)
    assert one.live_share == 0.75
    assert one.plus(TierSizes(ssd_stale_bytes=20)).live_share == 0.5


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_of_dynamic_ids_are_those_there_are(tmp_path, ahead):
    rules = {"admit": Admit(after=2), "expire": Expire(unused_steps=10, every=5)}
    tables = hotbed.EmbeddingTables(
        {"a": Table(None, DIM, **rules), "b": Table(None, DIM)},
        optim.Adam(),
        hbm="64KiB",
        memory="1MiB",
        ssd=f"{tmp_path}:8MiB",
    )
    draw = torch.Generator().manual_seed(3)
    batches = [torch.randint(300, (64, 2), generator=draw) for _ in range(60)]
    for n, ids in enumerate(hotbed.prefetch(batches, tables, window=2, look_ahead=8) if ahead else batches):
        tables(ids).sum().backward()
        if n % 20 == 19:
            counts = tables.id_counts()  # as trained, whatever was translated ahead
            assert {one.seen for one in counts.values()} == {64 * (n + 1)}
            assert {name: one.rows for name, one in counts.items()} == {
                name: tables.rows(name)[0].shape[0] for name in counts
            }
    counts = tables.id_counts()
    assert counts["a"].expired > 0
    assert counts["a"].rejected > 0
    assert counts["b"].rows == 300
    assert tables.tiers().sizes.memory_bytes <= tables.tiers().sizes.memory_budget


def test_rows_that_come_late_count_as_moved_and_are_read_when_they_are_there(monkeypatch):
    """Of seven misses three are in the store, two are on their way to it, and two are new."""
    rows = hotbed.EmbeddingTables({"a": Table(None, 4)}, hbm="64KiB", memory="1MiB").groups[0].residency
    counted = []
    monkeypatch.setattr(
        rows, "count_window", lambda *_, num_moved, num_created: counted.append((num_moved, num_created))
    )
    monkeypatch.setattr(rows.keyspace, "fetch", lambda *_: (3, 3, torch.tensor([1, 4])))
    plan = SimpleNamespace(num_misses=7, victim_keys=torch.empty(0, dtype=torch.int64), miss_keys=torch.arange(7))
    fetch = StagedFetch(rows, plan, 1, 7)
    fetch.read()
    assert counted == [(5, 2)]
    assert fetch.staged.shape[0] == 5
    records = torch.randn(2, rows.layout.width)
    rows.store.write(torch.tensor([1, 4]), records)  # what was on its way has come
    fetch.read_late()
    assert torch.equal(fetch.staged[3:], records)
    assert fetch.source[[1, 4]].tolist() == [3, 4]
    assert fetch.late is None
