"""Moving rows: a thread that reads them from any store and writes them back, strictly in the order of the requests.

A row that leaves with one window and is needed by the next is read late: after it was written. That is rare, because a
policy that looks ahead does not let such a row go.

The training thread may be interrupted anywhere in here: it only ever puts into a queue, counts, and waits for latches.
"""

from __future__ import annotations

import queue
from typing import Any

import torch

from hotbed.host.handover import Latch, Runner
from hotbed.ops.streams import after, give_stream, mark, take_stream
from hotbed.tables.group.cached import CachedRows, Fetch
from hotbed.telemetry.spans import span

_PATIENCE = 5.0  # seconds
Fetches = list[tuple[CachedRows, Fetch]]


class WindowRows:
    """The rows of one window."""

    def __init__(self, number: int, fetches: Fetches) -> None:
        self.number = number
        self.fetches = fetches
        self.staged = Latch()  # all rows are on their way to the device
        self.mark: Any = None  # the mark at which they have arrived


class ThreadedTransfer:
    """Rows of one window that a transfer thread moves."""

    waits = holds_memory = True

    def __init__(self, thread: TransferThread, move: WindowRows, device: torch.device) -> None:
        self._thread = thread
        self._move = move
        self._device = device

    @property
    def is_staged(self) -> bool:
        move = self._move
        return move.staged.is_set() and (move.mark is None or bool(move.mark.query()))

    def wait(self) -> None:
        self._thread.wait(self._move)

    def exchange(self) -> None:
        after(self._device, self._move.mark)
        for group, fetch in self._move.fetches:
            group.exchange(fetch)
        self._thread.write(self._move)


class TransferThread:
    """One thread; `read` and `write` return at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tasks: queue.SimpleQueue[tuple[str, WindowRows] | Latch | None] = queue.SimpleQueue()
        self._late: list[WindowRows] = []
        self._num_windows = 0
        self._outward: Any = None
        self._thread = Runner(self._work, "hotbed-transfer")

    def start(self) -> None:
        self._thread.start()

    def transfer(self, fetches: Fetches) -> ThreadedTransfer:
        """Begin to move the rows of the next window."""
        return ThreadedTransfer(self, self.read(fetches), self._device)

    def read(self, fetches: Fetches) -> WindowRows:
        """Bring the rows of the next window to the device."""
        move = WindowRows(self._num_windows, fetches)
        self._num_windows += 1
        self._tasks.put(("read", move))
        return move

    def write(self, move: WindowRows) -> None:
        """Write the window's victims to the store; their copies to the host are under way."""
        self._tasks.put(("write", move))

    @property
    def error(self) -> BaseException | None:
        """What went wrong; nothing is done any more."""
        return self._thread.error

    def wait(self, move: WindowRows) -> None:
        """Until its rows are on their way to the device; raises what went wrong."""
        self._wait(move.staged)

    def drain(self) -> None:
        """Wait until every request is done; raises what went wrong."""
        done = Latch()
        self._tasks.put(done)
        self._wait(done)

    def _wait(self, latch: Latch) -> None:
        latch.wait(self._thread.is_alive)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def abandon(self) -> None:
        """The process ends: finish the requests, within reason."""
        self._tasks.put(None)
        self._thread.join(_PATIENCE)

    def _work(self) -> None:
        inward, self._outward = (take_stream(self._device) for _ in range(2))
        try:
            with torch.cuda.stream(inward):
                self._serve()
        finally:
            for stream in (inward, self._outward):
                give_stream(self._device, stream)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, Latch):
                task.set()
                continue
            kind, move = task
            with span(f"{kind} rows of window {move.number}"):
                (self._read if kind == "read" else self._write)(move)

    def _read(self, move: WindowRows) -> None:
        for group, fetch in move.fetches:
            group.read(fetch)
        self._late.append(move)
        if not any(fetch.num_late for _, fetch in move.fetches):
            self._stage(move)

    def _write(self, move: WindowRows) -> None:
        with torch.cuda.stream(self._outward):
            for group, fetch in move.fetches:
                group.write(fetch)
        for each in [late for late in self._late if late.number <= move.number + 1]:  # all they waited for is written
            self._stage(each)

    def _stage(self, move: WindowRows) -> None:
        for group, fetch in move.fetches:
            group.read_late(fetch)
        move.mark = mark(self._device)
        self._late.remove(move)
        move.staged.set()
