"""Which checkpoint the marks of touched rows are counted from: the last that was written from these tables, or loaded.

Rows are given up (`forget`) before anything changes what the marks mean, and remembered when all of it is done: whoever stops
in between makes the next checkpoint a full one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.manifest import read_manifest
from hotbed.errors import RunError


class _Since(NamedTuple):
    """From where marks are counted."""

    entry: Entry | None
    history: object  # another one whenever rows were replaced


_LAST: weakref.WeakKeyDictionary[Any, _Since] = weakref.WeakKeyDictionary()
_turn = threading.RLock()


def remember(tables: Any, entry: Entry) -> None:
    """Rows are touched since this checkpoint from here on."""
    with _turn:
        _LAST[tables] = _Since(Entry(entry.folder.resolve(), entry.manifest), history_of(tables))


def forget(tables: Any) -> None:
    """The next checkpoint must hold all rows, and one under way is not what it adds to."""
    with _turn:
        _LAST[tables] = _Since(None, object())


def history_of(tables: Any) -> object:
    """The same as long as rows change by training alone."""
    with _turn:
        return _LAST.setdefault(tables, _Since(None, object())).history


def advance(tables: Any, entry: Entry, history: object, commit: Callable[[], None]) -> None:
    """A checkpoint of a history is on disk: let marks count from it, unless rows were replaced while it was written."""
    with _turn:
        if history_of(tables) is history:
            _LAST[tables] = _Since(None, history)
            commit()
            remember(tables, entry)


def last_of(tables: Any, root: Path) -> Entry | None:
    """That checkpoint, if it lies in `root` and is still what it was."""
    with _turn:
        since = _LAST.get(tables)
    last = None if since is None else since.entry
    if last is None or last.folder.parent != root.resolve():
        return None
    try:
        found = read_manifest(last.folder)
    except RunError:
        return None
    return Entry(root / last.name, found) if found.crc32 == last.manifest.crc32 else None
