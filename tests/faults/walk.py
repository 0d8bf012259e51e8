"""The walk: work that trains tables is broken off at every point, and what comes after must be right or refused."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

import hotbed
from hotbed.errors import HotbedError
from tests.faults.points import Fault, Point, fault_at, record

Rows = dict[str, dict[str, torch.Tensor]]
_PATIENCE = 120  # seconds; whatever waits longer never ends


class Outcome(NamedTuple):
    """Of one walk."""

    num_points: int
    num_right: int
    num_refused: int


class Way(NamedTuple):
    """How tables are kept and trained."""

    make: Callable[[], hotbed.EmbeddingTables]
    train: Callable[[hotbed.EmbeddingTables, Sequence[Any]], None]


def step(tables: hotbed.EmbeddingTables, ids: Any) -> None:
    out = tables(ids)
    vectors = list(out.values()) if isinstance(out, dict) else [out]
    sum((v * v).sum() for v in vectors).backward()


def rows_of(tables: hotbed.EmbeddingTables) -> Rows:
    found = {}
    for name in tables.tables:
        ids, columns = tables.rows(name)
        found[name] = {"ids": ids, **{column: value.clone() for column, value in columns.items()}}
    return found


def states_after(make: Callable[[], hotbed.EmbeddingTables], batches: Sequence[Any]) -> list[Rows]:
    """The rows after 0, 1, ... updates."""
    tables = make()
    states = [rows_of(tables)]
    for ids in batches:
        step(tables, ids)
        states.append(rows_of(tables))
    return states


def difference(found: Rows, expected: Rows) -> str:
    """What differs, or nothing. An id that has a row too many, at its initial value, was looked up and not trained."""
    for table, columns in expected.items():
        ours = found[table]
        places = torch.searchsorted(ours["ids"], columns["ids"])
        if not torch.equal(ours["ids"][places.clamp(max=max(0, len(ours["ids"]) - 1))], columns["ids"]):
            return f"ids of {table}"
        for name, column in columns.items():
            wrong = (
                (ours[name][places] != column).flatten(1).any(1) if column.ndim > 1 else ours[name][places] != column
            )
            if bool(wrong.any()):
                return f"{name} of {table}: {int(wrong.sum())} rows"
    return ""


def close(tables: hotbed.EmbeddingTables) -> None:
    for cache in tables.caches:
        cache.store.close()


def check_integrity(tables: hotbed.EmbeddingTables) -> None:
    for cache in tables.caches:
        cache.cache.check_integrity()
        if cache.keyspace.is_dynamic:
            cache.keyspace.translator.check_integrity()


def walk(
    way: Way, plain: Callable[[], hotbed.EmbeddingTables], batches: Sequence[Any], walked: set[Point], passings: int = 1
) -> Outcome:
    """Break the training off at every point; after each, rows are those of a number of whole updates, or all refuses.

    Places that were `walked` before, on another way, are left out.
    """
    states = states_after(plain, batches)
    for recorded in (
        False,
        True,
    ):  # what is done once in a process, as kernels are loaded, is not there to be broken off
        tables = way.make()
        with record(passings) if recorded else nullcontext([]) as points:
            way.train(tables, batches)
        close(tables)
    points = [point for point in points if point._replace(passing=0) not in walked]
    walked |= {point._replace(passing=0) for point in points}
    right = refused = 0
    wrong: list[str] = []
    try:
        for point in points:
            faulthandler.dump_traceback_later(_PATIENCE, exit=True)
            tables = way.make()
            try:
                with fault_at(point):
                    way.train(tables, batches)
            except Fault:
                pass
            except HotbedError as error:
                if not isinstance(error.__cause__, Fault):
                    wrong.append(f"{point}: {error}")
                    continue
            found = after(tables, batches, states)
            right += found == "right"
            refused += found == "refused"
            if found not in ("right", "refused"):
                wrong.append(f"{point}: {found}")
            close(tables)
    finally:
        faulthandler.cancel_dump_traceback_later()  # or it ends the process in the middle of another test
    assert not wrong, f"{len(wrong)} of {len(points)} points: " + "\n".join(wrong[:20])
    return Outcome(len(points), right, refused)


def after(tables: hotbed.EmbeddingTables, batches: Sequence[Any], states: Sequence[Rows]) -> str:
    """`right`, `refused`, or what is wrong with the tables now and when training resumes."""
    done = tables.num_updates
    try:
        found = difference(rows_of(tables), states[done])
        if found:
            return f"after {done} updates: {found}"
        for ids in batches[done:]:
            step(tables, ids)
        found = difference(rows_of(tables), states[-1])
        if found:
            return f"after {done} updates and the rest: {found}"
        check_integrity(tables)
        return "right"
    except AssertionError as error:
        return f"after {done} updates and the rest: {error}"
    except HotbedError as error:
        if "lost rows" not in str(error):
            return f"refused with {error}"
    for again in (lambda: tables(batches[0]), lambda: rows_of(tables), tables.flush, tables.snapshot):
        try:
            again()
        except HotbedError:
            continue
        return "refused once, and not again"
    return "refused"
