"""Work handed to another thread by one that may be interrupted at any point.

`threading.Thread.start`, `Event` and `Condition` are Python code around locks. An exception that a signal handler raises inside
one of them can leave its lock held for good; then the other thread never returns. What is here can be left anywhere.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

_LOOK = 0.5  # seconds between two looks at what should have woken the waiting thread


class Latch:
    """One thread says that something is done, once; another waits for it."""

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

    def wait(self, is_alive: Callable[[], bool] = lambda: True, seconds: float | None = None) -> bool:
        """Until it is set, or the thread that would set it has ended, or the time is over; whether it is set."""
        looks = 0
        while not self._is_set and is_alive() and (seconds is None or looks * _LOOK < seconds):
            looks += 1
            if self._lock.acquire(timeout=_LOOK):
                self._lock.release()
        return self._is_set


class Runner:
    """A thread that does one piece of work and does not keep the process alive; `error` is what ended it early."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._done = Latch()
        self._launched = False
        self.error: BaseException | None = None

    def start(self) -> None:
        _thread.start_new_thread(self._launch, ())
        self._launched = True

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end, if it was started."""
        if self.is_alive() and threading.get_ident() != self._thread.ident:
            self._done.wait(seconds=seconds)
        if self._done.is_set() and self._thread.ident is not None:
            self._thread.join()

    def is_alive(self) -> bool:
        return self._launched and not self._done.is_set()

    def _launch(self) -> None:
        """In a thread that no signal reaches."""
        self._launched = True  # also where `start` is interrupted
        try:
            self._thread.start()
        except BaseException as error:
            self.error = error
            self._done.set()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # for the waiting thread
            self.error = error
        finally:
            self._done.set()
