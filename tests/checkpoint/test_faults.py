"""What can go wrong with checkpoints, each with its message; the last good one stays, and no row is lost or half loaded."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch

from hotbed.checkpoint import Policy, Saver, chain, write
from hotbed.checkpoint.chain import find, folders_in
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.read import load_rows, problems_of
from hotbed.checkpoint.row_file import RowFile
from hotbed.errors import RunError
from tests.checkpoint.fakes import DictTables, state
from tests.fresh import Program


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def tables(root):
    """Tables with a full checkpoint of step 1 and an incremental one of step 2, and rows touched since."""
    tables = DictTables()
    saver = Saver(root, tables)
    tables.write("user", *range(30))
    saver.save(state(1), wait=True)
    tables.write("user", 1, 2, 3)
    tables.write("ad", 5)
    tables.forget("user", 20)
    saver.save(state(2), wait=True)
    return tables


def loaded(root):
    found = DictTables()
    load_rows(find(root), found.restore())
    return found


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def fail_at(monkeypatch, owner, name, number, error=errno.ENOSPC):
    """The n-th call fails."""
    real, calls = getattr(owner, name), []

    def call(*arguments, **named):
        calls.append(1)
        if len(calls) == number:
            raise OSError(error, os.strerror(error))
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, call)


WRITES = [
    ("the first bytes of a row file", RowFile, "_write", 1, errno.ENOSPC),
    ("a page of a row file", RowFile, "_write", 7, errno.ENOSPC),
    ("a footer", RowFile, "_footer", 1, errno.EDQUOT),
    ("a row file that does not reach the disk", os, "fsync", 1, errno.EIO),
    ("a small file that does not reach the disk", os, "fsync", 3, errno.EIO),
    ("a folder that does not reach the disk", os, "fsync", 6, errno.EIO),
    ("the dense weights", write, "write_tensors", 1, errno.ENOSPC),
    ("the rest of the tables", write, "write_tensors", 2, errno.EFBIG),
    ("the rename", os, "replace", 1, errno.EROFS),
]


@pytest.mark.parametrize("fault", WRITES, ids=[fault[0] for fault in WRITES])
def test_a_disk_that_refuses_leaves_the_last_checkpoint_and_all_marks(root, tables, monkeypatch, fault):
    _, owner, name, number, error = fault
    before = DictTables()
    load_rows(find(root), before.restore())
    tables.write("user", 4, 100)
    tables.forget("user", 5)
    saver = Saver(root, tables)
    with monkeypatch.context() as patch:
        fail_at(patch, owner, name, number, error)
        with pytest.raises(RunError, match=f"cannot write .*checkpoints.*: {os.strerror(error)}"):
            saver.save(state(3), wait=True)
    assert [folder.name for folder in root.iterdir() if folder.suffix] == []
    assert loaded(root).same_as(before)
    saver.save(state(3), wait=True)  # the disk is well again: nothing touched since is left out
    assert loaded(root).same_as(tables)


def test_a_full_disk_does_not_end_training(root, tables, monkeypatch):
    said = []
    saver = Saver(root, tables, say=said.append)
    tables.write("user", 7)
    with monkeypatch.context() as patch:
        patch.setattr(write, "write_tensors", no_space)
        assert saver.save(state(3))
        assert not saver.settle()
    assert saver.num_failed == 1
    assert "no checkpoint was written; the last one is kept" in said[0]
    assert "No space left on device" in said[0]
    assert saver.save(state(4))
    assert saver.settle()
    assert loaded(root).same_as(tables)


def test_what_nobody_expected_reaches_the_thread_that_trains(root, tables, monkeypatch):
    saver = Saver(root, tables)
    monkeypatch.setattr(write, "write_tensors", lambda *_: 1 / 0)
    tables.write("user", 7)
    saver.save(state(3))
    with pytest.raises(ZeroDivisionError) as caught:
        saver.settle()
    assert any("_fill" in str(one) for one in caught.traceback)
    assert find(root).manifest.step == 2


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting is not permitted")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_really_full_disk(small_disk):
    tables = DictTables(part=5000)
    saver = Saver(small_disk / "checkpoints", tables)
    tables.write("user", *range(5000))
    saver.save(state(1), wait=True)
    tables.write("user", *range(40_000))
    with pytest.raises(RunError, match="No space left on device"):
        saver.save(state(2), wait=True)
    assert [folder.name for folder in (small_disk / "checkpoints").iterdir()] == ["000000000001"]
    assert len(loaded(small_disk / "checkpoints").rows["user"]) == 5000


def test_a_read_only_disk(small_disk):
    tables = DictTables()
    saver = Saver(small_disk / "checkpoints", tables)
    tables.write("user", 1)
    saver.save(state(1), wait=True)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    tables.write("user", 2)
    with pytest.raises(RunError, match=r"cannot write .*checkpoints.*: Read-only file system"):
        saver.save(state(2), wait=True)
    assert sorted(loaded(small_disk / "checkpoints").rows["user"]) == [1]


def test_a_folder_that_vanished_is_made_again(root, tables):
    shutil.rmtree(root)
    Saver(root, tables).save(state(3), wait=True)
    assert find(root).manifest.kind == "full"
    assert loaded(root).same_as(tables)


def test_a_folder_that_vanishes_while_rows_are_written(root, tables, monkeypatch):
    real = RowFile.close

    def close(self):
        shutil.rmtree(root, ignore_errors=True)
        return real(self)

    monkeypatch.setattr(RowFile, "close", close)
    tables.write("user", 1)
    with pytest.raises(RunError, match=r"cannot write .*: No such file or directory"):
        Saver(root, tables).save(state(3), wait=True)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    tables = DictTables()
    with pytest.raises(RunError, match=r"cannot write .*checkpoints.*: (File exists|Not a directory)"):
        Saver(tmp_path / "checkpoints", tables).save(state(1), wait=True)


def test_two_writers(root, tables, monkeypatch):
    monkeypatch.setattr(chain, "LONGEST_WAIT", 0.0)
    handle = os.open(root, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(RunError, match="another process has been writing in"):
            Saver(root, tables).save(state(3), wait=True)
    finally:
        os.close(handle)


def test_what_is_no_json(root, tables):
    with pytest.raises(RunError, match="must be plain JSON"):
        Saver(root, tables).save(state(3, extra={1, 2}), wait=True)
    with pytest.raises(RunError, match="must be plain JSON"):
        Saver(root, tables).save(state(3, extra=float("nan")), wait=True)
    assert find(root).manifest.step == 2


def test_leftovers_of_killed_writers_are_cleaned(root, tables):
    for name in ("000000000003.new", "000000000002.1.new", "000000000001.gone"):
        (root / name / "rows").mkdir(parents=True)
        (root / name / "rows" / "x").write_text("half")
    (root / "notes.new").write_text("mine")
    assert find(root).manifest.step == 2
    Saver(root, tables).save(state(3), wait=True)
    assert {path.name for path in root.iterdir() if path.suffix} == {"notes.new"}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


HARMS = {"flipped bit": flip, "truncated": cut, "missing": lambda path: path.unlink()}
FILES = [
    ("000000000001", "rows/0-00000.parquet"),
    ("000000000002", "rows/0-00000.parquet"),
    ("000000000002", "gone.parquet"),
    ("000000000002", "rest.safetensors"),
    ("000000000001", "manifest.json"),
    ("000000000002", "manifest.json"),
]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("place", FILES, ids=["/".join(place) for place in FILES])
def test_damage_is_named_and_nothing_is_half_loaded(root, tables, place, harm):
    folder = root / place[0]
    names = [place[1]]
    if place[1].startswith("rows/"):  # which thread wrote which rows is not known
        names = [f"rows/{path.name}" for path in (folder / "rows").iterdir()]
    for name in names:
        HARMS[harm](folder / name)
    found = DictTables()
    found.write("user", 999)
    damaged = "|".join(re.escape(name) for name in names)  # any of them may be read first
    with pytest.raises(RunError, match=rf"{damaged}|no whole checkpoint"):
        load_rows(find(root), found.restore())
    assert sorted(found.rows["user"]) in ([], [999])  # untouched, or begun anew
    assert any(place[1].split("/")[0] in text for text in problems_of(folder))


def test_a_newer_format(root, tables):
    path = root / "000000000002" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 3}))
    with pytest.raises(RunError, match="format version 3; this hotbed reads up to 2"):
        loaded(root)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 2, "crc32": 0, "checkpoint": {}}', "\x00"])
def test_a_manifest_that_is_none(root, tables, text):
    (root / "000000000002" / "manifest.json").write_text(text)
    with pytest.raises(RunError, match=r"manifest\.json is damaged"):
        loaded(root)


def test_a_missing_parent(root, tables):
    shutil.rmtree(root / "000000000001")
    with pytest.raises(RunError, match="only holds what changed since 000000000001, which is not there"):
        loaded(root)
    assert "which is not there" in problems_of(root / "000000000002")[0]


def test_a_parent_from_elsewhere(root, tables, tmp_path):
    other = DictTables()
    other.write("user", *range(30))
    Saver(tmp_path / "other", other).save(state(1), wait=True)
    shutil.rmtree(root / "000000000001")
    shutil.copytree(tmp_path / "other" / "000000000001", root / "000000000001")
    with pytest.raises(RunError, match="comes from elsewhere"):
        loaded(root)


def test_tables_that_do_not_fit_are_reported_before_anything_is_loaded(root, tables):
    other = DictTables(dims=(("user", 4), ("site", 1)))
    other.write("user", 1)
    with pytest.raises(RunError, match="no table 'site'; its table 'ad' is not wanted; table 'user' has dim 3, not 4"):
        load_rows(find(root), other.restore())
    assert list(other.rows["user"]) == [1]


def test_nothing_there(tmp_path):
    with pytest.raises(RunError, match="there is no"):
        find(tmp_path / "absent")
    with pytest.raises(RunError, match="holds no checkpoint"):
        find(tmp_path)


def test_a_damaged_manifest_does_not_let_its_ancestors_be_pruned(root, tables):
    saver = Saver(root, tables, Policy(full_every=1, keep=2))
    flip(root / "000000000002" / "manifest.json")
    tables.write("user", 1)
    saver.save(state(3), wait=True)
    assert [folder.name for folder in folders_in(root)] == ["000000000001", "000000000002", "000000000003"]


KILLED = """
import sys
from pathlib import Path
from hotbed.checkpoint import Policy, Saver
from tests.checkpoint.fakes import DictTables, state
tables = DictTables(part=50)
saver = Saver(Path(sys.argv[1]), tables, Policy(full_every=3, keep=2))
for step in range(10**6):
    tables.write("user", *range(step % 7, 300), value=step)
    saver.save(state(step), wait=True)
    print(step, flush=True)
