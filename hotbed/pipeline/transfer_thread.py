"""Moving rows: a thread that reads them from any store and writes them back, strictly in the order of the requests.

Over an ssd it also brings the rows of batches ahead to memory, while it has nothing else to do or waits for the device to write
what is needed; and where compiled code moves the rows of windows, it finds their slots in memory first
(store/tier_windows.py). It does nothing unasked before the first request, and between `drain` and the next one.

A row that leaves with one window and is needed by the next is read late: after it was written. That is rare, because a
policy that looks ahead does not let such a row go.

The training thread may be interrupted anywhere in here: it only ever puts into a queue, counts, and waits for latches.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from hotbed.host.handover import Latch, Runner
from hotbed.ops.streams import after, check_device, give_stream, mark, take_stream
from hotbed.store.memory_tier import Ints
from hotbed.store.tier_windows import StoppedError, TierWindows, wait_for
from hotbed.store.tiered import TieredStore
from hotbed.tables.group.fetch import Fetch
from hotbed.telemetry.spans import span

_PATIENCE = 5.0  # seconds
Wait = Callable[[Ints, int], None]


class KeysAhead(NamedTuple):
    """Keys of a batch ahead that the device does not have."""

    store: TieredStore
    find: Callable[[Wait], Ints]  # waits for the device
    distance: int  # batches before it that are not planned
    is_known: Callable[[], bool] = lambda: True  # whether `find` would not wait


class WindowSlots:
    """The slots in memory of one window's rows, for compiled code."""

    def __init__(self, windows: Sequence[tuple[TierWindows, int]], num_batches: int) -> None:
        self.windows = windows  # and the number of the window there
        self.num_batches = num_batches
        self.found = Latch()

    def is_listed(self) -> bool:
        """Whether the device has written the keys of all groups."""
        return all(windows.is_listed(number) for windows, number in self.windows)


class WindowRows:
    """The rows of one window."""

    def __init__(self, number: int, fetches: list[Fetch]) -> None:
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
        for fetch in self._move.fetches:
            fetch.exchange()
        self._thread.write(self._move)


class TransferThread:
    """One thread; `read` and `write` return at once."""

    def __init__(self, device: torch.device, stores: Sequence[TieredStore] = ()) -> None:
        self._device = device
        self._stores = stores  # that rows ahead are brought to memory of
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # until the first request, and since the last `drain`: another feed's thread may be at work
        self._is_idle = True
        self._stops = False  # nobody waits any more
        self._late: list[WindowRows] = []
        self._num_windows = 0
        self._outward: Any = None
        self._thread = Runner(self._work, "hotbed-transfer")

    def start(self) -> None:
        self._thread.start()

    def transfer(self, fetches: list[Fetch]) -> ThreadedTransfer:
        """Begin to move the rows of the next window."""
        return ThreadedTransfer(self, self.read(fetches), self._device)

    def read(self, fetches: list[Fetch]) -> WindowRows:
        """Bring the rows of the next window to the device."""
        move = WindowRows(self._num_windows, fetches)
        self._num_windows += 1
        self._tasks.put(partial(self._read, move))
        return move

    def write(self, move: WindowRows) -> None:
        """Write the window's victims to the store; their copies to the host are under way."""
        self._tasks.put(partial(self._write, move))

    def find_slots(self, windows: Sequence[tuple[TierWindows, int]], num_batches: int) -> WindowSlots:
        """Have slots in memory for the rows of the next window, of each group."""
        slots = WindowSlots(windows, num_batches)
        self._tasks.put(partial(self._find_slots, slots))
        return slots

    def foresee(self, keys: list[KeysAhead]) -> None:
        """Rows of batches ahead are wanted in memory."""
        self._tasks.put(partial(self._foresee, keys))

    @property
    def error(self) -> BaseException | None:
        """What went wrong; no request is served from then on."""
        return self._thread.error

    def wait(self, move: WindowRows) -> None:
        """Until its rows are on their way to the device; raises what went wrong."""
        self._wait(move.staged)

    def wait_for_slots(self, slots: WindowSlots) -> None:
        """Until they are found; raises what went wrong."""
        self._wait(slots.found)

    def drain(self) -> None:
        """Wait until every request is done; raises what went wrong."""
        done = Latch()
        self._tasks.put(partial(self._rest, done))
        self._wait(done)

    def _wait(self, latch: Latch) -> None:
        latch.wait(self._thread.is_alive)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._stops = True
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
        except StoppedError:  # tables that refuse: what it waited for never comes
            pass
        finally:
            for stream in (inward, self._outward):
                give_stream(self._device, stream)

    def _serve(self) -> None:
        while (task := self._next_task()) is not None:
            self._is_idle = False
            task()

    def _rest(self, done: Latch) -> None:
        """Every request so far is done."""
        self._is_idle = True
        done.set()

    def _next_task(self) -> Callable[[], None] | None:
        """The next request. Until there is one, rows of batches ahead are brought to memory, a piece at a time."""
        while not self._is_idle and self._tasks.empty() and any(store.work_ahead() for store in self._stores):
            continue  # ends: with a request, or when all is there
        return self._tasks.get()

    def _work_until(self, is_known: Callable[[], bool]) -> None:
        """Bring rows of batches ahead to memory as long as the device has not written what is needed, and there are some."""
        while not is_known() and not self._stops and any(store.work_ahead() for store in self._stores):
            continue  # ends: when it is known, or all is there

    def _foresee(self, ahead: list[KeysAhead]) -> None:
        for keys in ahead:
            self._work_until(keys.is_known)
            keys.store.foresee(keys.find(self._wait_for), keys.distance)

    def _find_slots(self, slots: WindowSlots) -> None:
        self._work_until(slots.is_listed)
        for windows, number in slots.windows:
            with span(f"find rows of window {number}"):
                windows.prepare(number, slots.num_batches, self._wait_for)
        slots.found.set()

    def _wait_for(self, word: Ints, value: int) -> None:
        """Until a word in memory is `value` or more, or nobody waits for what comes then."""
        wait_for(word, value, self._check)

    def _check(self) -> bool:
        check_device(self._device)
        return self._stops

    def _read(self, move: WindowRows) -> None:
        with span(f"read rows of window {move.number}"):
            for fetch in move.fetches:
                fetch.read()
            self._late.append(move)
            if not any(fetch.num_late for fetch in move.fetches):
                self._stage(move)

    def _write(self, move: WindowRows) -> None:
        with span(f"write rows of window {move.number}"):
            with torch.cuda.stream(self._outward):
                for fetch in move.fetches:
                    fetch.write()
            for each in [
                late for late in self._late if late.number <= move.number + 1
            ]:  # all they waited for is written
                self._stage(each)

    def _stage(self, move: WindowRows) -> None:
        for fetch in move.fetches:
            fetch.read_late()
        move.mark = mark(self._device)
        self._late.remove(move)
        move.staged.set()
