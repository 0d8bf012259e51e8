"""Full and incremental checkpoints, against a dict."""

import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotbed.checkpoint import Policy, Saver, chain
from hotbed.checkpoint.chain import Entry, chain_of, clean, find, folders_in, remember, unneeded
from hotbed.checkpoint.manifest import MANIFEST, read_manifest
from hotbed.checkpoint.read import load_rows, problems_of
from hotbed.errors import RunError
from tests.checkpoint.fakes import DictTables, state


def loaded(root) -> DictTables:
    tables = DictTables()
    load_rows(find(root), tables.restore())
    return tables


def kinds(root):
    return [read_manifest(folder).kind for folder in folders_in(root)]


def test_an_incremental_one_holds_what_was_touched(tmp_path):
    tables = DictTables()
    saver = Saver(tmp_path, tables)
    tables.write("user", *range(50))
    saver.save(state(1), wait=True)
    tables.write("user", 3, 7)
    tables.write("ad", 1)
    tables.forget("user", 9)
    saver.save(state(2), wait=True)
    newest = find(tmp_path).manifest
    assert (newest.kind, newest.parent, newest.rows, newest.gone) == (
        "incremental",
        "000000000001",
        {"user": 2, "ad": 1},
        {"user": 1},
    )
    assert loaded(tmp_path).same_as(tables)
    assert all(problems_of(folder) == [] for folder in folders_in(tmp_path))


def test_an_older_one_can_be_loaded_too(tmp_path):
    tables = DictTables()
    saver = Saver(tmp_path, tables, Policy(keep=9))
    for step in (1, 2, 3):
        tables.write("user", step, value=step)
        saver.save(state(step), wait=True)
    older = DictTables()
    load_rows(find(tmp_path / "000000000002"), older.restore())
    assert sorted(older.rows["user"]) == [1, 2]


def test_every_so_many_is_full(tmp_path):
    tables = DictTables()
    saver = Saver(tmp_path, tables, Policy(full_every=3, keep=99))
    tables.write("user", *range(1000))
    for step in range(7):
        tables.write("user", step)
        saver.save(state(step), wait=True)
    assert kinds(tmp_path) == ["full", "incremental", "incremental"] * 2 + ["full"]


def test_a_chain_larger_than_its_start_is_ended(tmp_path):
    tables = DictTables()
    saver = Saver(tmp_path, tables, Policy(full_every=99, keep=99))
    for step in range(5):
        tables.write("user", *range(2000))
        saver.save(state(step), wait=True)
    assert kinds(tmp_path) == ["full", "incremental", "incremental", "full", "incremental"]


def test_retention_never_breaks_a_chain(tmp_path):
    tables = DictTables()
    saver = Saver(tmp_path, tables, Policy(full_every=4, keep=2))
    tables.write("user", *range(1000))
    for step in range(9):
        tables.write("user", step)
        saver.save(state(step), wait=True)
        for folder in folders_in(tmp_path):
            chain_of(Entry(folder, read_manifest(folder)))
    assert [int(folder.name) for folder in folders_in(tmp_path)] == [4, 5, 6, 7, 8]
    assert [folder.name for folder in unneeded(tmp_path, 1)] == [f"{step:012}" for step in (4, 5, 6, 7)]


def test_what_a_damaged_checkpoint_may_add_to_is_kept(tmp_path):
    tables = DictTables()
    saver = Saver(tmp_path, tables, Policy(full_every=9, keep=9))
    tables.write("user", *range(1000))
    for step in range(4):
        tables.write("user", step)
        saver.save(state(step), wait=True)
    assert unneeded(tmp_path, 1) == []
    folders = folders_in(tmp_path)
    for damaged in (folders[3], folders[0]):  # the first has none before it
        (damaged / MANIFEST).write_text("{")
        assert unneeded(tmp_path, 1) == []


def test_leftovers_are_removed_when_their_names_are_on_the_disk(tmp_path, monkeypatch):
    """Else a folder that was renamed just before could come back after a loss of power, with half of its files."""
    calls = []
    monkeypatch.setattr(chain, "flush_to_disk", lambda path: calls.append(("flush", path)))
    monkeypatch.setattr(chain.shutil, "rmtree", lambda path, **_: calls.append(("remove", path)))
    clean(tmp_path)
    assert calls == []
    left = tmp_path / f"000000000001{chain.DOOMED}"
    left.mkdir()
    clean(tmp_path)
    assert calls == [("flush", tmp_path), ("remove", left)]


def test_the_same_step_twice(tmp_path):
    """A run that was stopped and resumed may save before its next step."""
    tables = DictTables()
    saver = Saver(tmp_path, tables)
    tables.write("user", 1)
    saver.save(state(20, note="first"), wait=True)
    saver.save(state(20, note="second"), wait=True)
    assert [folder.name for folder in folders_in(tmp_path)] == ["000000000020", "000000000020.1"]
    assert find(tmp_path).manifest.document["note"] == "second"
    assert loaded(tmp_path).same_as(tables)


