"""Threads that wait for work in compiled code, without Python's lock: for kernels, copies of rows and reads from disk.

A job is cut into chunks, which the caller and the workers take (jobs.py). Two kinds of callers:

    call         compiled code opens jobs of compiled kernels: nothing of it can be interrupted
    in_parallel  Python has a Numba function called, with any arguments, by every thread that takes a chunk

How workers wait is the pool's choice. A sleeping thread takes long to wake, 0.1 to 0.3 ms on a virtual machine whose idle core
has halted, so where jobs follow each other workers watch for the next one; where there are more of them than cores they sleep.

An interrupt (Ctrl-C raises in the main thread, between any two steps of Python) never leaves a worker at work on arrays whose
caller has gone: `in_parallel` counts a chunk of its own as done when it takes it, and an interrupted caller closes the job and
waits in compiled code for the chunks that workers have.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from hotbed.errors import HotbedError
from hotbed.host.handover import Runner
from hotbed.host.jobs import (
    ALL_DONE,
    CLOSED,
    FUTEX,
    FUTEX_NUMBER,
    HEAD_START,
    NEXT,
    NOT_YET,
    STOPPED,
    WATCH,
    WORDS,
    next_own,
    open_call,
    settle,
    wake_all,
    work,
)

ALONE = 1 << 19  # values that a caller reads or writes faster without help


class Pool:
    """Up to `num_workers` threads (None: one less than torch uses). One caller at a time; others wait.

    A worker makes `watch` looks for a next job before it sleeps, about 30 to 70 ns each, and gives a caller that it saw open a
    job a head start of some more. Every thread has scratch memory of its own.
    """

    def __init__(
        self,
        name: str,
        num_workers: int | None = None,
        *,
        watch: int,
        head_start: int = 0,
        scratch_bytes: int = 0,
        futex: int = FUTEX_NUMBER,
    ) -> None:
        self._name, self._num_workers, self._scratch_bytes = name, num_workers, scratch_bytes
        self._memory = np.zeros(WORDS + 8, dtype=np.int64)
        self.address = -(-self._memory.ctypes.data // 64) * 64
        self._words = self._memory[(self.address - self._memory.ctypes.data) // 8 :]
        self._words[[NEXT, WATCH, HEAD_START, FUTEX]] = CLOSED, watch, head_start, futex
        self._scratch = [np.empty(scratch_bytes, dtype=np.uint8)]  # the caller's first; memory comes when used
        self._turn = threading.Lock()
        self._workers: list[Runner] = []
        self._task: tuple[Callable[..., Any], int, tuple[Any, ...]] | None = None
        self._errors: list[BaseException] = []
        self._callback = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 3)(self._run_chunk)
        self._callback_address = ctypes.cast(self._callback, ctypes.c_void_p).value
        self.process = os.getpid()
        atexit.register(self.stop)

    def call(self, compiled: Callable[..., Any], *arguments: Any) -> Any:
        """compiled(address of this pool, scratch, *arguments): compiled code which runs jobs."""
        with self._turn:
            result = compiled(self.ready(), self._scratch[0].ctypes.data, *arguments)
        return result  # not above: an interrupt between the call and the end of `with` would leave it locked

    def in_parallel(self, kernel: Callable[..., Any], num_chunks: int, arguments: tuple[Any, ...]) -> None:
        """kernel(chunk, num_chunks, *arguments) for every chunk; the first exception is raised here."""
        with self._turn:
            pool = self.ready(num_chunks - 1)
            self._task, self._errors = (kernel, num_chunks, arguments), []
            try:
                open_call(pool, self._callback_address, num_chunks)
                chunk = 0
                while chunk != ALL_DONE:
                    if chunk != NOT_YET:
                        kernel(chunk, num_chunks, *arguments)
                    else:
                        self._check_workers()
                    chunk = next_own(pool)
            except BaseException:
                self._leave()
                raise
            finally:
                self._task = None
            errors, self._errors = self._errors, []
        for error in errors:
            raise error

    def _run_chunk(self, _: int, chunk: int, scratch: int) -> None:
        """In a worker, where no signal is handled."""
        try:
            assert self._task is not None, "a chunk is only taken while its caller waits"
            kernel, num_chunks, arguments = self._task
            kernel(chunk, num_chunks, *arguments)
        except BaseException as error:  # for the caller
            self._errors.append(error)

    def _leave(self) -> None:
        """Leave no worker at a chunk: the arrays it writes to are the caller's, which is about to return.

        Where an interrupt came may be anywhere. A second one is taken, too.
        """
        try:
            self._finish()
        except BaseException:
            self._finish()
            raise

    def _finish(self) -> None:
        while not settle(self.address):  # ends: a worker finishes its chunk, or has ended
            self._check_workers()

    def _check_workers(self) -> None:
        for worker in self._workers:
            if worker.error is not None:
                raise HotbedError(f"a thread of {self._name} has ended; restart the process") from worker.error

    def ready(self, num_workers: int | None = None) -> int:
        """Have the workers there; the address of the pool, for compiled code that runs jobs itself, one at a time."""
        if num_workers is None:
            num_workers = num_threads() - 1 if self._num_workers is None else self._num_workers
        while len(self._workers) < num_workers and not self._words[STOPPED]:
            self._scratch.append(np.empty(self._scratch_bytes, dtype=np.uint8))
            worker = Runner(partial(work, self.address, self._scratch[-1].ctypes.data), self._name)
            self._workers.append(worker)  # before it starts: an interrupt must not leave one that is never stopped
            worker.start()
        return self.address

    def close(self) -> None:
        """Let the workers go."""
        self.stop()
        atexit.unregister(self.stop)

    def stop(self) -> None:
        """At exit: no thread may run compiled code that is being taken down. Who calls later works alone."""
        if self.process != os.getpid():
            return
        with self._turn:
            self._words[STOPPED] = 1
            if self._workers:
                wake_all(self.address)
            for worker in self._workers:
                worker.join()
            self._workers = []


_shared: dict[tuple[str, int | None, int], Pool] = {}


def shared(name: str, num_workers: int | None = None, **how: int) -> Pool:
    """The pool of this name and size in this process; a forked child has none of its parent's threads."""
    key = (name, num_workers, os.getpid())
    if key not in _shared:
        _shared.setdefault(key, Pool(name, num_workers, **how))  # of two made at once one stays; none has threads yet
    return _shared[key]


def num_threads() -> int:
    """The number of threads that torch uses (`torch.set_num_threads`)."""
    return torch.get_num_threads()


def threads_for(num_values: int) -> int:
    """Threads for a kernel over `num_values` values; a small one is done sooner by its caller.

    torch's own threads spin for a while after their work, and a second thread of ours waits for a core: with 2 threads a
    training step of 512 samples, 39 features of dim 8, took 4.75 ms, by the caller alone 3.44 ms (2 cores).
    """
    return num_threads() if num_values >= ALONE else 1


def in_parallel(kernel: Callable[..., Any], *arguments: Any, threads: int = 0) -> None:
    """kernel(thread, num_threads, *arguments) for every thread (default: num_threads()); wait for all.

    A kernel releases the GIL, writes disjoint places from different threads, and does not depend on num_threads in its
    results. Workers watch for about 0.2 ms (longer would take a core from torch's own threads); their head start, 20 us, lets
    the caller leave the GIL before they ask for it. The first exception is raised here.
    """
    threads = threads or num_threads()
    if threads == 1:
        kernel(0, 1, *arguments)
        return
    shared("hotbed-op", watch=6_000, head_start=600).in_parallel(kernel, threads, arguments)
