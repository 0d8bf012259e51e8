"""Runs a compiled kernel on all cores: `kernel(thread, num_threads, *arguments)` once per thread.

The kernels release the GIL, so plain Python threads are enough, whatever OpenMP or TBB a machine has, and two callers in
one process cannot disturb each other (Numba's default thread pool aborts on that): the second waits its turn.

A thread that sleeps takes long to wake, 0.1 to 0.3 ms on a virtual machine whose idle core has halted, as long as a tenth
of a training step. So a worker watches for work for about 0.2 ms after its last before it sleeps (longer would take a core
from torch's own threads), and the caller watches for the workers to finish.

An interrupt (Ctrl-C raises in the main thread, between any two steps of Python) never leaves a worker at work on arrays whose
caller has gone: tasks have numbers that only grow, a task is handed over by one call into C, and who is interrupted asks
every worker for the number again and waits for it in compiled code.

A kernel must write disjoint places from different threads and must not depend on num_threads in its results.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numba import njit

from hotbed.errors import HotbedError
from hotbed.host.intrinsics import load_acquire, pause, usleep

_WATCH = 6_000  # looks before a worker sleeps: about 0.2 ms
_WAIT = 200_000  # looks before a caller sleeps
_NAP_US, _NAPS = 50, 20_000  # microseconds at a time, and how often before it is asked whether the worker lives
ALONE = 1 << 19  # values that a caller reads or writes faster without help
_HEAD_START = 600  # looks for which a worker lets its caller leave the GIL: about 20 us


def num_threads() -> int:
    """As many threads as torch uses (`torch.set_num_threads`)."""
    return torch.get_num_threads()


def threads_for(num_values: int) -> int:
    """Threads for a kernel that goes through so many values; a small one is done sooner by its caller.

    torch's own threads spin for a while after their work, and a second thread of ours waits for a core: with 2 threads a
    training step of 512 samples, 39 features of dim 8, took 4.75 ms, by the caller alone 3.44 ms (2 cores).
    """
    return num_threads() if num_values >= ALONE else 1


def in_parallel(kernel: Callable[..., Any], *arguments: Any, threads: int = 0) -> None:
    """Run the kernel on `threads` threads (default: num_threads()) and wait; the first exception is raised here."""
    threads = threads or num_threads()
    if threads == 1:
        kernel(0, 1, *arguments)
        return
    _crew().run(kernel, threads, arguments)


class _Worker:
    """One thread that runs tasks in order. `asked` and `done` hold the number of the last task, and only ever grow."""

    def __init__(self) -> None:
        self.asked, self.done = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        self.error: BaseException | None = None  # of the last task
        self._tasks: SimpleQueue[tuple[int, Callable[[], Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="hotbed-op", daemon=True)
        self._thread.start()

    def give(self, number: int, task: Callable[[], Any]) -> None:
        """A task, or another one of the same number: whichever comes first is the one that counts."""
        self.asked[0] = number
        self._tasks.put((number, task))

    def wait(self, number: int) -> None:
        """Until the task is done. A signal is heeded afterwards, for the wait is compiled."""
        while not _watch(self.done, number, _WAIT, 0) and not _sleep_until(self.done, number, _NAPS):
            if not self._thread.is_alive():
                raise HotbedError("a thread that helps with row operations has ended; start the process again")

    def _work(self) -> None:
        last = 0
        while True:  # the life of a daemon thread
            _watch(self.asked, last + 1, _WATCH, _HEAD_START)
            number, task = self._tasks.get()
            if number > last:
                error = None
                try:
                    task()
                except BaseException as raised:  # handed to the caller
                    error = raised
                self.error, last = error, number
                del task, error  # and the arrays that belong to them
                self.done[0] = number


class _Crew:
    """The workers of one process; callers take turns."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._number = 0
        self._turn = threading.Lock()
        self.process = os.getpid()

    def run(self, kernel: Callable[..., Any], threads: int, arguments: tuple[Any, ...]) -> None:
        with self._turn:
            while len(self._workers) < threads - 1:
                self._workers.append(_Worker())
            self._number += 1
            number, used = self._number, self._workers[: threads - 1]
            try:
                for thread, worker in enumerate(used, start=1):
                    worker.give(number, lambda thread=thread: kernel(thread, threads, *arguments))  # type: ignore[misc]
                kernel(0, threads, *arguments)
                for worker in used:
                    worker.wait(number)
            except BaseException:
                _finish(used, number)
                raise
            errors = [worker.error for worker in used]
            for worker in used:
                worker.error = None  # it holds the frames of the kernel, and so the arrays
        for error in errors:
            if error is not None:
                raise error


def _finish(used: list[_Worker], number: int) -> None:
    """Leave no worker at its task: the arrays it writes to are the caller's, who is about to go.

    Where an interrupt came may be anywhere between the first worker and the last, also between the number that a worker is
    asked for and its task; one that has the task already passes over this one. A second interrupt is taken, too.
    """
    try:
        for worker in used:
            worker.give(number, _nothing)
        for worker in used:
            worker.wait(number)
    except BaseException:
        for worker in used:
            worker.give(number, _nothing)
        for worker in used:
            worker.wait(number)
        raise


def _nothing() -> None:
    pass


_the_crew = _Crew()


def _crew() -> _Crew:
    global _the_crew  # noqa: PLW0603  one crew per process; a forked child has none of its parent's threads
    if _the_crew.process != os.getpid():
        _the_crew = _Crew()
    return _the_crew


@njit(nogil=True, cache=True)
def _watch(numbers: Any, number: int, looks: int, head_start: int) -> bool:
    """True `head_start` looks after numbers[0] has come to `number`, False when `looks` are used up."""
    for _ in range(looks):
        if load_acquire(numbers.ctypes.data) >= number:
            for _ in range(head_start):
                pause()
            return True
        pause()
    return False


@njit(nogil=True, cache=True)
def _sleep_until(numbers: Any, number: int, naps: int) -> bool:
    """As `_watch`, for a long wait."""
    for _ in range(naps):
        if load_acquire(numbers.ctypes.data) >= number:
            return True
        usleep(np.uint32(_NAP_US))
    return False
