"""Ctrl-C that waits: while rows are moved, SIGINT is noted, and its handler runs when they are in place.

Python runs signal handlers in the main thread alone; in any other there is nothing to hold. A second Ctrl-C is not held, so
that a wait that never ends can be left (the tables then refuse every further call, see tables/ownership.py).
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # `signal` makes enums of its results: 3 us a call
import os
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class _PendingInterrupt:
    """A pending interrupt of the process."""

    handler: Callable[[int, FrameType | None], Any] = signal.default_int_handler  # which runs later
    open = False
    noted = False
    main = threading.main_thread().ident  # kept: to ask takes 0.1 us


def _note_main() -> None:
    """A fork continues in the thread that forked."""
    _PendingInterrupt.main = threading.main_thread().ident


os.register_at_fork(after_in_child=_note_main)


def hold() -> bool:
    """Note the next SIGINT instead of handling it; whether that was possible."""
    if threading.get_ident() != _PendingInterrupt.main:
        return False
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        return False
    _PendingInterrupt.noted, _PendingInterrupt.open = False, True
    if handler is not _note:  # it is when an exception came between `hold` and `release`
        _PendingInterrupt.handler = handler
        signal.signal(signal.SIGINT, _note)
    return True


def release() -> None:
    """Handle SIGINT as before; one that was noted, now."""
    _PendingInterrupt.open = False
    signal.signal(signal.SIGINT, _PendingInterrupt.handler)
    if _PendingInterrupt.noted:
        _PendingInterrupt.noted = False
        _PendingInterrupt.handler(signal.SIGINT, None)


def _note(number: int, frame: FrameType | None) -> None:
    if _PendingInterrupt.open and not _PendingInterrupt.noted:
        _PendingInterrupt.noted = True
    else:
        _PendingInterrupt.noted = False
        _PendingInterrupt.handler(number, frame)
