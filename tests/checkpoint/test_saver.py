"""Writing aside while training goes on."""

import os
import sys
import threading

import pytest
import torch

import hotbed
from hotbed.checkpoint import Policy, Saver, write
from hotbed.checkpoint import saver as saver_module
from hotbed.checkpoint.chain import find, folders_in
from hotbed.checkpoint.read import load_rows
from hotbed.checkpoint.row_file import columns_of
from hotbed.errors import RunError
from tests.checkpoint.fakes import DictTables, state


@pytest.fixture
def held(monkeypatch):
    """Writers stop before their first small file until they are let go."""
    begun, go = threading.Event(), threading.Event()
    real = write.write_tensors

    def hold(*arguments):
        begun.set()
        assert go.wait(60)
        real(*arguments)

    monkeypatch.setattr(write, "write_tensors", hold)
    yield begun, go
    go.set()


def loaded(root):
    found = DictTables()
    load_rows(find(root), found.restore())
    return found


def test_a_checkpoint_holds_the_step_it_was_taken_at(tmp_path, held):
    begun, go = held
    tables, then = DictTables(), DictTables()
    saver = Saver(tmp_path, tables)
    tables.write("user", *range(10))
    then.rows = {name: dict(rows) for name, rows in tables.rows.items()}
    then.num_updates = tables.num_updates
    assert saver.save(state(1))
    assert begun.wait(60)
    tables.write("user", *range(5, 20))  # training goes on
    assert saver.busy
    assert folders_in(tmp_path) == []
    go.set()
    assert saver.settle()
    assert loaded(tmp_path).same_as(then)
    saver.save(state(2), wait=True)
    assert find(tmp_path).manifest.kind == "incremental"
    assert loaded(tmp_path).same_as(tables)


def test_a_second_request_is_left_out_and_the_last_one_waits(tmp_path, held):
    begun, go = held
    said = []
    tables = DictTables()
    saver = Saver(tmp_path, tables, say=said.append)
    tables.write("user", 1)
    assert saver.save(state(1))
    assert begun.wait(60)
    tables.write("user", 2)
    assert not saver.save(state(2))
    assert said == ["step 2: no checkpoint, because the last one is still being written"]
    assert not saver.poll()
    go.set()
    saver.save(state(3), wait=True)
    assert [folder.name for folder in folders_in(tmp_path)] == ["000000000001", "000000000003"]
    assert loaded(tmp_path).same_as(tables)


def test_what_is_given_up_leaves_nothing(tmp_path):
    tables = DictTables(part=1)
    saver = Saver(tmp_path, tables)
    tables.write("user", *range(500))
    assert saver.save(state(1))
    saver.cancel()
    assert folders_in(tmp_path) in ([], [tmp_path / "000000000001"])
    assert all(path.name == "000000000001" for path in tmp_path.iterdir())


def test_who_gives_up_waits_for_the_writer(tmp_path, held, monkeypatch):
    begun, go = held
    tables = DictTables()
    saver = Saver(tmp_path, tables)
    tables.write("user", 1)
    assert saver.save(state(1))
    assert begun.wait(60)
    thread, join = saver._thread, saver._thread.join
    monkeypatch.setattr(thread, "join", lambda: go.set() or join())  # it can end only now
    saver.cancel()
    assert go.is_set()
    assert not thread.is_alive()


def test_errors_come_back_once(tmp_path, monkeypatch):
    tables = DictTables()
    saver = Saver(tmp_path, tables)
    tables.write("user", 1)
    with monkeypatch.context() as patch:
        patch.setattr(write, "write_tensors", lambda *_: 1 / 0)
        saver.save(state(1))
        with pytest.raises(ZeroDivisionError):
            saver.settle()
    assert not saver.settle()
    saver.save(state(2), wait=True)
    assert loaded(tmp_path).same_as(tables)