def test_the_same_step_many_times_while_old_ones_are_removed(tmp_path):
    """A run that is killed at its end again and again saves its last step each time."""
    tables = DictTables()
    saver = Saver(tmp_path, tables, Policy(full_every=1, keep=1))
    for number in range(12):
        tables.write("user", number)
        saver.save(state(20), wait=True)
        assert loaded(tmp_path).same_as(tables)
    assert [folder.name for folder in folders_in(tmp_path)] == ["000000000020.11"]


def test_rows_saved_elsewhere_are_not_left_out_here(tmp_path):
    """Touched is counted from the last checkpoint of these tables, wherever it went."""
    tables = DictTables()
    here, there = Saver(tmp_path / "a", tables), Saver(tmp_path / "b", tables)
    tables.write("user", 1)
    here.save(state(1), wait=True)
    tables.write("user", 2)
    there.save(state(2), wait=True)
    tables.write("user", 3)
    here.save(state(3), wait=True)
    assert kinds(tmp_path / "a") == ["full", "full"]
    assert loaded(tmp_path / "a").same_as(tables)


def test_a_parent_that_was_taken_away_is_not_built_on(tmp_path):
    tables = DictTables()
    saver = Saver(tmp_path, tables)
    tables.write("user", 1)
    saver.save(state(1), wait=True)
    shutil.rmtree(tmp_path / "000000000001")
    tables.write("user", 2)
    saver.save(state(2), wait=True)
    assert kinds(tmp_path) == ["full"]
    assert loaded(tmp_path).same_as(tables)


def test_no_rows_at_all(tmp_path):
    tables = DictTables()
    Saver(tmp_path, tables).save(state(0), wait=True)
    assert loaded(tmp_path).same_as(tables)
    assert find(tmp_path).manifest.num_rows == 0


def test_readers_never_see_a_checkpoint_in_the_making(tmp_path):
    """While one is written, another thread lists and loads; it finds the one before, whole, or the new one, whole."""
    tables = DictTables(part=1)
    saver = Saver(tmp_path, tables, Policy(full_every=1, keep=99))
    tables.write("user", 0)
    saver.save(state(0), wait=True)
    stop, wrong = threading.Event(), []

    def read():
        while not stop.is_set():
            for folder in folders_in(tmp_path):
                wrong.extend(problems_of(folder))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(1, 12):
            tables.write("user", *range(step * 5))
            saver.save(state(step), wait=True)
    finally:
        stop.set()
        reader.join()
    assert wrong == []


class Checkpoints(RuleBasedStateMachine):
    """Any course of writes, expiries, saves (some of which fail), loads and prunes keeps what a dict keeps."""

    @initialize(full_every=st.integers(1, 4), keep=st.integers(1, 3))
    def begin(self, full_every, keep):
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name) / "checkpoints"
        self.tables = DictTables()
        self.policy = Policy(full_every, keep)
        self.saver = Saver(self.root, self.tables, self.policy)
        self.step, self.saved = 0, None

    @rule(table=st.sampled_from(["user", "ad"]), ids=st.sets(st.integers(0, 12), min_size=1))
    def write(self, table, ids):
        self.tables.write(table, *ids)

    @rule(data=st.data(), table=st.sampled_from(["user", "ad"]))
    def forget(self, data, table):
        known = sorted(self.tables.rows[table])
        if known:
            self.tables.forget(table, *data.draw(st.sets(st.sampled_from(known), min_size=1)))

    @rule(forward=st.integers(0, 2))
    def save(self, forward):
        self.step += forward
        self.saver.save(state(self.step), wait=True)
        self.saved = loaded(self.root)
        assert self.saved.same_as(self.tables)

    @rule()
    def fail(self):
        self.saver._cancelled.set()
        if self.tables.touched:
            with pytest.raises(RunError, match="cancelled"):
                self.saver.save(state(self.step + 1), wait=True)
        self.saver._cancelled.clear()

    @precondition(lambda self: getattr(self, "saved", None) is not None)
    @rule()
    def crash(self):
        """A new process loads the newest checkpoint and goes on."""
        entry = find(self.root)
        self.tables = DictTables()
        load_rows(entry, self.tables.restore())
        remember(self.tables, entry)
        assert self.tables.same_as(self.saved)
        self.saver = Saver(self.root, self.tables, self.policy)

    @invariant()
    def all_whole(self):
        if getattr(self, "saved", None) is not None:
            assert all(problems_of(folder) == [] for folder in folders_in(self.root))

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_precisions(tmp_path, precision):
    tables = DictTables(precision=precision)
    tables.write("user", *range(9))
    Saver(tmp_path, tables).save(state(1), wait=True)
    found = DictTables(precision=precision)
    load_rows(find(tmp_path), found.restore())
    assert found.same_as(tables)
    assert found.rows["user"][3][0].dtype == {"fp32": torch.float32, "fp16": torch.float16}.get(
        precision, torch.bfloat16
    )
