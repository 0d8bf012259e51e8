"""The overlapped loop in the hands of a hostile user, on the CPU: whatever happens, rows are those of the plain loop."""

import contextlib
import dataclasses
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import UserDict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import hotbed
from hotbed import Jagged, Table, optim
from hotbed.errors import BudgetError, ConfigError, HotbedError, IdError, ShapeError
from hotbed.host.handover import Latch
from hotbed.pipeline.batches import tensors_in, to_device
from hotbed.pipeline.feed import Feed
from hotbed.pipeline.transfer_thread import TransferThread, WindowRows
from hotbed.store import MemoryStore
from hotbed.tables.group.cached import CachedRows
from hotbed.types import Batch

ROWS = {"a": 60, "b": 25, "c": 80}
SMALL = {"cache": 0.4}  # evicts at every window
WINDOWS = [{}, {"window": 1, "look_ahead": 1}, {"window": 2, "look_ahead": 5}, {"window": 4, "look_ahead": 12}]

FLAT = 16 << 20  # memory that arenas of a process with thousands of tests behind it may shift by; alone it is 60 KiB


class BrokenError(Exception):
    """Raised by the tests' own loaders and stores."""


def feeding():
    """Threads that belong to a feed; those of the ops stay, whatever runs."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name not in ("hotbed-op", "hotbed-rows"))


@pytest.fixture(autouse=True)
def no_thread_stays():
    before = feeding()
    yield
    assert feeding() == before


def matrices(count, size=6, seed=0):
    """Skewed ids [size, 3]."""
    generator = torch.Generator().manual_seed(seed)
    columns = [(torch.rand(count, size, generator=generator) ** 3 * limit).long() for limit in ROWS.values()]
    return list(torch.stack(columns, dim=2))


def make(**cache):
    """Two groups of tables."""
    tables = {"a": Table(ROWS["a"], 3), "b": Table(ROWS["b"], 3), "c": Table(ROWS["c"], 5)}
    return hotbed.EmbeddingTables(tables, optim.Adam(lr=0.1), output="concat", seed=1, **cache)


def step(tables, ids, bags=None):
    loss = tables(ids, bags).pow(2).sum()
    loss.backward()
    return loss.item()


def train(tables, loader, losses, **ahead):
    """Train ahead of time; `losses` has those of the batches that were trained, whatever happens."""
    for ids in hotbed.prefetch(loader, tables, **ahead):
        losses.append(step(tables, ids))


def plain_loop(batches):
    tables = make()
    return [step(tables, ids) for ids in batches], tables


def assert_same(tables, plain):
    expected, found = plain.state_dict(), tables.state_dict()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    for group in tables.groups:
        group.residency.cache.check_integrity()


def both(script, **options):
    """Run script(tables, feed) with plain tables and a plain loop, and behind a cache ahead of time; all must be the same."""
    plain = make()
    expected = script(plain, lambda loader, tables: iter(loader))
    for ahead in WINDOWS:
        cached = make(**SMALL)
        found = script(cached, lambda loader, tables, ahead=ahead: hotbed.prefetch(loader, tables, **ahead, **options))
        assert expected == found, ahead
        assert_same(cached, plain)
        counts = cached.counters()
        assert counts.keys == counts.hits + counts.misses
        assert cached.ownership.feed is None
        assert not cached.ownership._planned
    return cached


def failing(batches, count):
    yield from batches[:count]
    raise BrokenError(f"after {count}")


@pytest.mark.parametrize("ahead", WINDOWS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 20])
def test_a_loader_that_raises(count, ahead):
    batches, tables, losses = matrices(20), make(**SMALL), []
    with pytest.raises(BrokenError, match=f"after {count}") as raised:
        train(tables, failing(batches, count), losses, **ahead)
    assert "failing" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    expected, plain = plain_loop(batches[:count])
    assert losses == expected
    assert_same(tables, plain)
    for each in (tables, plain):
        losses.append(step(each, batches[0]))  # usable
    assert losses[-1] == losses[-2]
    for ids in hotbed.prefetch(batches, tables, **ahead):
        assert step(tables, ids) == step(plain, ids)
    assert_same(tables, plain)


def test_what_cannot_be_read_at_all():
    with pytest.raises(TypeError, match="not iterable"):
        next(hotbed.prefetch(5, make(**SMALL)))


@pytest.mark.parametrize("cache", [{}, SMALL], ids=str)
@pytest.mark.parametrize("count", [0, 1])
def test_short_loaders(count, cache):
    tables, batches = make(**cache), matrices(count)
    found = list(hotbed.prefetch(batches, tables))
    assert [id(ids) for ids in found] == [id(ids) for ids in batches]
    assert list(hotbed.prefetch(iter(()), tables)) == []
    losses = [step(tables, ids) for ids in hotbed.prefetch(batches, tables)]
    assert losses == plain_loop(batches)[0]


def test_a_batch_without_samples():
    def script(tables, feed):
        batches = matrices(9)
        batches[4] = batches[8] = batches[0][:0]
        return [step(tables, ids) for ids in feed(batches, tables)]

    both(script)


@pytest.mark.parametrize("how", ["break", "close", "collect", "raise", "hold"])
def test_closing_early(how):
    def script(tables, feed):
        losses, held = [], []

        def some(limit):
            found = feed(matrices(20), tables)
            for n, ids in enumerate(found):
                losses.append(step(tables, ids))
                if n == limit:
                    if how == "raise":
                        raise BrokenError
                    if how == "close" and hasattr(found, "close"):
                        found.close()
                    if how == "hold":
                        held.append(found)
                    break
            if how == "collect":
                ring = [found]
                ring.append(ring)

        for limit in (0, 6, 19):
            try:
                some(limit)
            except BrokenError:
                assert how == "raise"
            if how == "collect":
                gc.collect()
            losses.append(step(tables, matrices(1, seed=limit)[0]))
        while held:
            held.pop()
        return losses

    both(script)


def test_a_feed_collected_by_its_own_reader():
    """It is closed by the thread that trains, when that next uses the tables."""
    plain, tables, batches, collect = make(), make(**SMALL), matrices(60), threading.Event()

    def loader():
        yield from batches[:4]
        collect.wait()
        gc.collect()
        yield from batches[4:]

    def leave_in_a_ring():
        ring = [hotbed.prefetch(loader(), tables, window=1, look_ahead=1)]
        ring.append(ring)
        assert step(tables, next(ring[0])) == step(plain, batches[0])

    gc.disable()
    try:
        leave_in_a_ring()
        collect.set()
        for thread in threading.enumerate():
            if thread.name == "hotbed-reader":
                thread.join()
    finally:
        gc.enable()
    assert len(tables.ownership.left) == 1
    for ids in batches:
        assert step(tables, ids) == step(plain, ids)
    assert_same(tables, plain)


def test_a_feed_collected_amid_a_change(monkeypatch):
    """The collector may come at any time, also while rows are moved for another call: the feed is closed by the next one."""
    plain, tables, batches, begin = make(), make(**SMALL), matrices(60), CachedRows.begin

    def collecting(*arguments):
        monkeypatch.setattr(CachedRows, "begin", begin)
        gc.collect()
        assert len(tables.ownership.left) == 1
        return begin(*arguments)

    def leave_in_a_ring():
        ring = [hotbed.prefetch(batches, tables)]
        ring.append(ring)
        assert step(tables, next(ring[0])) == step(plain, batches[0])

    gc.disable()
    try:
        leave_in_a_ring()
        monkeypatch.setattr(CachedRows, "begin", collecting)
        assert step(tables, batches[9]) == step(plain, batches[9])
    finally:
        gc.enable()
    losses = []
    train(tables, batches, losses)
    assert losses == [step(plain, ids) for ids in batches]
    assert_same(tables, plain)


@pytest.mark.parametrize("cache", [SMALL, {}], ids=["cache", "none"])
def test_a_feed_collected_in_a_fork(cache):
    """As in a DataLoader's worker: the threads of the feed are not there, and nobody waits for them."""
    tables = make(**cache)
    feed = hotbed.prefetch(matrices(60), tables)
    step(tables, next(feed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads
        worker = os.fork()
    if worker == 0:
        signal.alarm(300)
        feed.close()
        os._exit(0)
    ended = os.waitpid(worker, 0)
    feed.close()
    assert ended == (worker, 0)


@pytest.mark.parametrize("cache", [SMALL, {}], ids=["cache", "none"])
def test_an_open_loop_is_refused_in_a_fork(cache):
    """Its threads are not there: waiting for them would never end."""
    tables = make(**cache)
    feed = hotbed.prefetch(matrices(60), tables)
    step(tables, next(feed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        worker = os.fork()
    if worker == 0:
        signal.alarm(300)
        refused = 0
        for call in (
            lambda: next(feed),
            lambda: tables(matrices(3)[2]),
            tables.flush,
            lambda: [*hotbed.prefetch(matrices(3), tables)],
        ):
            try:
                call()
            except HotbedError as error:
                refused += "forked from" in str(error)
        os._exit(refused)
    ended = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    feed.close()
    assert ended == (4 if cache else 1)  # rows that are all there can be looked up


def test_a_feed_that_is_never_asked():
    tables = make(**SMALL)
    feed = hotbed.prefetch(matrices(3), tables)
    assert tables.ownership.feed is None
    feed.close()
    feed = hotbed.prefetch(matrices(3), tables)
    del feed
    assert step(tables, matrices(1)[0]) == step(make(), matrices(1)[0])


def test_passes_one_after_the_other():
    def script(tables, feed):
        batches = matrices(11)
        return [step(tables, ids) for _ in range(3) for ids in feed(batches, tables)]

    both(script)


@pytest.mark.parametrize("inner", [{}, {"window": 1, "look_ahead": 1}, {"look_ahead": 200}], ids=str)
def test_evaluation_inside_training(inner):
    def script(tables, feed):
        seen = []
        for n, ids in enumerate(feed(matrices(45), tables)):
            seen.append(step(tables, ids))
            if n in (0, 5, 6):
                tables.eval()
                with torch.no_grad():
                    for m, other in enumerate(feed(matrices(12, seed=n), tables, **inner)):
                        seen.append(tables(other).sum().item())
                        if m == n + 6:
                            break
                tables.train()
        return seen

    plain = make()
    expected = script(plain, lambda loader, tables, **inner: iter(loader))
    for ahead in WINDOWS:

        def feed(loader, tables, ahead=ahead, **inner):
            return hotbed.prefetch(loader, tables, **(inner or ahead))

        cached = make(**SMALL)
        assert script(cached, feed) == expected, ahead
        assert_same(cached, plain)


@pytest.mark.parametrize("ahead", [{}, {"look_ahead": 100}, {"window": 3}], ids=str)
def test_the_outer_feed_looks_farther_than_the_inner(ahead):
    """The batches that wait outside are more than the inner feed has bits for."""
    batches, plain, cached = matrices(120), make(), make(**SMALL)
    expected = [step(plain, ids) for ids in batches]
    found = []
    for n, ids in enumerate(hotbed.prefetch(batches, cached, **ahead)):
        found.append(step(cached, ids))
        if n % 7 == 3:
            with torch.no_grad():
                for other in hotbed.prefetch(matrices(3, seed=n), cached, window=1, look_ahead=1 + n % 2):
                    cached(other)
    assert found == expected
    assert_same(cached, plain)


def test_two_at_a_time():
    def script(tables, feed):
        losses = []
        first, second = matrices(15), matrices(12, seed=5)
        for ids, other in zip(feed(first, tables), feed(second, tables)):
            losses += [step(tables, ids), step(tables, other)]
        for ids, other in zip(feed(first, tables), feed(first, tables)):  # the very same objects
            losses += [step(tables, other), step(tables, ids)]
        return losses

    both(script)


def test_other_calls_in_the_loop():
    def script(tables, feed):
        losses = []
        others = matrices(40, size=4, seed=9)
        for n, ids in enumerate(feed(matrices(25), tables)):
            if n % 3 == 1:
                losses.append(step(tables, others[n]))
            if n % 4 == 1:
                with torch.no_grad():
                    losses.append(tables(others[n + 1]).sum().item())
            loss = tables(ids).pow(2).sum()
            if n % 5 == 2:
                losses.append(step(tables, others[n + 2]))
            loss.backward()
            losses.append(loss.item())
        return losses

    both(script)


def test_a_long_evaluation_of_plain_calls():
    def script(tables, feed):
        losses = []
        for n, ids in enumerate(feed(matrices(45), tables)):
            losses.append(step(tables, ids))
            if n == 9:
                with torch.no_grad():
                    losses += [tables(other).sum().item() for other in matrices(270, seed=4)]
        return losses

    both(script)


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("what", ["state_dict", "weight", "states", "flush", "to"])
def test_all_rows_are_asked_for_in_the_loop(what, when):
    ask = {
        "state_dict": lambda tables: [value.sum().item() for value in tables.state_dict().values()],
        "weight": lambda tables: tables.weight("c").sum().item(),
        "states": lambda tables: [state.sum().item() for state in tables.states("a").values()],
        "flush": lambda tables: tables.flush(),
        "to": lambda tables: tables.to("cpu") and None,
    }[what]

    def script(tables, feed):
        seen = []
        for n, ids in enumerate(feed(matrices(16), tables)):
            now = n in (0, 3, 4, 15)
            if now and when == "before":
                seen.append(ask(tables))
            loss = tables(ids).pow(2).sum()
            if now and when == "between":
                seen.append(ask(tables))
            loss.backward()
            if now and when == "after":
                seen.append(ask(tables))
            seen.append(loss.item())
        return seen

    both(script)


@pytest.mark.parametrize("cache", [{}, SMALL], ids=str)
def test_rows_are_asked_for_between_forward_and_backward_of_a_plain_loop(cache):
    plain, tables = make(), make(**cache)
    for ids in matrices(12):
        for each in (plain, tables):
            loss = each(ids).pow(2).sum()
            each.flush()
            loss.backward()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, tables.state_dict()[name]), name


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_rows_are_loaded_in_the_loop(when):
    saved = plain_loop(matrices(5, seed=7))[1].state_dict()

    def script(tables, feed):
        seen = []
        for n, ids in enumerate(feed(matrices(40), tables)):
            now = n in (0, 3, 4, 39)
            if now and when == "before":
                tables.load_state_dict(saved)
            loss = tables(ids).pow(2).sum()
            if now and when == "between":
                tables.load_state_dict(saved)
            loss.backward()
            if now and when == "after":
                tables.load_state_dict(saved)
            seen.append(loss.item())
        return seen

    both(script)


@pytest.mark.parametrize("user_rows", [60, None], ids=["preset", "dynamic"])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_one_table_is_loaded_in_the_loop(when, user_rows):
    """The caches of the others stay, and know of batches ahead; their ids are not learned twice."""
    ends = []
    for feed in (lambda loader, _: iter(loader), lambda loader, tables: hotbed.prefetch(loader, tables, window=2)):
        budgets = {"cache": 0.4} if user_rows else {"hbm": "16KiB", "memory": "1MiB"}
        tables = hotbed.EmbeddingTables({"user": Table(user_rows, 3), "ad": Table(25, 5)}, output="concat", **budgets)
        weight, losses = torch.ones(25, 5), []
        for n, ids in enumerate(feed([each[:, :2].contiguous() for each in matrices(30)], tables)):
            now = n in (0, 3, 4, 29)
            if now and when == "before":
                tables.load_weight("ad", weight)
            loss = tables(ids).pow(2).sum()
            if now and when == "between":
                tables.load_weight("ad", weight)
            loss.backward()
            if now and when == "after":
                tables.load_weight("ad", weight)
            losses.append(loss.item())
        ids, columns = tables.rows("user")
        ends.append((losses, tables.id_counts(), ids.tolist(), columns["weight"].tolist()))
    assert ends[0] == ends[1]


def test_forward_before_the_last_backward():
    def script(tables, feed):
        losses, pending = [], None
        for ids in feed(matrices(21), tables):
            loss = tables(ids).pow(2).sum()
            losses.append(loss.item())
            if pending is not None:
                pending.backward()
            pending = loss
        pending.backward()
        return losses

    both(script)


def test_a_batch_looked_up_before_the_feed_and_updated_after_it():
    def script(tables, feed):
        losses = []
        early = tables(matrices(1, seed=3)[0]).pow(2).sum()
        for n, ids in enumerate(feed(matrices(20), tables)):
            if n == 9:
                early.backward()
            losses.append(step(tables, ids))
        return losses

    both(script)


def test_batches_kept_and_trained_later():
    def script(tables, feed):
        losses, kept = [], []
        for ids in feed(matrices(24), tables):
            kept.append(ids)
            if len(kept) == 5:
                losses += [step(tables, each) for each in kept]
                kept.clear()
        return losses

    both(script)


def test_a_copy_of_the_ids():
    def script(tables, feed):
        losses = []
        for n, ids in enumerate(feed(matrices(20), tables)):
            losses.append(step(tables, ids if n % 3 else ids.clone()))
        return losses

    both(script)


def test_ids_changed_in_the_loop():
    def script(tables, feed):
        losses = []
        for n, ids in enumerate(feed(matrices(20), tables)):
            if n % 3 == 1:
                ids.add_(1).remainder_(20)
            loss = tables(ids).pow(2).sum()
            if n % 4 == 1:
                ids.zero_()  # backward remembers what was looked up
            loss.backward()
            losses.append(loss.item())
        return losses

    both(script)


def test_features_changed_in_the_loop():
    def script(tables, feed):
        losses = []
        loader = ({"a": ids[:, 0], "b": ids[:, 1], "c": ids[:, 2]} for ids in matrices(20))
        for n, features in enumerate(feed(loader, tables)):
            if n % 3 == 1:
                features["a"] = features["b"].clone()
            if n % 3 == 2:
                features["c"] //= 2
            losses.append(step(tables, features))
        return losses

    both(script)


def test_one_tensor_many_times():
    def script(tables, feed):
        ids = matrices(1)[0]
        return [step(tables, each) for each in feed([ids] * 12, tables)]

    both(script)


def bag(ids, column):
    """Bags of 0, 1, 2, 0, 1, 2 values."""
    values = ids[:, column]
    return Jagged(values, torch.tensor([0, 0, 1, 3, 3, 4, 6]))


KINDS = {
    "batch": (lambda ids: Batch(torch.ones(6), torch.ones(6, 1), ids), lambda batch: (batch.ids, batch.bags)),
    "batch with bags": (
        lambda ids: Batch(torch.ones(6), torch.ones(6, 1), ids[:, 1:], {"a": bag(ids, 0)}),
        lambda batch: (batch.ids, batch.bags),
    ),
    "tensor": (lambda ids: ids, lambda batch: (batch, None)),
    "int32": (lambda ids: ids.int(), lambda batch: (batch, None)),
    "view": (lambda ids: torch.cat([ids, ids]).t()[:, :6].t(), lambda batch: (batch, None)),
    "tuple": (lambda ids: (ids, torch.ones(6)), lambda batch: (batch[0], None)),
    "list": (lambda ids: [ids, torch.ones(6)], lambda batch: (batch[0], None)),
    "tuple of a batch": (
        lambda ids: (Batch(torch.ones(6), torch.ones(6, 1), ids), 1),
        lambda batch: (batch[0].ids, batch[0].bags),
    ),
    "ids": (lambda ids: {"ids": ids, "labels": torch.ones(6)}, lambda batch: (batch["ids"], None)),
    "ids and bags": (
        lambda ids: {"ids": ids[:, 1:], "bags": {"a": bag(ids, 0)}},
        lambda batch: (batch["ids"], batch["bags"]),
    ),
    "ids of features": (
        lambda ids: {"ids": {"a": bag(ids, 0), "b": ids[:, 1], "c": ids[:, 2]}, "weight": 3},
        lambda batch: (batch["ids"], None),
    ),
    "features": (lambda ids: {"a": bag(ids, 0), "b": ids[:, 1], "c": ids[:, 1:]}, lambda batch: (batch, None)),
    "tuple of features": (
        lambda ids: ({"a": ids[:, 0], "b": ids[:, 1], "c": ids[:, 2]}, torch.ones(6)),
        lambda batch: (batch[0], None),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_batches(kind):
    wrap, unwrap = KINDS[kind]

    def script(tables, feed):
        loader = [wrap(ids) for ids in matrices(14)]
        losses = []
        for n, batch in enumerate(feed(loader, tables)):
            assert type(batch) is type(loader[n])
            losses.append(step(tables, *unwrap(batch)))
        return losses

    cached = both(script)
    assert cached.counters().batches == 2 * 14  # each was planned once, by each group: it was recognised


@dataclasses.dataclass(frozen=True)
class Visit:
    """A batch of a user's own."""

    labels: torch.Tensor
    items: torch.Tensor
    note: str = "as it is"


class Encoding(UserDict):
    """Like those of Hugging Face: a mapping with attributes that moves itself in place."""

    def __getattr__(self, name):
        if name.startswith("_") or name == "data":
            raise AttributeError(name)
        return self.data[name]

    def to(self, device):
        self.data = {name: part.to(device) for name, part in self.data.items()}
        return self


class Plain:
    """An object that nothing is known of."""

    def __init__(self, items):
        self.items = items


OWN_KINDS = {
    "dataclass": (lambda ids: Visit(torch.ones(6), ids), lambda batch: batch.items),
    "second of a tuple": (lambda ids: (torch.ones(6), ids), lambda batch: batch[1]),
    "mapping": (lambda ids: {"labels": torch.ones(6), "input": ids}, lambda batch: batch["input"]),
    "encoding": (lambda ids: Encoding(labels=torch.ones(6), input=ids), lambda batch: batch.input),
    "object": (Plain, lambda batch: batch.items),
    "nested": (lambda ids: {"x": [Visit(torch.ones(6), ids)]}, lambda batch: batch["x"][0].items),
    "new mapping": (
        lambda ids: (torch.ones(6), ids[:, 0], ids[:, 1], ids[:, 2]),
        lambda batch: dict(zip("abc", batch[1:])),
    ),
    "new mapping of bags": (
        lambda ids: (bag(ids, 0), ids[:, 1], ids[:, 2]),
        lambda batch: {"a": Jagged(*batch[0]), "b": batch[1], "c": batch[2]},
    ),
    "bags": (lambda ids: (1, ids[:, 1:], bag(ids, 0)), lambda batch: (batch[1], {"a": batch[2]})),
}


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_a_batch_of_any_kind_whose_ids_the_caller_finds(kind):
    wrap, find = OWN_KINDS[kind]

    def script(tables, feed):
        loader, losses = [wrap(ids) for ids in matrices(14)], []
        for n, batch in enumerate(feed(loader, tables)):
            assert type(batch) is type(loader[n])
            found = find(batch)
            losses.append(step(tables, *(found if isinstance(found, tuple) else (found,))))
        return losses

    cached = both(script, ids=find)
    assert cached.counters().batches == 2 * 14  # each was planned once, by each group: it was recognised


def test_batches_of_any_kind_that_were_read_ahead_are_given_back():
    stream, tables, losses = (Visit(torch.ones(6), ids) for ids in matrices(14)), make(**SMALL), []
    for _ in range(2):
        with contextlib.closing(hotbed.prefetch(stream, tables, ids=lambda batch: batch.items)) as batches:
            losses += [step(tables, batch.items) for batch in itertools.islice(batches, 4)]
    with contextlib.closing(hotbed.prefetch(stream, tables, ids=lambda batch: batch.items)) as batches:
        losses += [step(tables, batch.items) for batch in batches]
    expected, plain = plain_loop(matrices(14))
    assert losses == expected
    assert_same(tables, plain)


@pytest.mark.parametrize(
    ("find", "says"),
    [
        (lambda batch: batch["item"], "fails for a batch of type Visit: TypeError"),
        (lambda batch: batch.absent, "AttributeError: 'Visit' object has no attribute 'absent'"),
        (
            lambda batch: batch.items.tolist(),
            "returns list for a batch of type Visit; it must return what the tables are",
        ),
        (lambda batch: (batch.items, batch.labels), "returns Tensor and Tensor for bags"),
        (lambda batch: batch.items[:, [0, 1, 2]], "makes new tensors from a batch of type Visit.*collate_fn"),
    ],
)
def test_ids_that_are_not_found(find, says):
    tables = make(**SMALL)
    with pytest.raises(ShapeError, match=says):
        next(hotbed.prefetch([Visit(torch.ones(6), ids) for ids in matrices(3)], tables, ids=find))


def test_ids_must_be_a_function():
    with pytest.raises(ConfigError, match="ids must be a function that finds the ids in a batch, not str"):
        hotbed.prefetch([], make(**SMALL), ids="items")


def test_objects_are_moved_and_the_loaders_stay():
    ids, meta = torch.ones(6, 3, dtype=torch.int64), torch.device("meta")
    for one in (Visit(torch.ones(6), ids), Encoding(labels=torch.ones(6), items=ids)):
        moved = to_device(one, meta)
        assert type(moved) is type(one)
        assert {part.device.type for part in tensors_in(moved)} == {"meta"}
        assert {part.device.type for part in tensors_in(one)} == {"cpu"}
        assert to_device(one, torch.device("cpu")) is one
    assert to_device(Visit(torch.ones(6), ids), meta).note == "as it is"
    unknown = Plain(ids)
    assert to_device(unknown, meta) is unknown


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ("abc", "batch of type str"),
        (None, "batch of type NoneType"),
        ((), "batch of type tuple"),
        (7, "batch of type int"),
        (np.zeros((6, 3), dtype=np.int64), "batch of type ndarray"),
        ((None, torch.ones(6)), "NoneType"),
        ((np.zeros((6, 3), dtype=np.int64), 1), "ndarray"),
        ([1, 2, 3], "int"),
        (("ids",), "str"),
        ({"ids": 4}, "int"),
        ({"ids": [1, 2]}, "list"),
        ({"ids": torch.zeros(6, 2, dtype=torch.int64), "bags": [1]}, "bags"),
        ({"a": torch.zeros(6, dtype=torch.int64)}, "missing: 'b', 'c'"),
        ({"a": 1, "b": 2, "c": 3}, "feature 'a'|'a' must be"),
        (torch.zeros(6, 3), "int64"),
        (torch.zeros(6, 2, dtype=torch.int64), r"\[B, 3\]"),
        (torch.zeros(3, dtype=torch.int64), r"\[B, 3\]"),
    ],
    ids=str,
)
def test_wrong_kinds_of_batches(batch, says):
    tables, batches = make(**SMALL), matrices(3)
    losses = []
    with pytest.raises(ShapeError, match=says):
        train(tables, [*batches, batch, *batches], losses, window=1, look_ahead=1)
    expected, plain = plain_loop(batches[: len(losses)])
    assert losses == expected
    assert_same(tables, plain)


@pytest.mark.parametrize("ahead", WINDOWS, ids=str)
@pytest.mark.parametrize(("column", "value"), [(0, 60), (1, -1), (2, 2**40)])
def test_an_id_outside_its_table(column, value, ahead):
    tables, batches, losses = make(**SMALL), matrices(20), []
    batches[7][4, column] = value
    with pytest.raises(IdError, match=rf"id {value} of feature '{'abc'[column]}' in sample 4"):
        train(tables, batches, losses, **ahead)
    assert len(losses) <= 7
    expected, plain = plain_loop(batches[: len(losses)])
    assert losses == expected
    assert_same(tables, plain)


def test_a_batch_that_cannot_fit():
    ids = torch.arange(30).repeat_interleave(2).reshape(-1, 1)
    tables = hotbed.EmbeddingTables({"a": Table(100, 2)}, cache=0.2)
    for window in (None, 1, 8):
        with pytest.raises(BudgetError, match="one batch needs 30 rows") as refused:
            next(hotbed.prefetch([ids] * 5, tables, window=window))
        assert refused.value.num_slots == 30
    assert tables.num_updates == 0
    assert torch.equal(tables.weight("a"), hotbed.EmbeddingTables({"a": Table(100, 2)}).weight("a"))
    given = str(refused.value).partition("hbm='")[2].partition("'")[0]
    for budget in ({"cache": 30 / 100}, {"hbm": given}):
        tables = hotbed.EmbeddingTables({"a": Table(100, 2)}, **budget)
        for batch in hotbed.prefetch([ids] * 5, tables):
            tables(batch).sum().backward()
        assert tables.num_updates == 5


def test_a_later_batch_that_cannot_fit():
    batches, large = matrices(12), matrices(1, size=4000)[0]
    tables, losses = make(cache=0.6), []
    with pytest.raises(BudgetError, match="one batch needs"):
        train(tables, [*batches, large], losses)
    expected, plain = plain_loop(batches[: len(losses)])
    assert losses == expected
    assert_same(tables, plain)


@pytest.mark.parametrize("ahead", WINDOWS, ids=str)
@pytest.mark.parametrize("what", ["id", "shape", "budget"])
def test_a_refused_batch_takes_no_other_with_it(what, ahead):
    """Of a stream that is read on: every other batch comes once and in order, as in a plain loop that leaves it out."""
    batches, (tables, losses) = matrices(20), (make(cache=0.6), [])
    good = batches[:7] + batches[8:]
    if what == "id":
        batches[7] = batches[7] + 1000
    else:
        batches[7] = batches[7][:, :2] if what == "shape" else matrices(1, size=4000)[0]
    stream = iter(batches)
    with pytest.raises((IdError, ShapeError, BudgetError)):
        train(tables, stream, losses, **ahead)
    train(tables, stream, losses, **ahead)
    expected, plain = plain_loop(good)
    assert losses == expected
    assert_same(tables, plain)


@pytest.mark.parametrize("place", ["_plan", "_candidate", "_next_batches", "_begin", "_next"])
def test_an_interrupt_loses_no_batch(place, monkeypatch):
    """Ctrl-C while the feed works, wherever it is not in the middle of a change: a stream that is read on gives every batch."""
    original, batches = getattr(Feed, place), matrices(20)
    expected, plain = plain_loop(batches)
    for number in range(0, 24, 3):
        count = itertools.count()

        def interrupted(*arguments, count=count, number=number, **options):
            found = original(*arguments, **options)
            if next(count) == number:
                raise KeyboardInterrupt
            return found

        stream, (tables, losses) = iter(batches), (make(**SMALL), [])
        monkeypatch.setattr(Feed, place, interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            train(tables, stream, losses)
        monkeypatch.setattr(Feed, place, original)
        train(tables, stream, losses)
        assert losses == expected, number
        assert_same(tables, plain)


@pytest.mark.parametrize("name", ["window", "look_ahead"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "2", True, 1000])
def test_mistakes_in_numbers(name, value):
    for cache in ({}, SMALL):
        with pytest.raises(ConfigError, match=f"{name} must be a whole number from 1 to"):
            hotbed.prefetch([], make(**cache), **{name: value})


@pytest.mark.parametrize("tables", [None, [], torch.nn.Linear(1, 1)])
def test_mistakes_in_tables(tables):
    with pytest.raises(ConfigError, match="EmbeddingTables"):
        hotbed.prefetch([], tables)


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference"])
def test_evaluation_keeps_rows_clean(how):
    tables, plain = make(**SMALL), make()
    for each in (tables, plain):
        each.train(how != "eval")
    mode = {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[how]
    with mode():
        for ids in hotbed.prefetch(matrices(30), tables):
            assert torch.equal(tables(ids), plain(ids))
    counts = tables.counters()
    assert counts.written_back == counts.bytes_out == 0
    assert counts.evictions > 50
    assert_same(tables, plain)


def test_training_with_a_feed_made_for_evaluation():
    """Rows planned as clean are written back all the same once they are trained."""
    for ahead in WINDOWS:
        tables, plain = make(**SMALL), make()
        with torch.no_grad():
            feed = hotbed.prefetch(matrices(40), tables, **ahead)
        losses = [step(tables, ids) for ids in feed]
        assert losses == [step(plain, ids) for ids in matrices(40)]
        assert_same(tables, plain)


def test_training_starts_in_the_middle_of_an_evaluation():
    def script(tables, feed):
        seen = []
        tables.eval()
        for n, ids in enumerate(feed(matrices(40), tables)):
            if n % 6 == 3:
                tables.train()
            if n % 6 == 5:
                tables.eval()
            vectors = tables(ids)
            if tables.training:
                vectors.pow(2).sum().backward()
            seen.append(vectors.sum().item())
        tables.train()
        return seen

    both(script)


@pytest.mark.parametrize(
    ("method", "after", "ahead"),
    [
        *((*case, ahead) for case in (("write", 0), ("write", 4), ("fetch", 0), ("fetch", 3)) for ahead in WINDOWS),
        *(("read", 0, ahead) for ahead in WINDOWS[2:]),
    ],
    ids=str,
)
def test_a_store_that_fails(method, after, ahead, monkeypatch):
    monkeypatch.setattr(CachedRows, "is_direct", False)  # so that a thread moves rows
    tables = make(**SMALL, policy="lru")  # lets rows go that come back at once, which are read late
    ids = matrices(1)[0]
    for each in matrices(10, seed=3):
        step(tables, each)
    original, calls = getattr(MemoryStore, method), itertools.count()

    def fails(store, *arguments):
        if threading.current_thread().name == "hotbed-transfer" and next(calls) >= after:
            raise BrokenError("no space left on the device")
        return original(store, *arguments)

    monkeypatch.setattr(MemoryStore, method, fails)
    with pytest.raises(BrokenError) as raised:
        train(tables, matrices(80), [], **ahead)
    assert "fails" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    monkeypatch.undo()
    for use in (
        lambda: tables(ids),
        lambda: next(hotbed.prefetch([ids], tables)),
        lambda: tables.weight("a"),
        tables.state_dict,
        tables.flush,
    ):
        with pytest.raises(HotbedError, match="lost rows") as refused:
            use()
        assert isinstance(refused.value.__cause__, BrokenError)


@pytest.mark.parametrize(("method", "after"), [("keep", 0), ("keep", 4), ("parts", 0), ("parts", 3)], ids=str)
def test_memory_that_fails_between_two_windows(method, after, monkeypatch):
    tables = make(**SMALL, policy="lru")
    for each in matrices(10, seed=3):
        step(tables, each)
    original, calls = getattr(MemoryStore, method), itertools.count()

    def fails(store, *arguments):
        if next(calls) >= after:
            raise BrokenError("no memory left")
        return original(store, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, method, fails)
        with pytest.raises(BrokenError):
            train(tables, matrices(80), [])
    for use in (lambda: tables(matrices(1)[0]), lambda: tables.weight("a"), tables.flush):
        with pytest.raises(HotbedError, match="lost rows") as refused:
            use()
        assert isinstance(refused.value.__cause__, BrokenError)


def test_moves_that_were_waiting_when_another_failed():
    """Whoever waits for one of them goes on, and finds the error."""
    asked = threading.Event()

    class Failing:
        def write(self):
            asked.wait()
            raise BrokenError

    mover = TransferThread(torch.device("cpu"))
    first, second = WindowRows(0, [Failing()]), WindowRows(1, [])
    mover.start()
    mover.write(first)
    mover.read(second)
    mover.write(second)
    asked.set()
    third = WindowRows(2, [])
    mover.read(third)
    for wait in (lambda: mover.wait(second), mover.drain, lambda: mover.wait(third)):
        with pytest.raises(BrokenError):
            wait()
    mover.close()
    assert isinstance(mover.error, BrokenError)


def test_a_transfer_thread_does_nothing_before_the_first_request_or_after_a_drain():
    """Until then the thread of another feed may be at work on the same store."""
    done, pending = [], []

    class Store:
        def work_ahead(self):
            done.append(len(pending))
            return False

    class Requests:
        def empty(self):
            return True

        def get(self):
            return pending.pop(0)

    thread = TransferThread(torch.device("cpu"), [Store()])
    thread._tasks = Requests()
    pending[:] = [lambda: None, partial(thread._rest, Latch()), None]  # a request, a drain, the end
    thread._serve()
    assert done == [2], "once, between the first request and the drain"


def test_rows_that_leave_with_one_window_and_come_with_the_next_are_read_after_they_are_written():
    done = []

    class Rows(NamedTuple):
        number: int
        num_late: int

        def read(self):
            done.append(("read", self.number))

        def read_late(self):
            done.append(("read late", self.number))

        def write(self):
            done.append(("write", self.number))

    mover = TransferThread(torch.device("cpu"))
    mover.start()
    first, second = (mover.read([Rows(number, number)]) for number in range(2))
    mover.write(first)
    mover.drain()
    assert second.staged.is_set()
    mover.close()
    assert done == [("read", 0), ("read late", 0), ("read", 1), ("write", 0), ("read late", 1)]


def test_a_process_that_ends_waits_for_the_rows_on_their_way():
    written = []

    class Rows:
        def write(self):
            written.append("rows")

    mover = TransferThread(torch.device("cpu"))
    mover.start()
    mover.write(WindowRows(0, [Rows()]))
    mover.abandon()
    assert written == ["rows"]
    assert not mover._thread.is_alive()


class Slow:
    """A loader that gives a batch only when the last one that it gave has been used: nothing can be read far ahead."""

    def __init__(self, batches, step):
        self.batches, self.used, self.step = batches, threading.Semaphore(0), step

    def __iter__(self):
        for n, batch in enumerate(self.batches):
            if n >= self.step:
                self.used.acquire()
            yield batch


@pytest.mark.parametrize("policy", ["oracle", "lru", "lfu"])
@pytest.mark.parametrize("ahead", WINDOWS[1:], ids=str)
def test_counts_do_not_depend_on_timing(ahead, policy):
    counts = []
    for slow in (False, False, True):
        tables, batches = make(**SMALL, policy=policy), matrices(50)
        loader = Slow(batches, ahead["look_ahead"] + 2 * ahead["window"] if slow else 1000)
        for ids in hotbed.prefetch(loader, tables, **ahead):
            step(tables, ids)
            loader.used.release()
        counts.append(tables.counters()._replace(stall_seconds=0))
    assert counts[0] == counts[1] == counts[2]
    assert counts[0].written_back > 20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")


@needs_proc
def test_many_short_passes():
    tables, batches = make(**SMALL), matrices(6)
    before = feeding()
    for number in range(300):
        if number == 100:
            gc.collect()
            resident = resident_bytes()
        try:
            for n, ids in enumerate(hotbed.prefetch(failing(batches, 3) if number % 3 == 0 else batches, tables)):
                step(tables, ids)
                if number % 3 == 1 and n == 2:
                    break
        except BrokenError:
            pass
        assert feeding() == before
    gc.collect()
    assert resident_bytes() - resident < FLAT
    assert not tables.ownership._planned


@needs_proc
def test_four_thousand_steps():
    generator = torch.Generator().manual_seed(0)

    def batches():
        for _ in range(4_000):
            yield (torch.rand(8, 1, generator=generator) ** 3 * 200).long()

    plain, tables = (
        hotbed.EmbeddingTables({"a": Table(200, 2)}, optim.Adam(lr=0.1), **cache) for cache in ({}, {"cache": 0.15})
    )
    resident = 0
    for n, ids in enumerate(hotbed.prefetch(batches(), tables)):
        (plain(ids).pow(2).sum() + tables(ids).pow(2).sum()).backward()
        if n == 1000:
            gc.collect()
            resident = resident_bytes()
    gc.collect()
    assert resident_bytes() - resident < FLAT
    assert_same(tables, plain)
    counts = tables.counters()
    assert counts.batches == 4_000
    assert counts.written_back > 4_000


OPEN_LOOP = """
import sys, torch, hotbed
cache = {"cache": 0.3} if sys.argv[1] == "cached" else {}
tables = hotbed.EmbeddingTables({"a": hotbed.Table(500, 4)}, **cache)
feed = iter(hotbed.prefetch([torch.randint(0, 500, (32, 1)) for _ in range(400)], tables))
for _ in range(10):
    tables(next(feed)).sum().backward()
"""


@pytest.mark.parametrize("kind", ["cached", "plain"])
def test_a_process_that_ends_inside_a_loop_ends(kind):
    ended = subprocess.run(
        [sys.executable, "-c", OPEN_LOOP, kind], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_windows_that_are_taken_back_are_kept_until_the_device_is_past_them(monkeypatch):
    """Rows of dynamic ids are exchanged before their windows are forgotten: the device may still read that memory."""
    tables = hotbed.EmbeddingTables({"a": Table(None, 4)}, hbm="4KiB")
    feed = Feed([torch.arange(8)[:, None] + n for n in range(20)], tables, 1, 6)
    decided, retired = [], []
    take_back = Feed._take_back
    monkeypatch.setattr(Feed, "_take_back", lambda self: decided.extend(self._decided) or take_back(self))
    monkeypatch.setattr(Feed, "_retire", lambda self, window: retired.append(window))
    feed.start()
    try:
        for _ in range(20):  # until the loader has given so much that windows are ahead
            (batch,) = feed.next()
            tables(batch).sum().backward()
            if feed._decided:
                break
        before = len(retired)
        tables.ownership.claim(drop=True)  # as by whoever trains another batch in between
        assert len(decided) > 0
        assert retired[before:] == decided
    finally:
        feed.close()


@pytest.mark.parametrize(("window", "ahead", "expected"), [(1, 6, 6), (4, 2, 4), (None, 3, 3), (1, 30, 30)])
def test_as_many_batches_are_known_ahead_as_were_asked_for(window, ahead, expected):
    tables = make(**SMALL)
    feed = Feed(matrices(12), tables, window, ahead)
    feed.start()
    try:
        step(tables, *feed.next())
        assert feed._look_ahead == expected
    finally:
        feed.close()


def test_who_has_batches_taken_back_soon_looks_half_as_far_ahead():
    tables = hotbed.EmbeddingTables({"a": Table(None, 4)}, hbm="4KiB")
    feed = Feed([torch.arange(8)[:, None] + n for n in range(12)], tables, 1, 6)
    feed.start()
    try:
        for expected in (6, 3):
            step(tables, *feed.next())
            assert feed._look_ahead == expected
            tables.ownership.claim(drop=True)
    finally:
        feed.close()


def test_time_that_is_waited_for_rows_is_counted_once(monkeypatch):
    fetch = MemoryStore.fetch

    def slow(self, *arguments):
        time.sleep(0.005)
        return fetch(self, *arguments)

    monkeypatch.setattr(MemoryStore, "fetch", slow)
    tables = hotbed.EmbeddingTables({"a": Table(None, 4)}, hbm="4KiB")
    began = time.perf_counter()
    for ids in hotbed.prefetch([torch.arange(8)[:, None] + 9 * n for n in range(12)], tables, window=1, look_ahead=2):
        tables(ids).sum().backward()
    assert 0 <= tables.counters().stall_seconds < time.perf_counter() - began
