"""Memory over ssd under recorded planners: compiled transfers move rows of the memory tier, and rows come from the ssd ahead.

Run launch by launch under Triton's interpreter, against plain tables. Memory has twice the slots of the device, the least with
which compiled code moves rows: nearly every window has to empty some.
"""

import importlib.util
from unittest import mock

import numpy as np
import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import StoreError
from hotbed.ids import Expire
from hotbed.pipeline.recorded import RecordedTransfer
from hotbed.store.ssd import SsdStore
from hotbed.tables import module as tables_module
from hotbed.tables.sizing.budget import rooms_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
ROWS, SLOTS, FACTOR = (80, 50, 90), 24, 2


def new_tables(folder=None, factor=FACTOR, slots=SLOTS, **given):
    declared = {name: Table(rows, dim) for name, rows, dim in zip("abc", ROWS, (3, 3, 5))}
    if folder is None:
        return hotbed.EmbeddingTables(declared, optim.Adagrad(lr=0.1), output="concat")

    def small(*arguments):
        rooms = [room._replace(num_slots=slots) for room in rooms_of(*arguments)]
        return [room._replace(place=room.place._replace(memory_slots=factor * slots)) for room in rooms]

    with mock.patch.object(tables_module, "rooms_of", small):
        budgets = {"cache": 0.5, "memory": "64MiB", "ssd": f"{folder}:64MiB", **given}
        return hotbed.EmbeddingTables(declared, optim.Adagrad(lr=0.1), output="concat", **budgets)


def batches(count, seed=0, size=6):
    draw = torch.Generator().manual_seed(seed)
    return list(torch.stack([torch.randint(0, rows, (count, size), generator=draw) for rows in ROWS], dim=2))


def train(tables, loader, **ahead):
    losses = []
    for ids in hotbed.prefetch(loader, tables, **ahead) if tables.caches else loader:
        loss = tables(ids).pow(2).sum()
        loss.backward()
        losses.append(loss.item())
    return losses


