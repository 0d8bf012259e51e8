"""Memory over ssd beside a dict, with room for a few rows in memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.cache import make_policy
from hotbed.errors import StoreError
from hotbed.store import SsdStore, TieredStore
from hotbed.store.counts import TierCounts
from hotbed.store.ssd.format import HEADER_BYTES, record_bytes
from hotbed.store.tier_kernels import chooser

NUM_ROWS, WIDTH = 40, 4
SEGMENT = HEADER_BYTES + 20 * record_bytes(WIDTH)


def first(keys):
    return keys.unsqueeze(1).float() * torch.ones(1, WIDTH) + 0.5


def open_store(folder, num_slots=6, policy="lfu", max_bytes=1 << 20, segment_bytes=SEGMENT):
    ssd = SsdStore(folder, NUM_ROWS, WIDTH, first, max_bytes=max_bytes, segment_bytes=segment_bytes)
    return TieredStore(ssd, NUM_ROWS, WIDTH, num_slots, make_policy(policy), first)


def fetched(store, keys):
    """{key: record} of the rows that were written, the keys that have their first value, and those that are late."""
    out, source = torch.full((len(keys), WIDTH), torch.nan), torch.empty(len(keys), dtype=torch.int32)
    found, late = store.fetch(torch.tensor(keys), out, source)
    rows = {key: out[at].tolist() for key, at in zip(keys, source.tolist()) if at >= 0}
    assert len(rows) == found
    late = {keys[i] for i in late.tolist()}
    return rows, {key for key in keys if key not in rows and key not in late}, late


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_against_a_dict(tmp_path_factory, data):
    store, model = open_store(tmp_path_factory.mktemp("tiers"), data.draw(st.integers(1, 9))), {}
    some = st.sets(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=25).map(sorted)
    for step in range(data.draw(st.integers(1, 12))):
        keys = data.draw(some)
        what = data.draw(st.sampled_from(["write", "write", "fetch", "read", "forget", "flush", "expect", "foresee"]))
        if what == "write":
            records = torch.rand(len(keys), WIDTH) + step
            store.write(torch.tensor(keys), records)
            model |= dict(zip(keys, records.tolist()))
        elif what == "fetch":
            rows, absent, late = fetched(store, keys)
            assert rows == {key: model[key] for key in keys if key in model}
            assert absent == set(keys) - model.keys()
            assert not late
        elif what == "read":
            out = torch.full((len(keys), WIDTH), torch.nan)
            store.read(torch.tensor(keys), out)
            assert out.tolist() == [model.get(key, first(torch.tensor([key]))[0].tolist()) for key in keys]
        elif what == "forget":
            store.forget(torch.tensor(keys))
            model = {key: record for key, record in model.items() if key not in keys}
        elif what == "flush":
            store.flush()
        elif what == "foresee":
            store.foresee(np.array([*keys, -1, NUM_ROWS, keys[0], 2**60]), data.draw(st.integers(0, 3)))
            while data.draw(st.booleans()) and store.work_ahead():
                store.check_integrity()
            store.advance(data.draw(st.integers(0, 2)))
        else:
            store.expect(torch.tensor(keys))
            rows, _, late = fetched(store, list(range(NUM_ROWS)))
            assert late == set(keys)
            assert rows == {key: record for key, record in model.items() if key not in keys}
            records = torch.rand(len(keys), WIDTH) + step
            store.write(torch.tensor(keys), records)
            model |= dict(zip(keys, records.tolist()))
        store.check_integrity()
    assert {k: r for keys, rows in store.items(7) for k, r in zip(keys.tolist(), rows.tolist())} == model
    store.close()


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_rows_in_use_stay_in_memory(tmp_path, policy):
    store = open_store(tmp_path, num_slots=8, policy=policy)
    hot = torch.arange(4)
    store.write(hot, torch.ones(4, WIDTH))
    for step in range(30):
        store.write(hot, torch.full((4, WIDTH), float(step)))
        cold = torch.arange(4, NUM_ROWS)[torch.tensor([step % 36, (step * 7 + 3) % 36])].sort().values
        store.write(cold, torch.zeros(2, WIDTH))
    before = store.counts
    fetched(store, hot.tolist())
    assert store.counts.from_memory - before.from_memory == 4
    assert store.counts.from_ssd == before.from_ssd
    store.close()


def test_a_full_ssd_loses_nothing(tmp_path):
    segment = HEADER_BYTES + 10 * record_bytes(WIDTH)
    store, written = open_store(tmp_path, 2, max_bytes=3 * segment, segment_bytes=segment), {}
    refused = 0
    for key in np.random.default_rng(0).permutation(NUM_ROWS).tolist():
        record = torch.rand(1, WIDTH)
        try:
            store.write(torch.tensor([key]), record)
            written[key] = record[0].tolist()
        except StoreError:
            refused += 1
    assert refused
    store.check_integrity()
    rows, absent, _ = fetched(store, list(range(NUM_ROWS)))
    assert rows == written
    assert len(absent) == refused
    store.close()


def test_a_row_on_its_way_stays_expected_when_its_slot_is_taken(tmp_path):
    store = open_store(tmp_path, num_slots=2)
    store.write(torch.tensor([0]), torch.ones(1, WIDTH))
    store.expect(torch.tensor([0]))
    store.write(torch.tensor([1, 2, 3, 4]), torch.ones(4, WIDTH))  # the row of key 0 leaves for the ssd
    assert fetched(store, [0]) == ({}, set(), {0})
    store.write(torch.tensor([0]), torch.full((1, WIDTH), 2.0))
    assert fetched(store, [0]) == ({0: [2.0] * WIDTH}, set(), set())
    store.check_integrity()


def test_every_row_asked_is_counted_by_its_tier(tmp_path):
    """The price of a segment's header aside, bytes are those of records."""
    store = open_store(tmp_path, num_slots=4)
    store.write(torch.arange(4), torch.ones(4, WIDTH))
    assert store.counts == TierCounts()
    store.write(torch.arange(4, 10), torch.ones(6, WIDTH))  # six of the ten rows leave for the ssd
    stride = record_bytes(WIDTH)
    assert store.counts == TierCounts(to_ssd=6, bytes_written=HEADER_BYTES + 6 * stride)
    fetched(store, list(range(12)))  # two were never written
    once = store.counts
    assert (once.from_memory, once.from_ssd, once.bytes_from_memory) == (4, 6, 4 * WIDTH * 4)
    assert once.bytes_read >= 6 * stride
    store.expect(torch.arange(3))
    assert fetched(store, [0, 1, 2])[2] == {0, 1, 2}
    assert store.counts == once  # late rows are counted when they are read
    store.write(torch.arange(3), torch.ones(3, WIDTH))
    written = store.counts
    store.read(torch.arange(12), torch.empty(12, WIDTH))
    assert store.counts.minus(written)[:3] == (4, 6, 0)
    assert store.counts.minus(written).requested == 10
    store.flush()
    assert store.counts.to_ssd == written.to_ssd + 4
    assert (store.num_slots, store.num_slots_used, store.num_in_memory) == (4, 4, 4)
    store.close()


