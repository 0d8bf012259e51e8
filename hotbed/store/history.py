"""Whether marks of touched rows still mean what they meant at the last checkpoint.

Tables have a history, an object that stays the same while rows change by training alone. Whatever replaces rows begins a new
one before the first change: marks made before say nothing about the new rows, so the next checkpoint holds all of them.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

HISTORY_LOCK = threading.RLock()
_HISTORIES: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()


def history_of(tables: Any) -> object:
    """An object that stays the same while rows change by training alone."""
    with HISTORY_LOCK:
        return _HISTORIES.setdefault(tables, object())


def begin_history(tables: Any) -> None:
    """The next checkpoint must hold all rows, and cannot add to one that is being written."""
    with HISTORY_LOCK:
        _HISTORIES[tables] = object()
