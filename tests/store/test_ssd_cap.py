"""The cap on bytes: never exceeded, not for a moment, and reaching it is an error that costs no row."""

import errno
import os
import threading

import pytest
import torch

from hotbed.errors import StoreError
from hotbed.store.ssd.format import record_bytes
from tests.store.test_ssd import SEGMENT, WIDTH, contents, first, folder_bytes, open_store, refusal


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A store whose folder is measured after every write to a file, with nothing else going on in it."""
    cap, most = 16 * SEGMENT, []
    store = open_store(tmp_path, num_rows=1000, max_bytes=cap)
    write, alone = os.pwrite, threading.Lock()

    def pwrite(handle, data, offset):
        with alone, store._segments.lock:  # files are deleted under this lock
            written = write(handle, data, offset)
            most.append(folder_bytes(tmp_path))
            return written

    monkeypatch.setattr(os, "pwrite", pwrite)
    yield store, cap, most
    store.close()


def test_the_cap_holds_at_every_moment(watched):
    store, cap, most = watched
    random = torch.Generator().manual_seed(1)
    for _ in range(300):
        keys = torch.randperm(30, generator=random)[: int(torch.randint(1, 12, (), generator=random))]
        store.write(keys, first(keys))
    store._compaction.wait()
    assert len(most) > 600
    assert cap - 3 * SEGMENT < max(most) <= cap
    assert len(contents(store)) == 30
    store.check_integrity()


def test_reaching_the_cap_names_the_way_out_and_loses_nothing(watched):
    store, cap, most = watched
    model = {}
    refused = ""
    while not refused:
        keys = torch.tensor([len(model)])
        refused = refusal(store.write, keys, first(keys))
        if not refused:
            model[len(model)] = first(keys)[0].tolist()
    for part in ("reached its cap", "live rows take", "stale ones", "kept for compaction", "larger ssd=", "expire"):
        assert part in refused
    assert max(most) <= cap
    assert len(model) >= 14 * 4  # all but the segment kept for compaction, and its headers
    assert contents(store) == model
    store.forget(torch.arange(8))  # expiry makes room
    store.write(torch.tensor([999, 998]), first(torch.tensor([999, 998])))
    store.check_integrity()


def test_a_writer_without_room_compacts_first(watched, monkeypatch):
    store, cap, most = watched
    monkeypatch.setattr(store._compaction, "start_behind", lambda: None)
    keys = torch.arange(20)
    for step in range(30):
        store.write(keys, first(keys) + step)
    assert store.counts.compactions > 50
    assert max(most) <= cap
    assert list(contents(store).values()) == (first(keys) + 29).tolist()
    store.check_integrity()


def test_rows_leave_a_segment_for_compaction(watched, tmp_path, monkeypatch):
    """Whatever goes on behind: where all rows are live nothing is compacted, and yet there is room to do it."""
    store, cap, _ = watched
    monkeypatch.setattr(store._compaction, "start_behind", lambda: None)
    count = 0
    while not refusal(store.write, torch.tensor([count]), first(torch.tensor([count]))):
        count += 1
    assert cap - 2 * SEGMENT < folder_bytes(tmp_path) <= cap - SEGMENT
    store.forget(torch.arange(0, count, 2))  # half of every segment
    store.write(torch.tensor([999]), first(torch.tensor([999])))
    assert store.counts.compactions > 0
    assert folder_bytes(tmp_path) <= cap
    assert set(contents(store)) == {*range(1, count, 2), 999}


def test_one_write_larger_than_the_cap(watched):
    store, _, _ = watched
    keys = torch.arange(100)
    with pytest.raises(StoreError, match="reached its cap"):
        store.write(keys, first(keys))
    assert store.num_written == 0
    assert store.sizes().ssd_bytes == 0


def test_a_checkpoint_in_progress_keeps_its_bytes_and_says_so(watched):
    store, cap, most = watched
    keys = torch.arange(25)
    store.write(keys, first(keys))
    frozen = store.freeze()
    store.write(keys, first(keys) + 1)
    with pytest.raises(StoreError, match="a checkpoint in progress holds"):
        store.write(keys, first(keys) + 2)
    assert all(path.exists() for path in frozen.paths)
    frozen.release()
    store.write(keys, first(keys) + 100)
    assert max(most) <= cap
    assert list(contents(store).values()) == (first(keys) + 100).tolist()


def test_a_cap_too_small_for_anything(tmp_path):
    with pytest.raises(StoreError, match=r"ssd=.* is too little: three segments"):
        open_store(tmp_path, max_bytes=2 * SEGMENT)


def test_room_is_given_back_after_a_failed_write(watched, monkeypatch):
    store, _, _ = watched
    keys = torch.arange(40)
    store.write(keys[:6], first(keys[:6]))
    before = store.sizes(), store.counts
    write, calls = os.pwrite, []

    def full(handle, data, offset):
        calls.append(offset)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="No space left on device"):
        store.write(keys, first(keys))
    assert (store.sizes(), store.counts) == before
    store.check_integrity()
    store.write(keys, first(keys))
    assert store.num_written == 40
    assert record_bytes(WIDTH) * 40 <= store.sizes().ssd_live_bytes
