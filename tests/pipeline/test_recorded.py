"""Recorded planners and compiled transfers, run here launch by launch under Triton's interpreter, against plain tables."""

import importlib.util
import threading

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import BudgetError, HotbedError, IdError
from hotbed.ops.move.compiled_transfer import CompiledTransfer
from hotbed.pipeline.feed import Feed
from hotbed.pipeline.recorded import RecordedPlanner
from hotbed.tables.sizing.budget import staged_row_bytes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")


def batches(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = [(torch.rand(count, size, generator=generator) ** 3 * limit).long() for limit in (40, 25, 60)]
    return list(torch.stack(columns, dim=2))


def train(loader, look_ahead=5, **cache):
    tables = hotbed.EmbeddingTables(
        {"a": Table(40, 3), "b": Table(25, 3), "c": Table(60, 5)}, optim.Adam(lr=0.1), output="concat", **cache
    )
    losses = []
    found = loader if not cache else hotbed.prefetch(loader, tables, window=2, look_ahead=look_ahead)
    for ids in found:
        loss = tables(ids).pow(2).sum()
        loss.backward()
        losses.append(loss.item())
    return losses, tables


@pytest.mark.usefixtures("lanes_on_cpu")
@pytest.mark.parametrize(("share", "look_ahead"), [(0.35, 5), (0.7, 40)])  # from 30 on, batches share a bit
def test_the_recorded_way_gives_the_same_bits(share, look_ahead):
    loader = batches(14, 6)
    loader.insert(9, batches(1, 4, seed=3)[0])  # of another size: planned the other way, in between
    plain, cached = train(loader), train(loader, look_ahead, cache=share)
    assert plain[0] == cached[0]
    for name, value in plain[1].state_dict().items():
        assert torch.equal(value, cached[1].state_dict()[name]), name
    counts = cached[1].counters()
    assert counts.batches == 2 * 15  # two groups
    assert counts.created > 0
    if share < 0.5:
        assert counts.misses > counts.created  # rows left and came back
    assert counts.keys == counts.hits + counts.misses
    for group in cached[1].groups:
        group.residency.cache.check_integrity()


@pytest.mark.usefixtures("lanes_on_cpu")
def test_buffers_of_rows_on_their_way_stay_within_staging(monkeypatch):
    monkeypatch.setattr("hotbed.tables.group.cached.CachedRows.is_direct", False)  # as on a device
    loader, found, taken = batches(14, 6), [], []
    stop, sizes = CompiledTransfer.stop, []

    def noted(transfer):
        sizes.append(sum(part.nbytes for slot in transfer._slots for part in slot))
        stop(transfer)

    monkeypatch.setattr(CompiledTransfer, "stop", noted)
    staging = 28 * staged_row_bytes(48, "cpu")  # for two groups, of which one needs up to 12 rows a batch
    for given in ({}, {"staging": staging}):
        sizes.clear()
        losses, tables = train(loader, cache=0.7, **given)
        found.append((losses, tables.counters().windows))
        taken.append(sum(sizes) / 2)
    (planner,) = tables.ownership.planners  # which is kept for the next pass, and not its buffers
    for transfer in planner._transfers:
        assert not sum(part.nbytes for slot in transfer._slots for part in slot)
        assert not sum(ring.nbytes for ring in transfer._rings)
    assert found[0][0] == found[1][0]
    assert found[0][1] < found[1][1]
    assert taken[1] <= staging
    assert [group.residency.most_staged for group in tables.groups] == [13, 10]


def moving(but=()):
    """Threads that move rows, but for those of other tests."""
    names = ("hotbed-compiled-transfer", "hotbed-transfer")
    return [one for one in threading.enumerate() if one.name in names and one not in but]


@pytest.mark.usefixtures("lanes_on_cpu")
def test_an_interrupt_while_a_planner_starts_leaves_no_thread(monkeypatch):
    """The first start compiles for seconds. The planner serves the next pass."""
    others = moving()
    tables = hotbed.EmbeddingTables({"a": Table(40, 3)}, optim.SGD(lr=0.1), cache=0.5)
    loader, start = [ids[:, :1].contiguous() for ids in batches(2, 6)], CompiledTransfer.start

    def interrupted(transfer, first):
        start(transfer, first)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CompiledTransfer, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(hotbed.prefetch(loader, tables))
    assert not moving(others)
    (planner,) = tables.ownership.planners
    assert len(list(hotbed.prefetch(loader, tables))) == 2
    assert tables.ownership.planners == [planner]


@pytest.mark.usefixtures("lanes_on_cpu")
def test_rows_that_cannot_be_written_at_the_end_leave_no_thread(monkeypatch):
    """It would keep the memory of tables that are of no use any more."""
    others = moving()
    tables = hotbed.EmbeddingTables({"a": Table(40, 3)}, optim.SGD(lr=0.1), cache=0.5)
    loop = hotbed.prefetch([ids[:, :1].contiguous() for ids in batches(3, 6)], tables, window=1)
    tables(next(loop)).sum().backward()

    def failing(transfer):
        raise HotbedError("rows could not be moved between host and device")

    monkeypatch.setattr(CompiledTransfer, "drain", failing)
    with pytest.raises(HotbedError, match="could not be moved"):
        loop.close()
    assert not moving(others)
    with pytest.raises(HotbedError, match="lost rows"):
        tables(torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.usefixtures("lanes_on_cpu")
def test_the_next_window_is_decided_before_it_is_wanted():
    tables = hotbed.EmbeddingTables({"a": Table(40, 3), "b": Table(25, 3)}, cache=0.7)
    feed = Feed([ids[:, :2].contiguous() for ids in batches(6, 4)], tables, 1, 2)
    feed.start()
    try:
        feed._reader._thread.join()  # fewer than are read ahead
        feed.next()
        assert isinstance(feed._planner, RecordedPlanner)
        assert feed._decided
    finally:
        feed.close()


@pytest.mark.usefixtures("lanes_on_cpu")
def test_plain_calls_and_passes_in_between():
    results = []
    for cache in ({}, {"cache": 0.4}):
        tables = hotbed.EmbeddingTables({"a": Table(40, 3), "b": Table(25, 3)}, optim.Adagrad(lr=0.1), **cache)
        losses = []
        for number in range(2):
            loader = [ids[:, :2].contiguous() for ids in batches(9, 6, seed=number)]
            for n, ids in enumerate(hotbed.prefetch(loader, tables) if cache else loader):
                loss = tables(ids).pow(2).sum()
                if n == 3:
                    losses.append(tables(loader[0].clone()).sum().item())  # moves rows between forward and backward
                loss.backward()
                if n == 5:
                    losses.append(tables.weight("a").sum().item())
                if number == 1 and n == 6:
                    break
                losses.append(loss.item())
        results.append((losses, tables.state_dict()))
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name


@pytest.mark.usefixtures("lanes_on_cpu")
def test_feeds_inside_each_other_and_rows_that_are_loaded():
    """Two feeds of one size have planners of their own, and planners of a cache that is gone are dropped."""
    results = []
    saved = hotbed.EmbeddingTables({"a": Table(40, 3), "b": Table(25, 3)}, seed=7).state_dict()
    for cache in ({}, {"cache": 0.4}):
        tables = hotbed.EmbeddingTables({"a": Table(40, 3), "b": Table(25, 3)}, optim.Adagrad(lr=0.1), **cache)
        losses = []

        def feed(seed, tables=tables, cache=cache):
            loader = [ids[:, :2].contiguous() for ids in batches(7, 6, seed)]
            return hotbed.prefetch(loader, tables, window=2, look_ahead=3) if cache else loader

        for n, ids in enumerate(feed(0)):
            if n == 5:
                tables.load_state_dict(saved)
            for each in (ids, *(feed(1) if n == 2 else ())):
                loss = tables(each).pow(2).sum()
                loss.backward()
                losses.append(loss.item())
        results.append((losses, tables.state_dict()))
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name


@pytest.mark.usefixtures("lanes_on_cpu")
def test_rows_that_are_loaded_at_the_end_of_a_pass_leave_no_planner():
    """That of the cache before would keep its memory, page-locked and on the device, until a batch needs another."""
    tables = hotbed.EmbeddingTables({"a": Table(40, 3)}, optim.SGD(lr=0.1), cache=0.5)
    for n, ids in enumerate(hotbed.prefetch([ids[:, :1].contiguous() for ids in batches(3, 6)], tables)):
        tables(ids).sum().backward()
        if n == 2:
            tables.load_state_dict(tables.state_dict())
    assert tables.ownership.planners == []


@pytest.mark.usefixtures("lanes_on_cpu")
def test_a_batch_of_more_keys_than_cells_is_refused():
    tables = hotbed.EmbeddingTables({"a": Table(4000, 3)}, cache=0.005)
    loader = [torch.arange(300).reshape(-1, 1).contiguous() for _ in range(3)]
    with pytest.raises(BudgetError, match="one batch needs 300 rows at once, but the cache has 20 slots"):
        next(iter(hotbed.prefetch(loader, tables)))


@pytest.mark.usefixtures("lanes_on_cpu")
def test_the_index_has_room_for_all_batches_that_arrive_together():
    """Batches of one id, then eight at once of 64 new ones each: room was made for one of them."""
    size = 64
    same = [torch.zeros(size, 1, dtype=torch.int64) for _ in range(20)]
    new = [torch.arange(1 + size * n, 1 + size * (n + 1)).reshape(-1, 1) for n in range(16)]
    tables = hotbed.EmbeddingTables({"a": Table(4000, 2)}, optim.SGD(lr=0.1), cache=size / 4000)
    trained = 0
    for ids in hotbed.prefetch(same + new + same[:8], tables, window=8, look_ahead=8):
        tables(ids).sum().backward()
        trained += 1
    assert trained == 44
    cache = tables.caches[0].cache
    cache.check_integrity()
    assert (cache.index.has_room(0, 0), cache.index._expected) == (True, 0)


@pytest.mark.usefixtures("lanes_on_cpu")
def test_batches_arrive_one_by_one_where_a_bounded_index_has_no_room_for_all():
    """The index does not grow for what would fit after the window is planned."""
    draw = torch.Generator().manual_seed(0)
    loader = [torch.randperm(4000, generator=draw)[:16].reshape(-1, 1) for _ in range(24)]
    tables = hotbed.EmbeddingTables({"a": Table(4000, 2)}, optim.SGD(lr=0.1), hbm=40 * (16 + 80))
    cache = tables.caches[0].cache
    before = cache.parts()[0].key.shape[0]
    for ids in hotbed.prefetch(loader, tables, window=2, look_ahead=4):
        tables(ids).sum().backward()
    assert cache.parts()[0].key.shape[0] == before
    cache.check_integrity()


@pytest.mark.usefixtures("lanes_on_cpu")
def test_batches_that_arrive_together_know_their_own_number_of_keys(monkeypatch):
    draw, found, num_keys = torch.Generator().manual_seed(0), [], RecordedPlanner.num_keys

    def counted(planner, batch):
        counts = num_keys(planner, batch)
        found.append((counts, [batch.batch.unique().shape[0]]))
        return counts

    monkeypatch.setattr(RecordedPlanner, "num_keys", counted)
    loader = [torch.randint(0, 1 + n, (32, 1), generator=draw) for n in range(24)]
    tables = hotbed.EmbeddingTables({"a": Table(200, 3)}, optim.SGD(lr=0.1), cache=0.6)
    for ids in hotbed.prefetch(loader, tables, window=4, look_ahead=4):
        tables(ids).sum().backward()
    assert len(found) >= len(loader)
    assert all(counts == distinct for counts, distinct in found)


@pytest.mark.usefixtures("lanes_on_cpu")
def test_counts_begin_at_zero_after_a_batch_of_another_size(monkeypatch):
    """The row of counts of the next arrival was cleared for another number: it held counts of a ring ago."""
    for module in ("hotbed.ops.index.recorded", "hotbed.cache.recorded_planner"):
        monkeypatch.setattr(f"{module}.ARRIVALS", 8)
    draw = torch.Generator().manual_seed(0)
    sizes = ([30] * 5 + [11]) * 3
    loader = [torch.randperm(200, generator=draw)[:size].reshape(-1, 1).contiguous() for size in sizes]
    tables = hotbed.EmbeddingTables({"a": Table(200, 3)}, optim.SGD(lr=0.1), cache=0.25)
    trained = 0
    for ids in hotbed.prefetch(loader, tables, window=1, look_ahead=3):
        tables(ids).sum().backward()
        trained += 1
    assert trained == len(loader)  # not refused as too large for 50 slots
    tables.caches[0].cache.check_integrity()


@pytest.mark.usefixtures("lanes_on_cpu")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("look_ahead", [1, 2, 6])
def test_a_bad_id_is_reported_at_its_turn(late, look_ahead, monkeypatch):
    from hotbed.ops.inputs.triton import Descriptions

    found_bad = Descriptions.found_bad.fget
    seen = [False]

    def one_look_late(maker):  # the device is one launch behind
        seen.append(found_bad(maker))
        return seen[-2]

    if late:
        monkeypatch.setattr(Descriptions, "found_bad", property(one_look_late))
    tables = hotbed.EmbeddingTables({"a": Table(100, 2)}, optim.SGD(lr=0.1), cache=0.5)
    loader = [torch.tensor([[n], [n + 1]]) for n in range(12)]
    good = [ids.clone() for ids in loader]
    loader[5][1, 0] = 777

    def train(loader):
        trained.clear()
        for ids in hotbed.prefetch(loader, tables, window=1, look_ahead=look_ahead):
            tables(ids).sum().backward()
            trained.append(ids)

    trained = []
    with pytest.raises(IdError, match="777"):
        train(loader)
    assert len(trained) in (3, 4, 5)  # windows are planned up to two ahead
    seen[:] = [False]
    train(good)  # nothing is left of it
    assert len(trained) == 12
    tables.caches[0].cache.check_integrity()


@pytest.mark.usefixtures("lanes_on_cpu")
def test_few_planners_are_kept():
    """One for the largest batch of each kind and window; those used last stay."""
    tables = hotbed.EmbeddingTables({"a": Table(100, 2)}, optim.SGD(lr=0.1), cache=0.5)

    def feed(size, window):
        for ids in hotbed.prefetch([torch.arange(size).reshape(-1, 1)], tables, window=window):
            tables(ids).sum().backward()
        return [(planner.window, planner.capacities[0].num_samples) for planner in tables.ownership.planners]

    assert [feed(size, 1) for size in (1, 5, 3)] == [[(1, 1)], [(1, 5)], [(1, 5)]]
    for window in (2, 3, 4, 1):
        found = feed(2, window)
    assert found == [(2, 2), (3, 2), (4, 2), (1, 5)]
    assert feed(2, 5) == [(3, 2), (4, 2), (1, 5), (5, 2)]


@pytest.mark.usefixtures("lanes_on_cpu")
@pytest.mark.parametrize("touched", [False, True])
def test_a_snapshot_is_of_its_moment_while_compiled_transfers_overwrite_its_rows(touched):
    """A compiled transfer moves rows without asking; nothing is copied when the snapshot is taken."""
    tables = hotbed.EmbeddingTables({"a": Table(40, 3), "b": Table(25, 3)}, optim.Adagrad(lr=0.1), cache=0.3)
    loader = [ids[:, :2].contiguous() for ids in batches(30, 6)]
    with tables.snapshot() as snapshot:
        snapshot.commit()
    kept = 0
    for number, ids in enumerate(hotbed.prefetch(loader, tables, window=2)):
        tables(ids).pow(2).sum().backward()
        if number == 9:
            expected = {name: value.clone() for name, value in tables.state_dict().items()}
            snapshot = tables.snapshot(touched)
            held = snapshot._held[0]
            assert not held._kept
    kept = sum(keys.size for keys, _ in held._kept)
    assert kept > 0
    seen = 0
    with snapshot:
        for table, ids, columns, _ in snapshot.parts():
            seen += ids.shape[0]
            for name, column in columns.items():
                assert torch.equal(column, expected[f"{table}.{name}"][ids]), (table, name)
    assert seen == len(held) > kept