def test_without_a_thread_the_snapshot_is_left_and_training_continues(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    said = []
    tables = DictTables()
    saver = Saver(tmp_path, tables, say=said.append)
    tables.write("user", 1)
    touched = set(tables.touched)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not saver.save(state(1))
    assert tables.touched == touched  # marks are back: the snapshot was left
    assert saver.num_failed == 1
    assert said == ["warning: no checkpoint was written; the last one is kept: can't start new thread"]
    assert not saver.busy
    assert saver.save(state(2))
    assert saver.settle()
    assert loaded(tmp_path).same_as(tables)


def test_a_load_while_one_is_written_makes_the_next_one_full(tmp_path, held):
    """What is written aside is of rows that are no more: nothing adds to it."""
    begun, go = held
    go.set()
    tables = new_tables()
    for seed in range(9):  # a full one larger than what is added
        train(tables, seed)
    hotbed.checkpoint.save(tmp_path, tables, step=1)
    train(tables, 1)
    go.clear()
    begun.clear()
    saver = Saver(tmp_path, tables)
    assert saver.save(state(2))
    assert begun.wait(60)
    hotbed.checkpoint.load(tmp_path / "000000000001", tables)
    go.set()
    assert saver.settle()
    train(tables, 12)
    saver.save(state(3), wait=True)
    assert find(tmp_path).manifest.step == 3
    other = new_tables()
    hotbed.checkpoint.load(tmp_path, other)
    assert torch.equal(tables.weight("a"), other.weight("a"))


@pytest.mark.parametrize("begins", [False, True])
def test_an_interrupt_while_the_thread_is_started_leaves_the_snapshot_to_one_of_two(tmp_path, monkeypatch, begins):
    def stop(thread):
        if begins or thread.name != "checkpoint":
            start(thread)
        if thread.name == "checkpoint":  # and not one that this one starts
            raise KeyboardInterrupt

    start, tables = threading.Thread.start, new_tables()
    saver = Saver(tmp_path, tables)
    train(tables, 0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", stop)
        with pytest.raises(KeyboardInterrupt):
            saver.save(state(1))
    saver.settle()
    train(tables, 1)
    saver.save(state(2), wait=True)
    other = new_tables()
    hotbed.checkpoint.load(tmp_path, other)
    assert torch.equal(tables.weight("a"), other.weight("a"))


def new_tables():
    return hotbed.EmbeddingTables({"a": hotbed.Table(30, 4)}, hotbed.optim.Adagrad(lr=0.1), cache=0.4)


def train(tables, seed):
    ids = torch.randint(0, 30, (8, 1), generator=torch.Generator().manual_seed(seed))
    tables(ids).pow(2).sum().backward()


def test_asked_to_wait_a_refused_checkpoint_is_an_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise RunError("no")

    monkeypatch.setattr(write, "write_tensors", refuse)
    with pytest.raises(RunError, match="no"):
        Saver(tmp_path, DictTables()).save(state(1), wait=True)


def test_the_writer_takes_what_training_leaves(tmp_path, monkeypatch):

    if sys.platform != "linux":
        pytest.skip("threads have no priority of their own here")
    found = []

    def look(part):
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return columns_of(part)

    monkeypatch.setattr(write, "columns_of", look)
    tables = DictTables()
    tables.write("user", 1)
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    saver = Saver(tmp_path, tables)
    saver.save(state(1))
    assert saver.settle()
    assert found
    assert min(found) > mine or mine >= 19
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_old_checkpoints_that_cannot_be_removed_are_reported(tmp_path, monkeypatch):
    said = []
    tables = DictTables()
    saver = Saver(tmp_path, tables, Policy(full_every=1, keep=1), said.append)
    saver.save(state(1), wait=True)

    def refuse(_):
        raise RunError("no")

    monkeypatch.setattr(saver_module, "remove", refuse)
    saver.save(state(2), wait=True)
    assert saver.save(state(3))
    assert saver.settle()
    assert said == ["warning: old checkpoints stay: no"] * 2
    assert find(tmp_path).manifest.step == 3


def test_a_system_without_threads_to_give_is_said_and_training_continues(tmp_path, monkeypatch):
    tables, said = DictTables(), []
    tables.write("user", 1, 2)
    saver = Saver(tmp_path, tables, say=said.append)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not saver.save(state(1))
    assert saver.num_failed == 1
    assert said == ["warning: no checkpoint was written; the last one is kept: can't start new thread"]
    assert saver.save(state(2), wait=True)
