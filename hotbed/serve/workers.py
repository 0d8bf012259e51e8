"""Worker processes of one server: forked, restarted when they die, and ended together.

The parent has loaded the model, so a fork takes milliseconds and shares its memory: code, vocabularies, marks, files of
rows. It has no threads of Python, accepts no connection, and waits for signals and for the ends of workers. All workers accept
from one listening socket: connections that wait when a worker dies are accepted by another one.

A worker that dies is restarted, after a delay that doubles while workers die soon after their start. After five such deaths
in a row all others are stopped, and the server ends with an error.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hotbed.errors import HotbedError
from hotbed.serve.board import Board

STOPPING, STOPPED = "stopping: requests in flight are finished first", "stopped"
LONGEST_GOODBYE = 30  # seconds for what is in flight
_KILLED_AFTER = LONGEST_GOODBYE + 5
_SOON = 5.0  # seconds after its start
_MOST_SOON = 5  # deaths in a row
_FIRST_DELAY = 0.1  # seconds
_READY_SECONDS = 0.02  # between checks whether all are ready
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
_LOGGERS = ("hotbed.serve", "hotbed.scorer", "uvicorn.error")
_log = logging.getLogger(_LOGGERS[0])


class Workers:
    """`work(number, restarted)` in one process for each part of the board."""

    def __init__(self, board: Board, work: Callable[[int, bool], None]) -> None:
        self._board, self._work = board, work
        self._number_of_pid: dict[int, int] = {}
        self._started: dict[int, float] = {}  # by number
        self._due: dict[int, float] = {}  # when the successor of a dead worker is started, by number
        self._soon = 0  # deaths in a row, soon after the start
        self._noted: list[int] = []  # signals

    def run(self, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
        """Until SIGINT or SIGTERM; returns when all requests in flight are answered. An error if workers die at once."""
        with self._noting_signals() as wake:
            ready = False
            try:
                for number in range(len(self._board.parts)):
                    self._start(number, restarted=False)
                while not self._stop_asked:
                    if not ready and self._board.num_ready == len(self._board.parts):
                        ready = True
                        on_ready()
                    _wait(wake, self._seconds_until_due() if ready else _READY_SECONDS)
                    self._reap()
                    self._restart()
            finally:
                self._board.server.closing = 1
                _log.info(STOPPING)
                on_stop()
                self._end(wake)
                _log.info(STOPPED)

    @property
    def _stop_asked(self) -> bool:
        return any(number != signal.SIGCHLD for number in self._noted)

    def _start(self, number: int, *, restarted: bool) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for one in _SIGNALS:
                    signal.signal(one, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent passes it on
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                self._become(number, restarted)
            self._number_of_pid[pid], self._started[number] = number, time.monotonic()
        except OSError as error:
            raise HotbedError(f"a worker of the server cannot be started: {error.strerror}.") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _become(self, number: int, restarted: bool) -> None:
        """In the worker; does not return."""
        code = 1
        try:
            for name in _LOGGERS:
                logging.getLogger(name).addFilter(_Named(number))
            self._work(number, restarted)
            code = 0
        except HotbedError as error:
            _log.error("%s", error)
        except BaseException:
            _log.exception("unexpected error")
        finally:
            for handler in logging.getLogger().handlers:
                handler.flush()
            os._exit(code)  # what the parent has open is for the parent to close

    def _reap(self) -> None:
        """Note the deaths of workers."""
        for number, status in self._ended():
            lived = time.monotonic() - self._started[number]
            self._soon = self._soon + 1 if lived < _SOON else 0
            how = _how(status)
            if self._soon >= _MOST_SOON:
                raise HotbedError(
                    f"workers of the server died {self._soon} times in a row within {_SOON:g} s of their start; the last "
                    f"one {how}. The log above may say why; `hotbed serve` without --workers serves in one process."
                )
            delay = _FIRST_DELAY * 2 ** (self._soon - 1) if self._soon else 0.0
            _log.error("worker %d %s and is restarted in %.1f s", number + 1, how, delay)
            self._due[number] = time.monotonic() + delay

    def _ended(self) -> Iterator[tuple[int, int]]:
        """(number, status) of the workers that have ended."""
        for pid in list(self._number_of_pid):
            with suppress(ChildProcessError):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    number = self._number_of_pid.pop(pid)
                    part = self._board.parts[number]
                    part.pid = part.ready = part.in_flight = 0
                    yield number, os.waitstatus_to_exitcode(status)

    def _restart(self) -> None:
        for number in [one for one, due in self._due.items() if due <= time.monotonic()]:
            del self._due[number]
            self._board.server.restarts += 1
            self._start(number, restarted=True)

    def _seconds_until_due(self) -> float:
        return max(0.0, min(self._due.values(), default=math.inf) - time.monotonic())

    def _end(self, wake: int) -> None:
        """Let requests in flight finish; Ctrl-C now, or half a minute, ends the workers at once."""
        self._send(signal.SIGTERM)
        noted, deadline, interrupted = len(self._noted), time.monotonic() + _KILLED_AFTER, False
        while self._number_of_pid:
            _wait(wake, max(0.0, deadline - time.monotonic()))
            for number, status in self._ended():
                if status not in (0, -signal.SIGTERM):
                    _log.error("worker %d %s", number + 1, _how(status))
            interrupted = signal.SIGINT in self._noted[noted:]
            if interrupted or time.monotonic() >= deadline:
                self._send(signal.SIGKILL)
                deadline = math.inf
        if interrupted:
            raise KeyboardInterrupt

    def _send(self, number: signal.Signals) -> None:
        for pid in self._number_of_pid:
            os.kill(pid, number)  # not reaped yet: the number is not another process's

    @contextmanager
    def _noting_signals(self) -> Iterator[int]:
        """Signals wake the parent, through this handle, and are noted."""
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        os.set_blocking(reads, False)
        before = [signal.signal(one, lambda number, _: self._noted.append(number)) for one in _SIGNALS]
        wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        try:
            yield reads
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in zip(_SIGNALS, before):
                signal.signal(number, handler)
            os.close(reads)
            os.close(writes)


class _Named(logging.Filter):
    """Log lines of a worker begin with its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = f"worker {self._number + 1}: {record.msg}"
        return True


def _wait(wake: int, seconds: float) -> None:
    """Until a signal, or this long."""
    select.select([wake], [], [], None if seconds == math.inf else seconds)
    with suppress(BlockingIOError):
        os.read(wake, 4096)


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was killed by {signal.Signals(-status).name}"