def test_rows_of_a_checkpoint_are_back_in_the_slots_they_had(tmp_path):
    store = open_store(tmp_path, num_slots=4)
    records = torch.rand(10, WIDTH)
    store.write(torch.arange(10), records)
    store.write(torch.tensor([0, 1]), records[:2])  # key 0 is in memory
    store.flush()
    held = store.contents()
    assert 0 in held.keys
    store._empty()
    assert store.restore_contents(held)
    store.check_integrity()
    assert store.num_in_memory == 4
    out = torch.empty(10, WIDTH)
    store.read(torch.arange(10), out)
    assert torch.equal(out, records)
    store.close()


def all_on_ssd(folder, num_slots):
    store = open_store(folder, num_slots)
    store.write(torch.arange(NUM_ROWS), torch.arange(NUM_ROWS).float()[:, None].expand(-1, WIDTH).contiguous())
    store.flush()
    store.tier.empty(np.flatnonzero(store.tier.key_of_slot >= 0))
    return store


def work_all(store):
    while store.work_ahead():
        store.check_integrity()


def test_rows_that_are_foreseen_are_in_memory_when_they_are_requested(tmp_path):
    store = all_on_ssd(tmp_path, 20)
    before = store.counts
    store.foresee(np.arange(8), 0)
    work_all(store)
    brought = store.counts.minus(before)
    assert (brought.ahead, brought.from_ssd, brought.from_memory, brought.waits) == (8, 8, 0, 0)
    store.advance(1)
    rows, _, _ = fetched(store, list(range(10)))
    assert rows == {key: [float(key)] * WIDTH for key in range(10)}
    counts = store.counts.minus(before)
    assert (counts.ahead, counts.from_ssd, counts.from_memory, counts.waits) == (8, 10, 0, 1)
    assert counts.requested == 10
    fetched(store, list(range(8)))
    assert store.counts.minus(before).from_memory == 8  # once more: memory had them
    store.close()


