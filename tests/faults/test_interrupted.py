"""Saves and loads that stop between any two lines: tables go on with the right bits, or refuse and say why."""

import ast
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import HotbedError

PACKAGE = Path(hotbed.__file__).parent
SAVING = ["tables/snapshot", "checkpoint", "store"]
LOADING = [*SAVING, "tables/module.py", "tables/group", "ids/state.py"]
KINDS = ["plain", "cached", "tiered", "dynamic", "dynamic tiered"]


class Stop(BaseException):
    """As KeyboardInterrupt, which signal handlers raise between any two instructions."""


@pytest.fixture(autouse=True)
def no_disk(monkeypatch):
    """Nothing here is about the disk, and it is slow."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def new_tables(kind, folder):
    budgets = {
        "plain": {},
        "cached": {"cache": 0.4},
        "tiered": {"cache": 0.4, "memory": "4KiB", "ssd": f"{folder}:4MiB"},
        "dynamic": {"hbm": "4KiB", "memory": "1MiB"},
        "dynamic tiered": {"hbm": "4KiB", "memory": "200KiB", "ssd": f"{folder}:4MiB"},
    }[kind]
    rows = None if kind.startswith("dynamic") else 60
    return hotbed.EmbeddingTables({"a": Table(rows, 4), "b": Table(rows, 4)}, optim.Adagrad(lr=0.1), **budgets)


def train(tables, step):
    generator = torch.Generator().manual_seed(step)
    tables(torch.randint(0, 40, (12, 2), generator=generator)).pow(2).sum().backward()


def bits(tables):
    return {name: tables.rows(name) for name in tables.tables}, tables.num_updates


def same(one, other):
    if one[1] != other[1]:
        return False
    for name, (ids, columns) in one[0].items():
        theirs, their_columns = other[0][name]
        if not torch.equal(ids, theirs) or any(not torch.equal(columns[part], their_columns[part]) for part in columns):
            return False
    return True


def withs_of(name):
    """The lines of `with`: a tracer sees them once more before the block is left, where no signal handler runs."""
    nodes = ast.walk(ast.parse(Path(name).read_text()))
    return {node.lineno for node in nodes if isinstance(node, ast.With)}


def stopped_at(act, number, places):
    """Run until the line of that number, of these files, is about to run; whether it came to that."""
    prefixes, known, count = tuple(str(PACKAGE / place) for place in places), {}, 0

    def trace(frame, event, argument):
        nonlocal count
        name = frame.f_code.co_filename
        if not name.startswith(prefixes):
            return None
        if name not in known:
            known[name] = withs_of(name)
        if event == "line" and frame.f_lineno not in known[name]:
            count += 1
            if count > number:
                sys.settrace(None)
                raise Stop
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except Stop:
        return True
    finally:
        sys.settrace(before)
    return False


def is_broken(tables):
    """A change was broken off: then everything refuses."""
    try:
        tables.flush()
    except HotbedError as error:
        assert "lost rows" in str(error)  # noqa: PT017
        with pytest.raises(HotbedError, match="lost rows"):
            train(tables, 0)
        with pytest.raises(HotbedError, match="lost rows"):
            tables.snapshot()
        return True
    return False


@pytest.mark.parametrize("kind", ["plain", "cached", "dynamic"])
def test_a_save_that_stops_anywhere_loses_no_row(tmp_path, kind):
    """The next checkpoint holds what the one that stopped would have."""
    tables, other = new_tables(kind, tmp_path / "rows"), new_tables(kind, tmp_path / "other")
    train(tables, 0)
    points = number = broken = 0
    while True:
        train(tables, number)
        if not stopped_at(partial(hotbed.checkpoint.save, tmp_path / "saved", tables), number, SAVING):
            break
        points += 1
        if is_broken(tables):
            broken += 1
            tables = new_tables(kind, tmp_path / f"rows-{number}")
            hotbed.checkpoint.load(tmp_path / "saved", tables)
        elif number % 2:  # else the next one, which stops as well, is on top of it
            train(tables, number + 1)
            hotbed.checkpoint.save(tmp_path / "saved", tables)
            hotbed.checkpoint.load(tmp_path / "saved", other)
            assert same(bits(tables), bits(other)), number
        else:
            hotbed.checkpoint.save(tmp_path / "saved", tables)
        number += 19
    assert points > 10
    assert broken <= points / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_that_stops_anywhere_is_whole_or_refused_until_it_is_done_again(tmp_path, kind):
    saved = new_tables(kind, tmp_path / "rows")
    for step in range(3):
        train(saved, step)
        hotbed.checkpoint.save(tmp_path / "saved", saved)
    tables = new_tables(kind, tmp_path / "other")
    number = refused = 0
    while True:
        for step in range(10, 12):
            train(tables, step)
        before = bits(tables)
        if not stopped_at(lambda: hotbed.checkpoint.load(tmp_path / "saved", tables), number, LOADING):
            break
        try:
            now = bits(tables)
        except HotbedError as error:
            refused += 1
            assert "interrupted" in str(error)  # noqa: PT017
            for call in (lambda: train(tables, 0), tables.snapshot, lambda: tables.weight("a")):
                with pytest.raises(HotbedError, match=r"load of these tables was interrupted.*Load again"):
                    call()
        else:
            assert same(now, before) or same(now, bits(saved)), number
        hotbed.checkpoint.load(tmp_path / "saved", tables)
        assert same(bits(tables), bits(saved)), number
        number += 61
    assert refused > 2
    for each in (tables, saved):
        train(each, 5)
    assert same(bits(tables), bits(saved))
