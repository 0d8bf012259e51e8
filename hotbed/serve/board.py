"""What the workers of a server count and say of themselves, in memory that all of them see.

Every worker writes its own part. A scrape of /metrics, which any of them answers, adds up all parts. The part of a worker
that died stays: its successor continues the counts, so that a sum never decreases. A part is read as of one moment: its
`sequence` is odd while it is written, and a copy that was made meanwhile is made again.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hotbed.scorer.rows import RowCounts

NUM_STATUSES = 600  # of HTTP: the status is the index
NUM_BUCKETS = 14
UPDATES = ("same", "incremental", "full", "whole")
_LONGEST_TURN, _TURN_SECONDS = 60.0, 0.05  # that a worker waits for others, and between two looks
_COPIES = 1000  # a worker that was killed while it wrote leaves its sequence odd
_int, _float = ctypes.c_int64, ctypes.c_double


class WorkerPart(ctypes.Structure):
    """The part of one worker."""

    _fields_ = (
        ("sequence", _int),
        ("pid", _int),  # 0: it does not run
        ("ready", _int),  # it takes requests
        ("in_flight", _int),
        ("reloads_asked", _int),  # at this worker
        ("reloads_done", _int),  # of those asked at any worker
        ("refused", _int),  # the model that was found last
        ("answers", _int * NUM_STATUSES),
        ("buckets", _int * NUM_BUCKETS),  # of the seconds of requests
        ("seconds", _float),
        ("candidates", _int),
        ("batches", _int),
        ("batched", _int),  # requests scored in them
        ("lookups", _int * len(RowCounts._fields)),
        ("updates", _int * len(UPDATES)),
        ("failed_updates", _int),
        ("stale", _int),
        ("updated", _float),  # seconds since 1970
        ("written", _float),  # when the files of the current model were written; 0: not known
        ("step", _int),  # -1: not known
        ("rows_bytes", _int),
        ("version", ctypes.c_char * 128),
    )


class _Server(ctypes.Structure):
    """Written by the parent of the workers."""

    _fields_ = (("closing", _int), ("restarts", _int))


class Board:
    """The parts of all workers; made before they are forked."""

    def __init__(self, workers: int) -> None:
        size = ctypes.sizeof(WorkerPart)
        self._memory = mmap.mmap(-1, workers * size + ctypes.sizeof(_Server))
        self.parts = [WorkerPart.from_buffer(self._memory, number * size) for number in range(workers)]
        self.server = _Server.from_buffer(self._memory, workers * size)
        with tempfile.TemporaryFile() as file:
            self._turns = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._turns)

    @contextmanager
    def turn(self, wait: Callable[[float], object]) -> Iterator[None]:
        """One worker at a time is in it: two that update would take the cores from requests. `wait(seconds)` may give up.

        After _LONGEST_TURN it is entered all the same: a worker that hangs must not keep the others from newer models.
        """
        began, mine = time.monotonic(), False
        while not mine and time.monotonic() - began < _LONGEST_TURN:
            try:
                fcntl.lockf(
                    self._turns, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # of this process; the kernel frees it if that ends
                mine = True
            except BlockingIOError:
                if wait(_TURN_SECONDS):
                    break
        try:
            yield
        finally:
            if mine:
                fcntl.lockf(self._turns, fcntl.LOCK_UN)

    @property
    def in_flight(self) -> int:
        """Requests that are answered now, by all workers."""
        return sum(part.in_flight for part in self.parts)

    @property
    def reloads(self) -> int:
        """How often a client has asked for a reload."""
        return sum(part.reloads_asked for part in self.parts)

    @property
    def num_ready(self) -> int:
        return sum(part.ready for part in self.parts)

    def copies(self) -> list[WorkerPart]:
        """All parts, each as of one moment."""
        return [_copy(part) for part in self.parts]


def _copy(part: WorkerPart) -> WorkerPart:
    for _ in range(_COPIES):
        before = part.sequence
        found = WorkerPart.from_buffer_copy(part)
        if before % 2 == 0 and part.sequence == before:
            break
        time.sleep(0)
    return found


class Writing:
    """`with writing:` around changes of a part by its worker: one thread at a time."""

    def __init__(self, part: WorkerPart) -> None:
        self._part, self._lock = part, threading.Lock()
        part.sequence += part.sequence % 2  # that of a worker that was killed while it wrote

    def __enter__(self) -> None:
        self._lock.acquire()
        self._part.sequence += 1

    def __exit__(self, *_: object) -> None:
        self._part.sequence += 1
        self._lock.release()
