"""A latch: one thread says that something is done, another waits for it, and may be interrupted at any point.

`threading.Event` is Python code around a lock. An exception that a signal handler raises inside its `wait` can leave that lock
held for good, and then the thread that wants to `set` it never returns. A latch can be left anywhere.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable

_LOOK = 0.5  # seconds between two looks at what should have woken the waiting thread


class Latch:
    """Set once."""

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        """By one thread at a time."""
        if not self._is_set:
            self._is_set = (
                True  # first: a waiting thread that has the lock and is interrupted does not ask for it again
            )
            self._lock.release()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, is_alive: Callable[[], bool] = lambda: True) -> None:
        """Until it is set, or the thread that would do so is no more."""
        while not self._is_set and is_alive():
            if self._lock.acquire(timeout=_LOOK):
                self._lock.release()