def same_rows(one, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def check(tables):
    for group in tables.caches:
        group.cache.check_integrity()
        group.store.check_integrity()
        group.store.ssd.check_integrity()


@pytest.fixture
def moved(monkeypatch):
    """How many windows compiled code has moved."""
    count = []
    exchange = RecordedTransfer.exchange
    monkeypatch.setattr(RecordedTransfer, "exchange", lambda transfer: (count.append(1), exchange(transfer)))
    return count


@pytest.mark.usefixtures("lanes_on_cpu")
@pytest.mark.parametrize(("window", "look_ahead", "threads"), [(1, 1, 2), (1, 3, 16), (2, 8, 2), (1, 40, 16)])
def test_the_same_bits(tmp_path, window, look_ahead, threads, moved, monkeypatch):
    monkeypatch.setattr("hotbed.store.tier_kernels.num_threads", lambda: threads)
    plain, tables = new_tables(), new_tables(tmp_path)
    loader = batches(30)
    for part in (loader[:18], loader[18:]):
        assert train(plain, part) == train(tables, part, window=window, look_ahead=look_ahead)
    assert same_rows(plain, tables)
    counts = tables.tiers().counts
    assert len(moved) == 30 / window
    assert counts.to_ssd > 100
    assert counts.from_ssd > 50
    assert counts.from_memory > 50
    check(tables)


@pytest.mark.usefixtures("lanes_on_cpu", "moved")
def test_rows_come_from_the_ssd_before_their_window(tmp_path):
    """Memory has room for those of all batches ahead, and nothing else does anything: no window waits after the first."""
    tables = new_tables(tmp_path, factor=6)
    train(tables, batches(60, seed=1), window=1, look_ahead=6)  # every row is written
    tables.flush()
    for group in tables.caches:
        group.store.tier.flush()
        group.store.tier.empty(np.flatnonzero(group.store.tier.key_of_slot >= 0))  # all are on the ssd
    before, loader = tables.tiers().counts, batches(12, seed=2)
    for ids in hotbed.prefetch(loader, tables, window=1, look_ahead=6):
        thread = tables.ownership.feed._eager.thread
        while thread._tasks.qsize() or any(group.store._foreseen for group in tables.caches):
            pass  # ends: all can be brought
        tables(ids).sum().backward()
    counts = tables.tiers().counts.minus(before)
    assert counts.ahead > 100
    assert counts.ahead > 0.9 * counts.from_ssd
    assert counts.waits <= 4


@pytest.mark.usefixtures("lanes_on_cpu")
def test_where_memory_is_small_the_thread_moves_rows(tmp_path, moved):
    plain, tables = new_tables(), new_tables(tmp_path, factor=1)
    loader = batches(20)
    assert train(plain, loader) == train(tables, loader, window=1, look_ahead=4)
    assert same_rows(plain, tables)
    assert not moved
    check(tables)


@pytest.mark.usefixtures("lanes_on_cpu")
@pytest.mark.parametrize("keys", ["none", "garbage", "all"])
def test_no_result_depends_on_what_is_foreseen(tmp_path, keys, monkeypatch):
    from hotbed.cache.recorded_planner import RecordedCache

    draw = np.random.default_rng(0)
    given = {
        "none": lambda: np.empty(0, dtype=np.int64),
        "garbage": lambda: draw.integers(-(2**62), 2**62, 50),
        "all": lambda: np.tile(np.arange(130), 2),
    }[keys]
    monkeypatch.setattr(RecordedCache, "new_keys", lambda recorded, number, wait: given())
    plain, tables = new_tables(), new_tables(tmp_path)
    loader = batches(20)
    assert train(plain, loader) == train(tables, loader, window=2, look_ahead=5)
    assert same_rows(plain, tables)
    check(tables)


@pytest.mark.usefixtures("lanes_on_cpu")
def test_calls_snapshots_and_evaluation_in_between(tmp_path):
    results = []
    for folder in (None, tmp_path):
        tables, losses = new_tables(folder), []
        loader = batches(16, seed=3)
        for n, ids in enumerate(hotbed.prefetch(loader, tables, window=2, look_ahead=5) if folder else loader):
            loss = tables(ids).pow(2).sum()
            if n == 3:
                losses.append(tables(loader[0].clone()).sum().item())
            loss.backward()
            if n in (5, 9):
                with tables.snapshot() as snapshot:
                    snapshot.commit()
                losses.append(tables.weight("a").sum().item())
            if n == 7:
                with torch.no_grad():
                    losses += [tables(each).sum().item() for each in batches(3, seed=4)]
            losses.append(loss.item())
        results.append((losses, tables))
    assert results[0][0] == results[1][0]
    assert same_rows(results[0][1], results[1][1])
    check(tables)


@pytest.mark.usefixtures("lanes_on_cpu")
@pytest.mark.parametrize("name", ["read_into", "write"])
@pytest.mark.parametrize("after", [0, 3, 12])
def test_a_disk_that_fails_is_reported_and_the_tables_refuse(tmp_path, name, after, monkeypatch):
    """Also where it fails between two windows, for a batch ahead."""
    tables, calls = new_tables(tmp_path), []
    original = getattr(SsdStore, name)

    def failing(store, *arguments):
        calls.append(1)
        if len(calls) > after:
            raise StoreError("the disk is broken")
        return original(store, *arguments)

    monkeypatch.setattr(SsdStore, name, failing)
    with pytest.raises(StoreError, match="the disk is broken"):
        train(tables, batches(60), window=1, look_ahead=4)
    with pytest.raises(hotbed.errors.HotbedError, match="lost rows"):
        tables(batches(1)[0])


def dynamic_tables(folder=None):
    declared = {name: Table(None, 3, expire=Expire(unused_steps=6, every=3)) for name in "ab"}
    if folder is None:
        return hotbed.EmbeddingTables(declared, optim.Adagrad(lr=0.1), hbm="1MiB", memory="64MiB")

    def small(*arguments):
        rooms = [room._replace(num_slots=SLOTS) for room in rooms_of(*arguments)]
        return [room._replace(place=room.place._replace(memory_slots=FACTOR * SLOTS)) for room in rooms]

    with mock.patch.object(tables_module, "rooms_of", small):
        return hotbed.EmbeddingTables(
            declared, optim.Adagrad(lr=0.1), hbm="1MiB", memory="64MiB", ssd=f"{folder}:64MiB"
        )


@pytest.mark.usefixtures("lanes_on_cpu")
def test_dynamic_ids_that_come_and_go(tmp_path, moved):
    """Rows of ids that expire are given to others, also while they are kept for a batch ahead."""
    draw, results = torch.Generator().manual_seed(0), []
    loader = [torch.randint(0, 120, (8, 2), generator=draw) * 7919 + 10**12 for _ in range(30)]
    for folder in (None, tmp_path):
        tables, losses = dynamic_tables(folder), []
        for n, ids in enumerate(hotbed.prefetch(loader, tables, window=2, look_ahead=5) if folder else loader):
            loss = tables(ids).pow(2).sum()
            loss.backward()
            losses.append(loss.item())
            if n == 11:  # batches ahead are taken back
                losses.append(tables.rows("a")[1]["weight"].sum().item())
        results.append((losses, [tables.rows(name) for name in "ab"]))
    assert results[0][0] == results[1][0]
    for (ids, columns), (others, theirs) in zip(results[0][1], results[1][1]):
        assert torch.equal(ids, others)
        assert all(torch.equal(column, theirs[name]) for name, column in columns.items())
    assert moved
    assert tables.tiers().counts.from_ssd > 20
    check(tables)
