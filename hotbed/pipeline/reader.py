"""Reading ahead: a thread takes batches from the loader and brings them to the device.

It fills a small buffer, sleeps until half of it is used, and fills it again: waking it for every batch would make the
training thread share Python's lock at every step.

Results are those of the plain loop. A read that draws from torch's global generator waits until the training thread has
nothing else to train: in the plain loop it would happen just then. A read that follows such a read begins no earlier either.
Errors of the loader come after the batches that were read before them. An iterator that is left early keeps its place: what
was read ahead comes first when the same iterator is read again.

The training thread may be interrupted anywhere (Ctrl-C). It waits for raw locks, which are signals and guard nothing: whoever
wakes up looks again, and nothing depends on a signal alone. A batch is handed out before it is forgotten.
"""

from __future__ import annotations

import warnings
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from hotbed.errors import HotbedError
from hotbed.host.handover import Runner
from hotbed.ops.streams import after, give_stream, mark, take_stream
from hotbed.pipeline.batches import to_device
from hotbed.pipeline.leftovers import Leftover, is_stream, keep_leftover, take_leftover, warn_of_leftover
from hotbed.pipeline.random_draws import DrawGuard
from hotbed.pipeline.written import ReadContents
from hotbed.tables.ownership import RoutedBatch
from hotbed.telemetry.spans import next_step, reads

READ_AHEAD = 8  # batches read and not yet taken
_LOW = 4
MOST_SHARED = (
    24  # batches a rank may want to know ahead; every rank reads at least this many, or others would wait for it
)
_PATIENCE = 2.0  # seconds
_PATIENCE_WITH_RANKS = 20.0  # others may never answer
_LOOK_AGAIN = 0.5  # seconds; a signal may be lost to an interrupt
_WAY_OUT = "Give the loader a generator of its own, as in DataLoader(..., generator=torch.Generator())"

Settle = Callable[[Iterator[Any]], Iterator[Any]]
ReadIds = Callable[[Any, Any], Any]


class ReadBatch(NamedTuple):
    """A batch that was read."""

    batch: Any
    mark: Any  # at which it is there: loaders may work on the device too
    ahead: Any  # what `read_ids` gave
    number: int


