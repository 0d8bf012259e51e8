"""The rule for moving rows: a change is carried out whole, or the tables refuse; and what holds Ctrl-C back meanwhile."""

import os
import pickle
import signal
import subprocess
import sys
import threading

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import BudgetError, HotbedError
from hotbed.host import interrupts
from hotbed.host.handover import Latch, Runner
from hotbed.tables.transaction import Changes

BIG, SMALL = torch.arange(20).reshape(-1, 1), torch.arange(5).reshape(-1, 1)


def make(**where):
    return hotbed.EmbeddingTables({"a": Table(100, 4)}, optim.SGD(lr=0.1), **where)


class BrokenOffError(Exception):
    pass


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        raise BrokenOffError


def test_a_change_that_fails_is_remembered():
    changes = Changes()
    with pytest.raises(BrokenOffError), changes.changing("moving a row"):
        raise BrokenOffError
    with pytest.raises(HotbedError, match="lost rows when moving a row was broken off") as refused:
        changes.check()
    assert isinstance(refused.value.__cause__, BrokenOffError)
    with pytest.raises(HotbedError, match="lost rows"), changes.changing("another"):
        pass


def test_a_refusal_changes_nothing():
    changes = Changes()
    with pytest.raises(BudgetError), changes.changing("moving a row"):
        raise BudgetError("too many")
    changes.check()


def test_changes_are_not_nested():
    changes = Changes()
    with pytest.raises(HotbedError), changes.changing("one"), changes.changing("two"):
        pass


def test_a_load_of_one_table_that_also_broke_a_change_is_mended_by_a_checkpoint(monkeypatch, tmp_path):
    whole, tables = make(), make(cache=0.5)
    hotbed.checkpoint.save(tmp_path, whole)
    store, read = tables.groups[0].store, tables.groups[0].store.read

    def broken_off(*_):
        raise BrokenOffError

    monkeypatch.setattr(store, "read", broken_off)
    with pytest.raises(BrokenOffError):
        tables.load_weight("a", torch.ones(100, 4))
    monkeypatch.setattr(store, "read", read)
    with pytest.raises(HotbedError, match="Load again from a checkpoint"):
        tables(SMALL)
    hotbed.checkpoint.load(tmp_path, tables)
    assert torch.equal(tables(SMALL), whole(SMALL))


def test_a_copy_has_changes_of_its_own():
    changes = Changes()
    changes.open = "something"
    copy = pickle.loads(pickle.dumps(changes))
    copy.check()
    assert copy.open is None


def test_a_refused_batch_leaves_no_marks():
    plain, cached = make(), make(cache=0.1)
    for _ in range(3):
        with pytest.raises(BudgetError):
            cached(BIG)
        assert torch.equal(cached(SMALL), plain(SMALL))
        for tables in (plain, cached):
            tables(SMALL).sum().backward()
    assert torch.equal(cached.weight("a"), plain.weight("a"))
    cached.caches[0].cache.check_integrity()


def test_ctrl_c_waits_for_the_end_of_a_change():
    changes, done = Changes(), []

    def interrupted():
        with changes.changing("moving a row"):
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done
    changes.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait():
    changes = Changes()

    def interrupted():
        with changes.changing("moving a row"):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it waited")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(HotbedError, match="lost rows"):
        changes.check()


def test_a_handler_that_was_left_behind_hands_on():
    """An exception came between `hold` and `release`."""
    assert interrupts.hold()
    interrupts._PendingInterrupt.open = False
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interrupts.hold()
    interrupts.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_that_are_ignored_stay_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert not interrupts.hold()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing():
    found = []
    thread = threading.Thread(target=lambda: found.append(interrupts.hold()))
    thread.start()
    thread.join()
    assert found == [False]


def test_ctrl_c_is_held_back_in_a_fork_which_continues_in_the_thread_that_forked():
    code = """if True:
        import os, threading
        from hotbed.host import interrupts
        codes = []
        def fork():
            child = os.fork()
            if child == 0:
                os._exit(0 if interrupts.hold() else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert codes == [0], codes
        """
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    assert subprocess.run(command, check=False).returncode == 0


def two_groups():
    """Tables of two widths, and their weights."""
    tables = hotbed.EmbeddingTables({"a": Table(9, 2), "b": Table(9, 3)}, optim.SGD(lr=0.1), output="dict", cache=0.9)
    return tables, {name: tables.weight(name).clone() for name in "ab"}