"""


@pytest.mark.parametrize("saves", [1, 2, 5])
def test_a_writer_killed_at_any_moment_leaves_whole_checkpoints(tmp_path, saves):
    """It is killed some milliseconds after a save; what is there afterwards is whole, and not older than that save."""
    writer = Program(KILLED, tmp_path / "c")
    for _ in range(saves):
        last = int(writer.stdout.readline())
    deadline = time.perf_counter() + 0.007 * saves
    while time.perf_counter() < deadline:
        pass
    writer.kill()
    assert writer.ended().returncode == -signal.SIGKILL
    newest = find(tmp_path / "c")
    assert newest.manifest.step >= last
    assert all(problems_of(folder) == [] for folder in folders_in(tmp_path / "c"))
    found = loaded(tmp_path / "c")
    step = newest.manifest.step
    assert torch.equal(found.rows["user"][299][0], torch.full((3,), float(step)))
    assert read_manifest(newest.folder).tables == found.tables


@pytest.mark.parametrize("num_listed", [0, 1])
def test_ids_that_are_gone_and_cannot_be_listed(root, tables, monkeypatch, num_listed):
    """The error is the one that happened, and no file stays open."""
    opened = []
    monkeypatch.setattr(write, "RowFile", lambda *args: opened.append(RowFile(*args)) or opened[-1])

    def gone(self):
        yield from [("user", torch.tensor([5]))] * num_listed
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("tests.checkpoint.fakes._Snapshot.gone", gone)
    before = loaded(root)
    with pytest.raises(RunError, match=os.strerror(errno.EIO)):
        Saver(root, tables).save(state(3), wait=True)
    assert [file.path.name for file in opened if not file._file.closed] == []
    assert sum(file.path.name == write.GONE for file in opened) == num_listed
    assert loaded(root).same_as(before)
