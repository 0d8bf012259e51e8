"""Rows on an ssd: their segments are linked into a checkpoint, and come back."""

import errno
from contextlib import contextmanager

import pytest
import torch

from hotbed.checkpoint import Policy, RowPart, Saver, TableShape
from hotbed.checkpoint.chain import find, folders_in
from hotbed.checkpoint.read import load_rows, problems_of
from hotbed.errors import HotbedError
from hotbed.store.ssd import SsdStore, frozen
from tests.checkpoint.fakes import state

ROWS, WIDTH = 5000, 8


class SsdTables:
    """One table: most rows on the ssd, some newer ones in memory."""

    def __init__(self, folder):
        self.tables = {"user": TableShape(WIDTH, ROWS)}
        self.store = SsdStore(folder, ROWS, WIDTH, lambda keys: torch.zeros(len(keys), WIDTH), max_bytes=8 << 20)
        self.memory: dict[int, torch.Tensor] = {}
        self.num_updates = 0

    def rows(self):
        out = torch.empty(ROWS, WIDTH)
        self.store.read(torch.arange(ROWS), out)
        for one, row in self.memory.items():
            out[one] = row
        return out

    @contextmanager
    def snapshot(self, touched=False):
        with self.store.freeze() as frozen:
            yield _Snapshot(self, frozen, touched)

    def restore(self):
        return _Sink(self)


class _Named:
    name = "group0"

    def __init__(self, frozen):
        self.link_into = frozen.link_into


class _Snapshot:
    def __init__(self, owner, frozen, touched):
        self.tables, self.frozen = owner.tables, [_Named(frozen)]
        self.memory = dict(owner.memory)

    def parts(self):
        if self.memory:
            yield RowPart("user", torch.tensor(list(self.memory)), {"weight": torch.stack(list(self.memory.values()))})

    def gone(self):
        return iter(())

    def rest(self):
        return {}

    def commit(self):
        pass


class _Sink:
    def __init__(self, owner):
        self.owner, self.tables = owner, owner.tables

    def begin(self):
        self.owner.memory.clear()
        self.owner.store.forget(torch.arange(ROWS))

    def adopt(self, name, folder):
        assert name == "group0"
        self.owner.store.adopt(folder)

    def gone(self, table, ids):
        raise AssertionError

    def add(self, part):
        for one, row in zip(part.ids.tolist(), part.columns["weight"]):
            self.owner.memory[one] = row.clone()

    def rest(self, tensors):
        pass

    def end(self):
        pass


@pytest.fixture
def tables(tmp_path):
    tables = SsdTables(tmp_path / "ssd")
    tables.store.write(torch.arange(0, ROWS, 2), torch.randn(ROWS // 2, WIDTH))
    tables.memory = {4: torch.ones(WIDTH), 7: torch.ones(WIDTH)}
    yield tables
    tables.store.close()


def test_segments_are_linked_and_come_back(tmp_path, tables):
    saver = Saver(tmp_path / "c", tables, Policy(full_every=1, keep=2))
    saver.save(state(1), wait=True)
    entry = find(tmp_path / "c")
    linked = [entry.folder / name for name in entry.manifest.linked]
    assert any(path.stat().st_nlink > 1 for path in linked)
    assert problems_of(entry.folder) == []
    then = tables.rows()
    tables.store.write(torch.arange(0, ROWS, 3), torch.randn(len(range(0, ROWS, 3)), WIDTH))  # training goes on
    other = SsdTables(tmp_path / "other")
    load_rows(entry, other.restore())
    assert torch.equal(other.rows(), then)
    saver.save(state(2), wait=True)
    load_rows(find(tmp_path / "c"), other.restore())
    assert torch.equal(other.rows(), tables.rows())
    other.store.close()


@pytest.mark.parametrize("harm", ["flip", "cut", "lose"])
def test_a_damaged_segment_is_named(tmp_path, tables, harm):
    Saver(tmp_path / "c", tables).save(state(1), wait=True)
    entry = find(tmp_path / "c")
    path = max((entry.folder / name for name in entry.manifest.linked), key=lambda one: one.stat().st_size)
    content = bytearray(path.read_bytes())
    path.unlink()  # the store keeps its own link
    if harm != "lose":
        content[len(content) // 2] ^= 1 if harm == "flip" else 0
        path.write_bytes(content if harm == "flip" else content[:-100])
    assert any(path.name in text for text in problems_of(entry.folder))
    if harm == "flip":  # its records are checked when they are read
        return
    other = SsdTables(tmp_path / "other")
    with pytest.raises(HotbedError, match=path.name):
        load_rows(entry, other.restore())
    other.store.close()


def test_a_full_disk_that_refuses_segments_does_not_end_training(tmp_path, tables, monkeypatch):
    said = []
    saver = Saver(tmp_path / "c", tables, Policy(full_every=1, keep=2), said.append)
    saver.save(state(1), wait=True)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(frozen, "link_or_copy", full)
    saver.save(state(2))
    assert not saver.settle()
    assert saver.num_failed == 1
    assert "the last one is kept" in said[0]
    assert "No space left on device" in said[0]
    monkeypatch.undo()
    saver.save(state(3))
    assert saver.settle()
    assert [folder.name for folder in folders_in(tmp_path / "c")] == [f"{step:012}" for step in (1, 3)]
    other = SsdTables(tmp_path / "other")
    load_rows(find(tmp_path / "c"), other.restore())
    assert torch.equal(other.rows(), tables.rows())
    other.store.close()
