"""Threads whose work must not be felt by others: a low priority, and pauses.

A thread of low priority keeps the locks that it holds, Python's too, while it waits for a core, and those who wait for these
locks wait as well. One that pauses holds none.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_thread = threading.local()


def be_nice(niceness: int) -> None:
    """Lower the priority of this thread alone, where the system can."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with suppress(OSError):  # only root may raise it again
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


@contextmanager
def paced(share: float, wait: Callable[[float], object]) -> Iterator[None]:
    """`pause` in this thread calls wait(seconds), so long that work takes this share of the time."""
    _thread.pace = _Pace(share, wait)
    try:
        yield
    finally:
        del _thread.pace


def pause() -> None:
    """Between two pieces of long work, some milliseconds each; does nothing outside of `paced`."""
    pace = getattr(_thread, "pace", None)
    if pace is not None:
        pace.pause()


class _Pace:
    def __init__(self, share: float, wait: Callable[[float], object]) -> None:
        self._rest_per_work, self._wait = 1 / share - 1, wait
        self._began = time.thread_time()

    def pause(self) -> None:
        self._wait(self._rest_per_work * (time.thread_time() - self._began))
        self._began = time.thread_time()
