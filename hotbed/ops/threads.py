"""Runs a compiled kernel on all cores: `kernel(thread, num_threads, *arguments)` once per thread.

The kernels release the GIL, so plain Python threads are enough, whatever OpenMP or TBB a machine has, and two callers in
one process cannot disturb each other (Numba's default thread pool aborts on that): the second waits its turn.

A thread that sleeps takes long to wake, 0.1 to 0.3 ms on a virtual machine whose idle core has halted, as long as a tenth
of a training step. So a worker watches for work for about 0.2 ms after its last before it sleeps (longer would take a core
from torch's own threads), and the caller watches for the workers to finish.

A kernel must write disjoint places from different threads and must not depend on num_threads in its results.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_WATCH = 6_000  # looks before a worker sleeps: about 0.2 ms
_WAIT = 200_000  # looks before a caller sleeps
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
    """One thread that runs one task at a time. Numbers count tasks: given, and done."""

    def __init__(self) -> None:
        self._given, self._done = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        self._go, self._finished = threading.Semaphore(0), threading.Semaphore(0)
        self._task: Callable[[], Any] = lambda: None
        self._error: BaseException | None = None
        threading.Thread(target=self._work, name="hotbed-op", daemon=True).start()

    def give(self, task: Callable[[], Any]) -> None:
        self._task = task
        self._given[0] += 1
        self._go.release()

    def wait(self) -> BaseException | None:
        _watch(self._done, self._given[0] - 1, _WAIT, 0)
        self._finished.acquire()
        error, self._error, self._task = self._error, None, lambda: None
        return error

    def _work(self) -> None:
        while True:
            _watch(self._given, self._done[0], _WATCH, _HEAD_START)
            self._go.acquire()
            try:
                self._task()
            except BaseException as error:  # handed to the caller
                self._error = error
            self._done[0] += 1
            self._finished.release()


class _Crew:
    """The workers of one process; callers take turns."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._turn = threading.Lock()
        self.process = os.getpid()

    def run(self, kernel: Callable[..., Any], threads: int, arguments: tuple[Any, ...]) -> None:
        with self._turn:
            while len(self._workers) < threads - 1:
                self._workers.append(_Worker())
            used = self._workers[: threads - 1]
            for thread, worker in enumerate(used, start=1):
                worker.give(lambda thread=thread: kernel(thread, threads, *arguments))  # type: ignore[misc]
            try:
                kernel(0, threads, *arguments)
            finally:
                errors = [worker.wait() for worker in used]
        for error in errors:
            if error is not None:
                raise error


_the_crew = _Crew()


def _crew() -> _Crew:
    global _the_crew  # noqa: PLW0603  one crew per process; a forked child has none of its parent's threads
    if _the_crew.process != os.getpid():
        _the_crew = _Crew()
    return _the_crew


def _look(typing_context: Any, numbers: Any) -> Any:
    """numbers[0], read from memory every time and not from a register; with a pause, which spares the other thread."""
    signature = types.int64(numbers)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return builder.load_atomic(array.data, ordering="acquire", align=8)

    return signature, generate


look: Any = intrinsic(_look)


@njit(nogil=True, cache=True)
def _watch(numbers: Any, seen: int, looks: int, head_start: int) -> None:
    """Return `head_start` looks after numbers[0] has changed from `seen`, or when `looks` are used up."""
    for _ in range(looks):
        if look(numbers) != seen:
            for _ in range(head_start):
                look(numbers)
            return