def test_foreseen_rows_stay_until_their_batch_is_planned(tmp_path):
    store = all_on_ssd(tmp_path, 12)
    store.foresee(np.arange(4), 1)
    work_all(store)
    here = lambda: set(np.flatnonzero(store.tier.slot_of_key[:4] > 0).tolist())  # noqa: E731
    for step in range(12):
        store.write(torch.arange(10, 14) + step, torch.ones(4, WIDTH))
        assert here() == {0, 1, 2, 3}
    store.advance(1)
    store.write(torch.arange(10, 14), torch.ones(4, WIDTH))
    assert here() == {0, 1, 2, 3}  # one batch is before it
    store.advance(1)
    for step in range(12):
        store.write(torch.arange(10, 14) + step, torch.ones(4, WIDTH))
    assert not here()
    store.close()


def test_rows_ahead_take_half_of_memory_in_the_order_of_their_use(tmp_path):
    store = all_on_ssd(tmp_path, 16)
    for distance in range(4):
        store.foresee(np.arange(4 * distance, 4 * distance + 4), distance)
    work_all(store)
    assert np.flatnonzero(store.tier.slot_of_key > 0).tolist() == list(range(8))
    store.advance(1)
    work_all(store)
    assert set(range(4, 12)) <= set(np.flatnonzero(store.tier.slot_of_key > 0).tolist())
    store.advance(3)
    work_all(store)
    assert store.counts.ahead == 12  # the last batch was planned before there was room
    store.close()


def test_a_row_on_its_way_is_not_read_from_the_ssd_meanwhile(tmp_path):
    """What the ssd has is older."""
    store = all_on_ssd(tmp_path, 8)
    store.expect(torch.tensor([3]))
    store.foresee(np.array([3, 4]), 0)
    work_all(store)
    assert fetched(store, [3, 4]) == ({4: [4.0] * WIDTH}, set(), {3})
    store.write(torch.tensor([3]), torch.zeros(1, WIDTH))
    assert fetched(store, [3])[0] == {3: [0.0] * WIDTH}
    store.close()


def test_a_read_ahead_that_fails_changes_nothing_and_is_raised(tmp_path, monkeypatch):
    store = all_on_ssd(tmp_path, 20)
    store.foresee(np.arange(8), 0)

    def broken(*_):
        raise StoreError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(store.ssd, "read_into", broken)
        with pytest.raises(StoreError, match="broken"):
            work_all(store)
    store.check_integrity()
    assert store.num_in_memory == 0
    assert fetched(store, list(range(8)))[0] == {key: [float(key)] * WIDTH for key in range(8)}
    store.close()


def test_counts_outlive_what_is_cleared(tmp_path):
    store = open_store(tmp_path, num_slots=2)
    for _ in range(30):
        store.write(torch.arange(NUM_ROWS), torch.rand(NUM_ROWS, WIDTH))
    before = store.counts
    assert before.compactions > 0
    assert before.bytes_written == store.counts.bytes_written > before.bytes_compacted > 0
    store.clear()
    assert store.counts.minus(before).bytes_written >= 0
    assert store.counts.to_ssd == before.to_ssd
    store.close()


@pytest.mark.parametrize(
    ("uses", "ages", "victims"),
    [
        ((100, 4, 50), (1, 1, 1), [1]),
        ((4, 100), (1, 1500), [1]),  # halved eleven times
        ((100, 4, 2, 90), (1, 130, 1, 1), [1, 2]),
        ((1, 2**30), (1, 128 * 40), [1]),  # halved no more than 31 times, and what is left counts as none
    ],
)
def test_rows_used_least_leave_and_old_uses_count_less(uses, ages, victims):
    clock, out = 10_000, np.zeros(len(victims), np.int64)
    last = clock - np.array(ages, np.int32)
    keys, kept = np.arange(len(uses)), np.zeros(len(uses), np.int32)
    info = np.stack([np.array(uses, np.int32), last, kept], axis=1)
    policy = make_policy("lfu")
    hand, count = chooser(policy)(keys, info, clock, policy.half_life, clock, 0, 0, len(victims), out)
    assert count == len(victims)
    assert sorted(out.tolist()) == victims
    assert hand == 0
