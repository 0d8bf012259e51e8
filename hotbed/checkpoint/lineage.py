"""Which checkpoint the marks of touched rows are counted from: the last that was written from these tables, or loaded."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.manifest import read_manifest
from hotbed.errors import RunError

_LAST: weakref.WeakKeyDictionary[Any, Entry] = weakref.WeakKeyDictionary()


def remember(tables: Any, entry: Entry) -> None:
    """Rows are touched since this checkpoint from here on."""
    _LAST[tables] = Entry(entry.folder.resolve(), entry.manifest)


def forget(tables: Any) -> None:
    """The next checkpoint must hold all rows."""
    _LAST.pop(tables, None)


def last_of(tables: Any, root: Path) -> Entry | None:
    """That checkpoint, if it lies in `root` and is still what it was."""
    last = _LAST.get(tables)
    if last is None or last.folder.parent != root.resolve():
        return None
    try:
        found = read_manifest(last.folder)
    except RunError:
        return None
    return Entry(root / last.name, found) if found.crc32 == last.manifest.crc32 else None