def test_groups_are_updated_together_or_not_at_all():
    """An exception on the way back from one group to the other: neither has taken a step."""

    tables, before = two_groups()
    ids = {name: torch.arange(5) for name in "ab"}
    for failing in "ab":
        out = tables(ids)
        with pytest.raises(BrokenOffError):
            sum((Fails.apply(value) if name == failing else value).sum() for name, value in out.items()).backward()
        assert all(torch.equal(tables.weight(name), before[name]) for name in "ab")
        assert tables.num_updates == 0
    sum(value.sum() for value in tables(ids).values()).backward()
    assert all(torch.equal(tables.weight(name)[:5], before[name][:5] - 0.1) for name in "ab")
    assert tables.num_updates == 1


def test_a_pass_that_failed_takes_no_update_from_the_next():
    """Two groups of one call in two backward passes, of which the first fails after its group was there."""

    tables, before = two_groups()
    late = Fails.apply(torch.ones(1, requires_grad=True))  # made first, so its turn comes after that of the lookups
    out = tables({name: torch.arange(5) for name in "ab"})
    with pytest.raises(BrokenOffError):
        (out["a"].sum() + late.sum()).backward()
    out["b"].sum().backward()
    assert torch.equal(tables.weight("a"), before["a"])
    assert torch.equal(tables.weight("b")[:5], before["b"][:5] - 0.1)
    assert tables.num_updates == 1


def test_an_update_that_is_broken_off_is_not_repeated(monkeypatch):
    tables = make(cache=0.5)

    def fails(*_):
        raise BrokenOffError

    monkeypatch.setattr("hotbed.tables.group.group.update", fails)
    with pytest.raises(BrokenOffError):
        tables(SMALL).sum().backward()
    with pytest.raises(HotbedError, match="an update of rows was broken off"):
        tables(SMALL)


def test_what_a_change_keeps_is_not_made_in_inference_mode():
    tables = hotbed.EmbeddingTables({"a": Table(9, 2)})
    with torch.inference_mode():
        with tables.changes.changing("a test"):
            assert not torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize("where", [{"cache": 0.5}, {"hbm": "1MiB"}], ids=["cache", "hbm"])
@pytest.mark.parametrize("ahead", [False, True])
def test_evaluation_in_inference_mode_between_training(where, ahead):
    plain, cached = make(), make(**where)
    batches = [torch.randint(0, 100, (40, 1), generator=torch.Generator().manual_seed(n)) for n in range(6)]
    for n, ids in enumerate(batches):
        for tables in (plain, cached):
            tables(ids).square().sum().backward()
        with torch.inference_mode():
            loader = batches[n:]
            for seen in hotbed.prefetch(loader, cached) if ahead else loader:
                assert torch.equal(cached(seen), plain(seen))
    assert torch.equal(cached.weight("a"), plain.weight("a"))


def test_threads_take_turns():
    tables = {name: Table(400, 8) for name in "ab"}
    plain, cached = (hotbed.EmbeddingTables(tables, optim.Adagrad(lr=0.1), **where) for where in ({}, {"cache": 0.6}))
    batches = [torch.randint(0, 400, (150, 2), generator=torch.Generator().manual_seed(n)) for n in range(20)]
    wrong, stop = [], threading.Event()

    def evaluate():
        while not stop.is_set():
            with torch.no_grad():
                if not bool(cached(batches[0]).isfinite().all()):
                    wrong.append("not finite")

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for ids in batches:
            for each in (plain, cached):
                each(ids).square().sum().backward()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert all(torch.equal(plain.weight(name), cached.weight(name)) for name in "ab")
    for group in cached.groups:
        group.residency.cache.check_integrity()


def test_pieces_of_weights_are_as_rows_are_when_they_are_read():
    plain, cached = make(), make(cache=0.3)
    pieces = cached.weight_pieces("a")
    batches = [torch.randint(0, 100, (20, 1), generator=torch.Generator().manual_seed(n)) for n in range(20)]
    for n, ids in enumerate(hotbed.prefetch(batches, cached)):
        before = plain.weight("a").clone()
        plain(ids).sum().backward()
        loss = cached(ids).sum()
        if n == 10:
            assert torch.equal(torch.cat(list(pieces)), before)
        loss.backward()
    assert torch.equal(plain.weight("a"), cached.weight("a"))


def test_a_latch_can_be_left_and_waited_for_again():
    latch, ready = Latch(), threading.Event()

    def interrupt():
        ready.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()

    def interrupted():
        ready.set()
        latch.wait()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    thread.join()
    assert not latch.wait(seconds=0)
    other = threading.Thread(target=latch.set)
    other.start()
    assert latch.wait()
    other.join()
    latch.set()
    assert latch.wait()


def test_nobody_waits_for_a_thread_that_has_ended():
    def fails():
        raise BrokenOffError

    runner = Runner(fails, "hotbed-test")
    runner.join()  # not started
    assert not runner.is_alive()
    runner.start()
    assert not Latch().wait(runner.is_alive)
    assert isinstance(runner.error, BrokenOffError)
