"""The ssd store beside a dict: tiny segments, so that every few writes seal, compact and delete."""

import gc
import os
import resource
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotbed.errors import StoreError
from hotbed.store.ssd import SsdStore, frozen_items
from hotbed.store.ssd.format import HEADER_BYTES, record_bytes
from hotbed.store.ssd.kernels import BLOCK

WIDTH = 3
NUM_ROWS = 20
SEGMENT = HEADER_BYTES + 4 * record_bytes(WIDTH)


def first(keys):
    return keys.unsqueeze(1).float() * torch.ones(1, WIDTH) + 0.5


def open_store(folder, num_rows=NUM_ROWS, max_bytes=40 * SEGMENT, segment_bytes=SEGMENT):
    return SsdStore(folder, num_rows, WIDTH, first, max_bytes=max_bytes, segment_bytes=segment_bytes)


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "rows")
    yield store
    store.close()


def contents(store):
    items = [pair for keys, records in store.items(3) for pair in zip(keys.tolist(), records.tolist())]
    assert [key for key, _ in items] == sorted(key for key, _ in items)
    return dict(items)


def folder_bytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def refusal(function, *arguments):
    """The message of the StoreError, or nothing."""
    try:
        function(*arguments)
    except StoreError as error:
        return str(error)
    return ""


KEYS = st.sets(st.integers(0, NUM_ROWS - 1), min_size=1).map(sorted).map(torch.tensor)


