"""What disks, users and other processes do to a store: each a StoreError, and no row that is wrong."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hotbed.errors import StoreError
from hotbed.store.ssd import INDEX_NAME, frozen_items
from hotbed.store.ssd.format import HEADER_BYTES, record_bytes
from tests.store.test_ssd import SEGMENT, WIDTH, contents, first, open_store

STRIDE = record_bytes(WIDTH)
KEYS = torch.arange(10)


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "rows")
    store.write(KEYS, first(KEYS) + 1)
    yield store
    store._compaction._error = None
    store.close()


@pytest.fixture
def saved(store, tmp_path):
    """A folder of a checkpoint."""
    with store.freeze() as frozen:
        frozen.link_into(tmp_path / "saved")
    for path in (tmp_path / "saved").iterdir():  # of its own: damage must not reach the store
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    return tmp_path / "saved"


def read_all(store):
    out = torch.full((10, WIDTH), torch.nan)
    store.read(KEYS, out)
    return out


def flip(path, offset, mask=0x10):
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    with path.open("r+b") as file:
        file.write(data)


def refuse(monkeypatch, name, number, only=lambda *arguments: True):
    """Let an os function fail."""
    real = getattr(os, name)

    def failing(*arguments, **options):
        if only(*arguments):
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, failing)


@pytest.mark.parametrize("offset", range(2 * STRIDE))
def test_every_flipped_byte_of_a_record_is_noticed(store, offset):
    path = sorted((store._segments.folder).glob("*.rows"))[0]
    flip(path, HEADER_BYTES + offset)
    bad = offset // STRIDE
    with pytest.raises(StoreError) as caught:
        read_all(store)
    assert f"{path} is damaged: the record at byte {HEADER_BYTES + bad * STRIDE} (key {bad})" in str(caught.value)
    source = torch.empty(10, dtype=torch.int32)
    with pytest.raises(StoreError, match="does not match its checksum"):
        store.fetch(KEYS, torch.empty(10, WIDTH), source)
    others = torch.tensor([key for key in range(10) if key != bad])
    out = torch.empty(9, WIDTH)
    store.read(others, out)
    assert torch.equal(out, first(others) + 1)


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_is_noticed(store, bit):
    path = sorted((store._segments.folder).glob("*.rows"))[0]
    for offset in range(STRIDE):
        flip(path, HEADER_BYTES + offset, 1 << bit)
        with pytest.raises(StoreError, match="does not match its checksum"):
            read_all(store)
        flip(path, HEADER_BYTES + offset, 1 << bit)
    assert torch.equal(read_all(store), first(KEYS) + 1)


def test_right_bytes_in_a_wrong_place_are_noticed(store):
    """A record that overwrote its neighbour, or came from another segment, has a good checksum elsewhere."""
    one, two = sorted((store._segments.folder).glob("*.rows"))[:2]
    for source in (one.read_bytes()[HEADER_BYTES + STRIDE :], two.read_bytes()[HEADER_BYTES:]):
        with one.open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(source[:STRIDE])
        with pytest.raises(StoreError, match="key 0"):
            read_all(store)


def test_a_truncated_segment(store):
    path = sorted((store._segments.folder).glob("*.rows"))[0]
    os.truncate(path, HEADER_BYTES + STRIDE + 5)
    with pytest.raises(StoreError, match=f"ends before byte {HEADER_BYTES}"):
        read_all(store)


def test_a_disk_that_cannot_be_read(store, tmp_path):
    segment = next(iter(store._segments))
    folder = os.open(tmp_path, os.O_RDONLY)  # reading it fails, as reading a broken disk does
    kept = os.dup(segment.handle)
    os.dup2(folder, segment.handle)
    with pytest.raises(StoreError, match=f"cannot be read at byte {HEADER_BYTES}: Is a directory"):
        read_all(store)
    os.dup2(kept, segment.handle)
    assert torch.equal(read_all(store), first(KEYS) + 1)
    os.close(kept)
    os.close(folder)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_cannot_be_written(store, monkeypatch, number):
    with monkeypatch.context() as patch:
        refuse(patch, "pwrite", number)
        with pytest.raises(StoreError, match=f"{os.strerror(number)}. The rows written before are unharmed"):
            store.write(KEYS, first(KEYS) + 2)
    assert torch.equal(read_all(store), first(KEYS) + 1)
    store.check_integrity()
    store.write(KEYS, first(KEYS) + 3)
    assert torch.equal(read_all(store), first(KEYS) + 3)


def test_short_writes_are_continued(store, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: write(handle, data[:7], offset))
    store.write(KEYS, first(KEYS) + 2)
    assert torch.equal(read_all(store), first(KEYS) + 2)


def test_a_full_file_system(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        store = open_store(disk / "rows", num_rows=10_000, max_bytes=1 << 20, segment_bytes=1 << 13)
        keys = torch.arange(500)
        store.write(keys, first(keys))
        with pytest.raises(StoreError, match="No space left on device"):
            store.write(torch.arange(10_000), first(torch.arange(10_000)))
        assert list(contents(store).values()) == first(keys).tolist()
        store.check_integrity()
        store.write(keys, first(keys) + 1)
        store._compaction.wait()  # it gives space back
        with suppress(OSError):
            (disk / "filler").write_bytes(bytes(1 << 20))
        with store.freeze() as frozen, pytest.raises(StoreError, match="No space left on device"):
            frozen.link_into(disk / "saved")
        store.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_folder_that_vanished(store):
    shutil.rmtree(store._segments.folder)
    with pytest.raises(StoreError, match=r"No such file or directory\. The rows written before are unharmed"):
        store.write(torch.arange(20), first(torch.arange(20)))
    assert torch.equal(read_all(store), first(KEYS) + 1)  # open files stay readable
    with store.freeze() as frozen, pytest.raises(StoreError, match="No such file or directory"):
        frozen.link_into(store._segments.folder.parent / "saved")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot write .*file/rows"):
        open_store(tmp_path / "file" / "rows")


def test_a_read_only_folder(tmp_path, monkeypatch):
    refuse(monkeypatch, "open", errno.EROFS)
    with pytest.raises(StoreError, match="Read-only file system"):
        open_store(tmp_path)


def test_a_second_store_on_the_folder(store):
    with pytest.raises(StoreError, match="in use by another store"):
        open_store(store._segments.folder)
    assert torch.equal(read_all(store), first(KEYS) + 1)


CHILD = """
import sys, os, torch
from pathlib import Path
from hotbed.store.ssd import SsdStore
store = SsdStore(Path(sys.argv[1]), 20, 3, lambda keys: torch.zeros(keys.numel(), 3), max_bytes=1 << 20, segment_bytes=256)
store.write(torch.arange(20), torch.ones(20, 3))
print("open", flush=True)
sys.stdin.readline()
"""


def test_a_second_process_and_what_a_killed_one_leaves(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        assert child.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match="in use by another store"):
            open_store(tmp_path)
        assert len(list(tmp_path.glob("*.rows"))) > 3
        child.kill()
        child.wait()
    assert len(list(tmp_path.glob("*.rows"))) > 3
    store = open_store(tmp_path)
    assert list(tmp_path.glob("*.rows")) == []
    assert store.num_written == 0
    store.close()


def damage_stale(store):
    """Make a sealed segment mostly stale, with a flipped bit in its last live record; compaction is told of neither."""
    folder = store._segments.folder
    path = sorted(folder.glob("*.rows"))[0]
    flip(path, HEADER_BYTES + 3 * STRIDE + 20)
    store.write(torch.arange(3), first(torch.arange(3)) + 2)
    return path


def test_an_error_behind_reaches_the_next_call_with_its_traceback(store):
    path = damage_stale(store)
    store._compaction.wait()
    with pytest.raises(StoreError, match=r"compaction in the background failed: .* is damaged") as caught:
        store.write(KEYS[:1], first(KEYS[:1]))
    assert caught.value.__cause__ is not None
    names = [entry.name for entry in caught.traceback]
    cause = caught.value.__cause__.__traceback__
    while cause is not None:
        names.append(cause.tb_frame.f_code.co_name)
        cause = cause.tb_next
    assert "scan" in names
    assert path.exists()  # what can still be read of it stays
    store.write(KEYS[:1], first(KEYS[:1]) + 7)  # told once
    out = torch.empty(4, WIDTH)
    store.read(torch.tensor([0, 1, 2, 4]), out)
    assert out[0].tolist() == (first(KEYS[:1])[0] + 7).tolist()
    with pytest.raises(StoreError, match="key 3"):
        store.read(torch.tensor([3]), torch.empty(1, WIDTH))


def test_compaction_that_cannot_write_keeps_the_rows(store, monkeypatch):
    ours = threading.get_ident()
    refuse(monkeypatch, "pwrite", errno.EIO, only=lambda *_: threading.get_ident() != ours)
    store.write(torch.arange(3), first(torch.arange(3)) + 2)
    store._compaction.wait()
    with pytest.raises(StoreError, match=r"compaction in the background failed: .*Input/output error"):
        store.flush()
    out = read_all(store)
    assert torch.equal(out[:3], first(KEYS[:3]) + 2)
    assert torch.equal(out[3:], first(KEYS[3:]) + 1)
    store.check_integrity()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_too_full_to_compact_is_said_once_and_writing_continues(store, monkeypatch, caplog, number):
    ours = threading.get_ident()
    with monkeypatch.context() as patch:
        refuse(patch, "pwrite", number, only=lambda *_: threading.get_ident() != ours)
        for step in range(8):
            store.write(KEYS[:3], first(KEYS[:3]) + step)
            store._compaction.wait()
            store.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "compaction waits" in caplog.text
    assert os.strerror(number) in caplog.text
    out = read_all(store)
    assert torch.equal(out[:3], first(KEYS[:3]) + 7)
    assert torch.equal(out[3:], first(KEYS[3:]) + 1)
    stale = store.sizes().ssd_stale_bytes
    for step in range(8):  # there is room again
        store.write(KEYS[:3], first(KEYS[:3]) + step)
        store._compaction.wait()
    assert store.sizes().ssd_stale_bytes < stale
    store.check_integrity()


def test_a_full_disk_is_an_error_once_the_cap_is_reached_too(tmp_path, monkeypatch):
    """Every segment keeps one live record, so that none can go without a copy."""
    store = open_store(tmp_path, num_rows=1000)
    written = {}
    with monkeypatch.context() as patch:
        compaction, ours = store._compaction.appender, threading.get_ident()

        def only(handle, *_):
            current = compaction._current
            return threading.get_ident() != ours or (current is not None and current.handle == handle)

        refuse(patch, "pwrite", errno.ENOSPC, only=only)
        refused = ""
        for step in range(100):
            keys = torch.tensor([10 + step, 0, 1, 2])
            try:
                store.write(keys, first(keys) + step)
            except StoreError as error:
                refused = str(error)
                break
            written |= dict(zip(keys.tolist(), (first(keys) + step).tolist()))
    assert "No space left" in refused
    assert len(written) > 30
    assert contents(store) == written
    store.write(keys, first(keys) + step)  # there is room again
    store.check_integrity()
    store.close()


def test_flushing_a_broken_disk(store, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        refuse(patch, "fsync", errno.EIO)
        with pytest.raises(StoreError, match="Input/output error"):
            store.flush()
    with store.freeze() as frozen, pytest.raises(StoreError, match="Input/output error"):
        frozen.link_into(tmp_path / "saved")  # the disk is silent now, the bytes are lost all the same
    assert not (tmp_path / "saved" / INDEX_NAME).exists()


def test_a_closed_store(tmp_path):
    store = open_store(tmp_path)
    store.close()
    store.close()
    for call in (lambda: store.write(KEYS, first(KEYS)), store.freeze, store.flush, lambda: list(store.items())):
        with pytest.raises(StoreError, match="is closed"):
            call()


@pytest.mark.parametrize("where", ["header", "record", "index"])
def test_flipped_bytes_of_a_checkpoint(store, saved, where):
    path = saved / INDEX_NAME if where == "index" else sorted(saved.glob("*.rows"))[0]
    start, stop = {"header": (0, HEADER_BYTES), "record": (HEADER_BYTES, SEGMENT), "index": (0, path.stat().st_size)}[
        where
    ]
    for offset in range(start, stop):
        flip(path, offset)
        with pytest.raises(StoreError):
            list(frozen_items(saved))
        if offset % 16 == 0:
            with pytest.raises(StoreError):
                store.adopt(saved)
            assert store.num_written == 0
            store.check_integrity()
        flip(path, offset)
    store.adopt(saved)
    assert torch.equal(read_all(store), first(KEYS) + 1)


def other_version(path):
    data = bytearray(path.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    path.write_bytes(data)


def segment_of(saved):
    return sorted(saved.glob("*.rows"))[0]


CHECKPOINT_FAULTS = {
    "newer segment": (
        lambda saved: other_version(segment_of(saved)),
        "has format version 2; this hotbed reads up to 1",
    ),
    "newer index": (lambda saved: other_version(saved / INDEX_NAME), "has format version 2; this hotbed reads up to 1"),
    "another file": (
        lambda saved: segment_of(saved).write_bytes(b"PAR1" * 100),
        "is not a segment of rows: it starts with",
    ),
    "another index": (lambda saved: (saved / INDEX_NAME).write_bytes(b"{}" * 50), "is not an index of rows"),
    "no segment": (lambda saved: segment_of(saved).unlink(), "cannot be read: No such file"),
    "no index": (lambda saved: (saved / INDEX_NAME).unlink(), "holds no rows of a store"),
    "short segment": (lambda saved: os.truncate(segment_of(saved), SEGMENT - 1), "is damaged: 4 records need"),
    "short header": (lambda saved: os.truncate(segment_of(saved), 20), "its header alone has 64"),
    "short index": (lambda saved: os.truncate(saved / INDEX_NAME, 9), "has 9 bytes only"),
}


@pytest.mark.parametrize("fault", CHECKPOINT_FAULTS)
def test_faults_of_a_checkpoint(store, saved, fault):
    damage, message = CHECKPOINT_FAULTS[fault]
    damage(saved)
    with pytest.raises(StoreError, match=message):
        list(frozen_items(saved))
    with pytest.raises(StoreError, match=message):
        store.adopt(saved)
    assert store.num_written == 0  # nothing half loaded
    assert torch.equal(read_all(store), first(KEYS))
    store.check_integrity()
    assert len(list(Path(store._segments.folder).glob("*.rows"))) == 0


def test_a_checkpoint_that_does_not_fit(saved, tmp_path):
    small = open_store(tmp_path / "small", max_bytes=3 * SEGMENT)
    with pytest.raises(StoreError, match=r"does not fit under the cap: .* Give a larger ssd="):
        small.adopt(saved)
    assert small.sizes().ssd_bytes == 0
    small.close()
    fewer = open_store(tmp_path / "fewer", num_rows=5)
    with pytest.raises(StoreError, match="holds a row with key 5, this store has 5 rows"):
        fewer.adopt(saved)
    fewer.close()


def test_a_write_that_fails_leaves_no_bytes_behind(tmp_path, monkeypatch):
    """They would be copied with every checkpoint that links the file."""
    store = open_store(tmp_path)
    store.write(torch.arange(1), torch.ones(1, WIDTH))
    (segment,) = [path for path in tmp_path.iterdir() if path.stat().st_size >= HEADER_BYTES]
    size = segment.stat().st_size

    def half(handle, data, position):
        os.pwrite(handle, data[: len(data) // 2], position)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("hotbed.store.ssd.append.write_fully", half)
        with pytest.raises(StoreError, match="No space left"):
            store.write(torch.arange(1, 3), torch.ones(2, WIDTH))
    assert segment.stat().st_size == size
    store.close()
