"""What Numba and Triton compile in this process: for how long, with a notice when it takes long.

A kernel is compiled once on a machine, the larger ones in ten seconds and more, and loaded from then on (startup.py). That
is not part of reading or training, so speeds leave it out. Numba compiles under one lock: the seconds of threads never overlap,
and few threads wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

_LEAST_WAIT = 0.25  # seconds between two looks at the clock


class _Clock(event.Listener):
    """Told by Numba of every kernel that is compiled, not of those that are loaded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds, self._began = 0.0, 0.0
        self._depth = 0  # a kernel that calls others has them compiled on the way
        self.kernels = 0
        self.watchers: list[Callable[[], None]] = []

    def on_start(self, event: Any) -> None:
        with self._lock:
            if not self._depth:
                self._began = time.perf_counter()
            self._depth += 1
            self.kernels += 1
        for one in tuple(self.watchers):
            one()

    def on_end(self, event: Any) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._seconds += time.perf_counter() - self._began

    def add(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds
            self.kernels += 1

    def seconds(self) -> float:
        with self._lock:
            return self._seconds + (time.perf_counter() - self._began if self._depth else 0.0)


_clock = _Clock()
event.register("numba:compile", _clock)


def compile_seconds() -> float:
    """Seconds that this process has spent compiling so far."""
    return _clock.seconds()


def note_compiled(seconds: float) -> None:
    """A kernel was compiled, but not by Numba."""
    _clock.add(seconds)


class CompileReport:
    """What was compiled since this was made."""

    def __init__(self) -> None:
        self._seconds, self._kernels = _clock.seconds(), _clock.kernels

    @property
    def seconds(self) -> float:
        return _clock.seconds() - self._seconds

    @property
    def kernels(self) -> int:
        return _clock.kernels - self._kernels


@contextmanager
def compiled_within(begins: Callable[[], None], after: float = 0.0) -> Iterator[CompileReport]:
    """What is compiled inside; `begins` is called once, by another thread, when it has taken `after` seconds in all."""
    compiled, ended = CompileReport(), threading.Event()
    waiter: list[threading.Thread] = []

    def wait() -> None:
        while not ended.wait(max(after - compiled.seconds, _LEAST_WAIT)):
            if compiled.seconds >= after:
                begins()
                return

    def watch() -> None:
        if not waiter:
            waiter.append(threading.Thread(target=wait, name="compiling", daemon=True))
            waiter[0].start()

    _clock.watchers.append(watch)
    try:
        yield compiled
    finally:
        ended.set()
        _clock.watchers.remove(watch)
        for one in waiter:
            one.join()