class BesideADict(RuleBasedStateMachine):
    """Any mix of verbs gives what a dict gives; a write without room changes nothing."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.store = self.open()
        self.model, self.expected = {}, set()
        self.saved, self.held = [], []
        self.step = 0

    def open(self):
        return open_store(self.root / "rows", max_bytes=9 * SEGMENT)

    @rule(keys=KEYS)
    def write(self, keys):
        self.step += 1
        records = torch.arange(keys.shape[0] * WIDTH).view(-1, WIDTH) + 100.0 * self.step
        if refused := refusal(self.store.write, keys, records):
            assert "reached its cap" in refused
            return
        self.model |= dict(zip(keys.tolist(), records.tolist()))
        self.expected -= set(keys.tolist())

    @rule(keys=KEYS)
    def expect(self, keys):
        self.store.expect(keys)
        self.expected |= set(keys.tolist())

    @rule(keys=KEYS)
    def forget(self, keys):
        self.store.forget(keys)
        for key in keys.tolist():
            self.model.pop(key, None)
            self.expected.discard(key)

    @rule(keys=KEYS)
    def read(self, keys):
        out = torch.full((keys.shape[0], WIDTH), torch.nan)
        self.store.read(keys, out)
        assert out.tolist() == [self.model.get(key, [key + 0.5] * WIDTH) for key in keys.tolist()]

    @rule(keys=KEYS, shuffle=st.randoms(use_true_random=False))
    def fetch(self, keys, shuffle):
        order = keys.tolist()
        shuffle.shuffle(order)
        out = torch.full((len(order) + 1, WIDTH), torch.nan)
        source = torch.full([len(order)], -7, dtype=torch.int32)
        num_found, late = self.store.fetch(torch.tensor(order), out, source)
        assert [order[i] for i in late.tolist()] == [key for key in order if key in self.expected]
        there = [key for key in order if key in self.model and key not in self.expected]
        assert num_found == len(there)
        assert source.tolist() == [there.index(key) if key in there else -1 for key in order]
        assert out[:num_found].tolist() == [self.model[key] for key in there]
        assert bool(out[num_found:].isnan().all())

    @rule()
    def freeze(self):
        self.held.append((self.store.freeze(), dict(self.model)))

    @precondition(lambda self: self.held)
    @rule()
    def link(self):
        frozen, model = self.held.pop(0)
        folder = self.root / f"saved{len(self.saved)}"
        frozen.link_into(folder)
        frozen.release()
        self.saved.append((folder, model))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def adopt(self, data):
        folder, model = data.draw(st.sampled_from(self.saved))
        self.model = dict(model)
        if refused := refusal(self.store.adopt, folder):
            assert "does not fit under the cap" in refused
            assert self.held
            self.model = {}
        self.expected = set()

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def read_saved(self, data):
        folder, model = data.draw(st.sampled_from(self.saved))
        found = {k: r for keys, records in frozen_items(folder) for k, r in zip(keys.tolist(), records.tolist())}
        assert found == model

    @precondition(lambda self: not self.held)
    @rule()
    def reopen(self):
        self.store.close()
        self.store = self.open()
        self.model, self.expected = {}, set()

    @rule()
    def wait(self):
        self.store._compaction.wait()
        self.store.check_integrity()

    @invariant()
    def cap_holds(self):
        assert self.store.sizes().ssd_bytes <= 9 * SEGMENT

    @invariant()
    def counts_rows(self):
        assert self.store.num_written == len(self.model)

    def teardown(self):
        self.store._compaction.wait()
        self.store.check_integrity()
        assert contents(self.store) == self.model
        for frozen, _ in self.held:
            frozen.release()
        self.store.close()
        assert [path.name for path in (self.root / "rows").iterdir()] == ["lock"]
        shutil.rmtree(self.root)


TestBesideADict = BesideADict.TestCase
TestBesideADict.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 33, 36, 131])
def test_any_width(tmp_path, width):
    store = SsdStore(tmp_path, 5000, width, lambda keys: torch.zeros(keys.numel(), width), max_bytes=1 << 24)
    keys, records = torch.randperm(5000), torch.randn(5000, width)
    store.write(keys, records)
    some = torch.randperm(5000)[:1000]
    out = torch.full((1000, width), torch.nan)
    store.read(some, out)
    expected = torch.empty(5000, width)
    expected[keys] = records
    assert torch.equal(out, expected[some])
    store.close()


def test_bits_survive_that_are_no_numbers(store):
    words = torch.tensor([[0x7FC00001, -1, -(2**31)]], dtype=torch.int32)
    store.write(torch.tensor([7]), words.view(torch.float32))
    out = torch.empty(1, WIDTH)
    store.read(torch.tensor([7]), out)
    assert torch.equal(out.view(torch.int32), words)


def test_half_stale_segments_are_rewritten(store):
    keys = torch.arange(NUM_ROWS)
    for step in range(50):
        store.write(keys, first(keys) + step)
    store._compaction.wait()  # or the background, which is about to end, may not look once more
    store.write(keys[:10], first(keys[:10]))
    store._compaction.wait()
    sizes = store.sizes()
    assert store.counts.compactions > 40
    assert sizes.live_share >= 0.5
    assert sizes.ssd_bytes < 20 * SEGMENT
    assert sizes.ssd_live_bytes == NUM_ROWS * record_bytes(WIDTH)
    store.check_integrity()


def test_written_bytes_count_compaction_and_headers(tmp_path):
    store = open_store(tmp_path)
    keys = torch.arange(4)
    store.write(keys, first(keys))
    assert store.counts.bytes_written == SEGMENT == folder_bytes(tmp_path)
    store.write(keys[:3], first(keys[:3]))  # leaves one of four live: it is copied
    store._compaction.wait()
    stride = record_bytes(WIDTH)
    assert store.counts.bytes_compacted == HEADER_BYTES + stride
    assert store.counts.bytes_written == SEGMENT + 2 * HEADER_BYTES + 4 * stride
    store.close()


def test_nothing_is_compacted_any_more_once_it_is_stopped(store):
    keys = torch.arange(4)
    store.write(keys, first(keys))
    store._compaction.stop()
    store.write(keys[:3], first(keys[:3]))  # leaves one of four live
    assert store._compaction.candidate() is not None
    store._compaction.wait()
    assert store.counts.compactions == 0


def test_many_short_segments_are_joined(store):
    for step in range(200):
        keys = torch.tensor([step % NUM_ROWS])
        store.write(keys, first(keys))
        store.freeze().release()
    store._compaction.wait()
    assert store.sizes().ssd_segments < 40
    store.check_integrity()


def test_duplicate_keys_keep_the_last(store):
    store.write(torch.tensor([3, 3, 3]), torch.arange(9.0).view(3, 3))
    assert contents(store) == {3: [6.0, 7.0, 8.0]}
    store.check_integrity()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_key_space_of_2_to_the_36_takes_no_memory(tmp_path):
    before = resident_bytes()
    store = open_store(tmp_path, num_rows=1 << 36, max_bytes=1 << 22, segment_bytes=1 << 20)
    keys = torch.tensor([0, 5, 1 << 20, (1 << 36) - 1])
    store.write(keys, first(keys))
    assert list(contents(store)) == keys.tolist()
    assert resident_bytes() - before < 100e6
    store.close()


def test_keys_outside_are_refused(store):
    for key in (-1, NUM_ROWS):
        with pytest.raises(IndexError, match=f"key {key} at position 1 is not in 0..19"):
            store.read(torch.tensor([0, key]), torch.empty(2, WIDTH))
    with pytest.raises(ValueError, match=r"float32 \[U, 3\]"):
        store.write(torch.tensor([0]), torch.empty(1, WIDTH + 1))


def test_readers_and_compaction_at_once(tmp_path):
    """Threads read all rows while others are overwritten and segments come and go: every read is whole and of its key."""
    num_rows = 400
    segment = HEADER_BYTES + 16 * record_bytes(WIDTH)
    store = open_store(tmp_path, num_rows=num_rows, max_bytes=400 * segment, segment_bytes=segment)
    all_keys = torch.arange(num_rows)

    def records(step):
        return torch.stack([all_keys.float(), torch.full([num_rows], float(step)), all_keys + float(step)], dim=1)

    store.write(all_keys, records(0))
    done, wrong, rounds = threading.Event(), [], []

    def hammer():
        out = torch.empty(num_rows, WIDTH)
        last = torch.zeros(num_rows)
        while not done.is_set():
            store.read(all_keys, out)
            good = (out[:, 0] == all_keys) & (out[:, 2] == out[:, 0] + out[:, 1]) & (out[:, 1] >= last)
            wrong.extend(out[~good].tolist())
            last = out[:, 1].clone()
            rounds.append(1)

    threads = [threading.Thread(target=hammer) for _ in range(3)]
    for thread in threads:
        thread.start()
    step = 0
    try:
        while step < 100 or len(rounds) < 30:
            step += 1
            some = torch.randperm(num_rows)[:100]
            store.write(some, records(step)[some])
    finally:
        done.set()
        for thread in threads:
            thread.join()
    store._compaction.wait()
    assert wrong == []
    assert store.counts.compactions > 100
    store.check_integrity()
    store.close()


def test_a_store_that_is_dropped_gives_its_files_back(tmp_path):
    gc.collect()  # what other tests have left gives back its own now
    before = len(os.listdir("/proc/self/fd"))
    store = open_store(tmp_path)
    store.write(torch.arange(9), first(torch.arange(9)))
    assert len(os.listdir("/proc/self/fd")) > before
    del store
    assert len(os.listdir("/proc/self/fd")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_record_is_laid_out_as_documented(store):
    store.write(torch.tensor([5, 9]), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    (path,) = store.freeze().paths
    data = path.read_bytes()
    assert data[:8] == b"HOTBEDSG"
    records = np.frombuffer(data, [("key", "<i8"), ("check", "<u8"), ("row", "<f4", 3), ("pad", "<u4")], -1, 64)
    assert records["key"].tolist() == [5, 9]
    assert records["row"].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert records["pad"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "records",
    [
        torch.zeros(2, WIDTH),  # fewer than keys
        torch.zeros(3, WIDTH, dtype=torch.float64),
        torch.zeros(3, WIDTH + 1),
        torch.zeros(3, 2 * WIDTH)[:, ::2],
    ],
    ids=["fewer", "float64", "wide", "apart"],
)
def test_memory_that_does_not_fit_is_refused(store, records):
    keys = torch.arange(3)
    store.write(keys, torch.ones(3, WIDTH))
    for call in (store.read, store.write):
        with pytest.raises(ValueError, match=r"must be contiguous, int64 \[U\] and float32 \[U, 3\]"):
            call(keys, records)
    assert contents(store) == {key: [1.0] * WIDTH for key in range(3)}


def test_records_larger_than_a_piece_are_written_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr("hotbed.store.ssd.append._PIECE", record_bytes(WIDTH) - 1)
    store = open_store(tmp_path)
    store.write(torch.arange(7), torch.arange(7.0)[:, None].expand(7, WIDTH).contiguous())
    assert contents(store) == {key: [float(key)] * WIDTH for key in range(7)}
    store.close()


def test_a_file_stays_while_somebody_may_read_it_who_began_before_it_was_dead(store):
    store.write(torch.arange(3), torch.ones(3, WIDTH))
    segments = store._segments
    segment = next(iter(segments))
    with segments.reading():
        segments.retire(segment)
        with segments.reading():  # one that began later, and does not need it
            segments.reap()
            assert segment.path.exists()
        assert segment.path.exists()
    assert not segment.path.exists()


def test_a_dead_file_goes_with_its_store_whatever_an_interrupted_reader_left(tmp_path):
    store = open_store(tmp_path)
    store.write(torch.arange(9), first(torch.arange(9)))
    reader = store._segments.reading()
    reader.__enter__()  # and never left
    store._segments.retire(next(iter(store._segments)))
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_nothing_is_left_of_a_block_of_keys_that_is_cleared(tmp_path):
    last = 1 << BLOCK
    store = open_store(tmp_path, num_rows=last + 1)
    keys = torch.tensor([0, last - 2, last - 1, last])
    store.write(keys, torch.ones(4, WIDTH))
    store.clear()
    assert contents(store) == {}
    out = torch.empty(4, WIDTH)
    store.read(keys, out)
    assert torch.equal(out, first(keys))
    store.close()