class Reader:
    """Batches of a loader, in order, each with the mark at which it is there (batches.take_over)."""

    def __init__(
        self, loader: Iterable[Any], device: torch.device, settle: Settle | None = None, read_ids: ReadIds | None = None
    ) -> None:
        """In the thread, `settle` agrees on batches with other ranks, and `read_ids` reads each one, as given and moved."""
        self._loader: Iterable[Any] | None = loader
        self._settle, self._shared = settle, settle is not None
        self._read_ids = read_ids
        self._full, self._low = (2 * MOST_SHARED, MOST_SHARED + 4) if self._shared else (READ_AHEAD, _LOW)
        self._device = device
        self.contents = ReadContents()
        self._began: Any = None
        self._first_step: int | None = None  # that trains what is read, for a trace
        self._found: deque[ReadBatch] = deque()
        self._num_read = 0
        self._taken = -1  # number of the batch that was handed out last
        self._wanted = 0  # number of a batch for which all before it are trained
        self._held = -1  # number of a batch that is not read before it is wanted
        self._drew = self._drew_late = self._warned = False
        self._leftover = Leftover(deque(), None, False)  # of the reader before this one
        self._in_hand: list[Any] = []  # taken from the loader and not found yet
        self._launched = self._stopped = self._finished = self._raised = False
        self.error: BaseException | None = None  # of the loader, or of what ranks settle
        self._arrived, self._room = _new_signal(), _new_signal()
        self._guard = DrawGuard(self._ask)
        self._seed: int | None = None  # of torch's generator, when a read began that was not wanted yet
        self.ended = False  # no batch comes before those that were handed out are trained
        self._thread = Runner(self._work, "hotbed-reader")

    def start(self) -> None:
        self._began = mark(self._device)
        self._first_step = next_step()
        self._thread.start()
        self._launched = True

    def get(self, *, wait: bool, wanted: bool) -> tuple[Any, Any, Any] | None:
        """(batch, mark, what `read_ids` gave), or None at the end, or when there is none yet and `wait` is not set.

        `wanted`: all batches before it are trained. Others may be held back, and so are errors.
        """
        while not self._found:
            is_finished = self._finished
            if self._found:  # the last
                break
            self.ended = is_finished or (not wanted and self._is_held)
            if self.ended:
                self._warn()
                if wanted and self.error is not None:
                    self._raised = True
                    raise self.error
                return None
            if wanted:
                self._wanted = self._taken + 1
            _signal(self._room)
            if not wait:
                return None
            self._arrived.acquire(timeout=_LOOK_AGAIN)
        if self._drew_late:
            self._warn()  # the training thread waited for the draw
        self.ended = False
        found = self._found[0]
        if len(self._found) == self._low + 1:
            _signal(self._room)
        batch = found.batch, found.mark, found.ahead
        self._taken = found.number
        del self._found[0]  # last, and no call: no interrupt comes between this and the return
        return batch

    def wait(self) -> None:
        """Until `get` has an answer."""
        while not (self._found or self._finished or self._is_held):
            _signal(self._room)
            self._arrived.acquire(timeout=_LOOK_AGAIN)

    @property
    def _is_held(self) -> bool:
        """Whether the next batch waits until it is wanted."""
        return self._wanted < self._taken + 1 == self._held

    @property
    def stream(self) -> Iterable[Any] | None:
        """The loader, if it has one pass only."""
        return self._loader if is_stream(self._loader) else None

    @property
    def num_ready(self) -> int:
        """Batches that are read and not yet taken."""
        return len(self._found)

    def stop(self) -> None:
        """Read no further than the batch that is being read."""
        self._stopped = True
        _signal(self._room)

    def close(self, untrained: Iterable[Any] = ()) -> None:
        """Stop, and wait for the batch that is being read; `untrained` were got and are given back."""
        self.stop()
        self._thread.join(_PATIENCE_WITH_RANKS if self._shared else None)
        if self._launched and self._finished and is_stream(self._loader):
            batches = [*untrained, *(found.batch for found in self._found)]
            batches = [batch.batch if isinstance(batch, RoutedBatch) else batch for batch in batches]
            error = None if self._raised else self._leftover.error if self._shared or self.error is None else self.error
            leftover = Leftover(deque([*batches, *self._in_hand, *self._leftover.batches]), error, self._drew)
            name = keep_leftover(self._loader, leftover)
            self._loader = None
            warn_of_leftover(name)

    @property
    def has_ended(self) -> bool:
        """Whether reading has ended."""
        return self._finished or not self._launched

    def abandon(self) -> None:
        """The process ends: read no further, and do not wait long for a loader that hangs."""
        self.stop()
        self._thread.join(_PATIENCE)

    def _warn(self) -> None:
        if self._drew_late and not self._warned:
            self._warned = True
            warnings.warn(
                "the loader draws from torch's global generator while batches are read, and so may training: prefetch reads "
                "such a batch only when those before it are trained, which gives the results of the plain loop and its "
                f"speed. {_WAY_OUT}.",
                stacklevel=2,
            )

    # What follows runs in the thread.

    def _end(self, error: BaseException | None) -> None:
        self.error = error
        self._settle = self._read_ids = None  # of a feed, which keeps this reader
        self._finished = True
        _signal(self._arrived)

    def _work(self) -> None:
        stream = None
        try:
            stream = take_stream(self._device)
            with torch.cuda.stream(stream):
                after(self._device, self._began)
                self._read_all()
            self._end(None)
        except BaseException as error:  # handed to the training thread
            self._end(error)
        finally:
            give_stream(self._device, stream)

    def _read_all(self) -> None:
        given = self._loader_batches()
        settled = given if self._settle is None else self._settle(given)
        for batch in settled if self._first_step is None else reads(settled, self._first_step):
            moved = to_device(batch, self._device)
            ahead = None if self._read_ids is None else self._read_ids(batch, moved)
            if self._device.type == "cpu":  # else it was copied
                self.contents.note(moved)
            self._found.append(ReadBatch(moved, mark(self._device), ahead, self._num_read))
            self._num_read += 1
            self._in_hand.clear()
            del batch, moved, ahead
            _signal(self._arrived)
            if len(self._found) >= self._full:
                while len(self._found) > self._low + 1 and not self._stopped:
                    self._room.acquire(timeout=_LOOK_AGAIN)
            if self._stopped:
                break
        if self._settle is not None and isinstance(settled, Generator):
            settled.close()  # the other ranks learn of it

    def _loader_batches(self) -> Iterator[Any]:
        """The batches of the loader."""
        loader = self._loader
        assert loader is not None, "a reader that is closed does not start"
        if is_stream(loader):
            self._leftover = take_leftover(loader)
        while self._leftover.batches:
            self._in_hand.append(self._leftover.batches.popleft())
            yield self._in_hand[-1]
        if self._leftover.error is not None:
            raise self._leftover.error
        batches, drew = self._guard_draws(iter, loader), self._leftover.drew
        while not drew or self._shared or self._hold():
            batch = self._guard_draws(next, batches, _END)
            if batch is _END:
                return
            drew = self._drew
            self._in_hand.append(batch)
            del batch
            yield self._in_hand[-1]

    def _guard_draws(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """What a call of the loader's code gives; it asks before it draws from torch's global generator."""
        is_wanted = self._wanted >= self._num_read
        self._drew, self._seed = False, None if is_wanted else torch.initial_seed()
        with self._guard:
            return read(*arguments)

    def _ask(self) -> None:
        """A batch that is being read needs a draw: continue when the plain loop would."""
        self._drew = True
        ahead = "the loader draws from torch's global generator while batches are read ahead of training"
        if self._seed not in (None, torch.initial_seed()):
            raise HotbedError(
                f"{ahead}, and the generator was seeded meanwhile: training may have drawn other numbers than in the plain "
                f"loop. {_WAY_OUT}, or do not prefetch."
            )
        if self._shared and self._num_read > 0:
            raise HotbedError(
                f"{ahead}, which would give other results than the plain loop, and ranks cannot wait for each other's draws. "
                f"{_WAY_OUT}, or do not prefetch."
            )
        if not self._hold():
            raise HotbedError(
                f"{ahead}, and its iterator was left in the middle of such a read: it cannot be read any further. Make it "
                f"anew. {_WAY_OUT}."
            )
        self._drew_late |= self._num_read > 0

    def _hold(self) -> bool:
        """Wait until the batch is wanted; False if the reader was closed."""
        while self._wanted < self._num_read:
            if self._stopped:
                return False
            self._held = self._num_read
            _signal(self._arrived)
            self._room.acquire(timeout=_LOOK_AGAIN)
        self._held = -1
        return True


def _new_signal() -> LockType:
    """A lock that is released when there is something new."""
    lock = allocate_lock()
    lock.acquire()
    return lock


def _signal(lock: LockType) -> None:
    if lock.locked():  # else the last signal was not seen yet
        with suppress(RuntimeError):  # another thread was faster
            lock.release()


_END = object()
