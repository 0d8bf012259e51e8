"""The overlapped loop: one thread plans ahead, one moves rows, the training thread takes batches whose rows are in place.

    planner   loader -> look_ahead batches known -> window n planned: misses, victims, slots
    mover     window n: rows read from the store -> device; victims off the device -> store; misses unpacked
    training  window n-1 or n-2

Planning window n keeps the rows of windows n-1 and n in their slots, so its victims are rows that window n-2 and earlier
used last: the mover takes them out once n-2 is done. Where the two do not fit together only window n is kept, and the mover
waits for n-1. The mover works strictly in order, so a row that leaves with one window and is needed by the next is read
after it was written.

The plain way (`CachedGroup.placed`) runs the same steps one after the other.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from hotbed.cache import window_length
from hotbed.cached_group import Ahead, CachedGroup, Fetch
from hotbed.inputs import Given, as_given, flatten
from hotbed.ops.lookups import Lookups, Ticket
from hotbed.pipeline.batches import Ids, ids_of, to_device
from hotbed.pipeline.streams import Streams
from hotbed.tables import EmbeddingTables
from hotbed.turns import Planned

_DEPTH = 3  # windows planned and not done: one trains, one is fetched, one is decided
_END = object()


class _Waiting(NamedTuple):
    """A batch that is known."""

    batch: Any
    named: Ids
    given: Given
    lookups: list[Lookups]  # by group; slots are keys
    aheads: list[Ahead | None]  # by group; None where there is no cache


class _Window:
    """Batches planned together."""

    def __init__(self, number: int, after: int, ticket: Ticket) -> None:
        self.number = number
        self.after = after  # the window that must be done before victims leave
        self.ticket = ticket
        self.fetches: list[tuple[CachedGroup, Fetch]] = []
        self.batches: deque[tuple[Any, Planned]] = deque()
        self.delivered: list[Planned] = []
        self.planned_mark: Any = None
        self.ready_mark: Any = None
        self.ready = threading.Event()


class Feed:
    """Batches of one pass over a loader, each with its rows in place when it is handed out."""

    def __init__(self, loader: Iterable[Any], tables: EmbeddingTables, window: int | None, look_ahead: int) -> None:
        self._loader = loader
        self._tables = tables
        self._given_window = window
        self._look_ahead = look_ahead
        self._cached = [group for group in tables.groups if isinstance(group, CachedGroup)]
        self._learns = tables.training and torch.is_grad_enabled()
        self._streams = Streams(tables.device)
        self._changed = threading.Condition()
        self._caches = threading.Lock()  # held while the planner works on them
        self._waiting: deque[_Waiting] = deque()  # of the planner
        self._since: list[int] | None = None  # the clock at which the last window began, by cached group
        self._last_keys = [0] * len(self._cached)  # distinct keys of the last window, by group
        self._windows: deque[_Window] = deque()  # planned, not handed out
        self._current: _Window | None = None
        self._num_planned = self._num_done = self._num_moved = 0
        self._done_marks: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._ended = self._closing = self._paused = self._rearrive = False
        self._moves: queue.SimpleQueue[_Window | None] = queue.SimpleQueue()
        self._retired: deque[tuple[Any, Any]] = deque()  # device memory that streams may still read
        self._waits: deque[tuple[Any, Any]] = deque()  # marks around the waits of the training stream
        self._threads: list[threading.Thread] = []

    # the training thread

    def start(self) -> None:
        self._tables.turns.take(self)
        self._streams.all_after(self._streams.mark())
        for target, name in ((self._plan_all, "hotbed-planner"), (self._move_all, "hotbed-mover")):
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def next(self) -> Any:
        """The next batch, or the end (None in a tuple): (batch,) or ()."""
        if self._error is not None:
            raise self._error
        window = self._current
        if window is None or not window.batches:
            self._finish_current()
            window = self._current = self._next_window()
            if window is None:
                return ()
        batch, planned = window.batches.popleft()
        window.delivered.append(planned)
        self._tables.turns.deliver(planned)
        return (batch,)

    def close(self) -> None:
        """Let nothing be lost: what was decided is carried out, what was only known is forgotten."""
        self._finish_current()
        with self._changed:
            self._closing = True
            self._release_all()
        for thread in self._threads:
            thread.join()
        self._streams.main_after_all()
        if self._tables.turns.feed is self:
            for group in self._cached:
                group.cache.drop_ahead()
        self._tables.turns.leave(self)
        self._windows.clear()

    def pause(self, *, drop: bool) -> None:
        with self._changed:
            self._paused = True
            self._release_all()
        with self._caches:
            pass  # the planner has left what it was doing, and sees that it must wait
        turns = self._tables.turns
        with self._changed:
            self._changed.wait_for(lambda: self._num_moved == self._num_planned or turns.broken is not None)
        self._streams.main_after_all()
        if drop:
            for group in self._cached:
                group.cache.drop_ahead()
            self._rearrive = True

    def _resume(self) -> None:
        for group in self._cached:
            group.let_go()
        self._streams.all_after(self._streams.mark())
        with self._changed:
            self._paused = False
            self._since = None
            self._changed.notify_all()

    def _finish_current(self) -> None:
        """Everything the training thread wanted of the current window has been asked of the device."""
        window, self._current = self._current, None
        if window is None:
            return
        window.ticket.valid = False
        for planned in window.delivered:
            self._tables.turns.withdraw(planned)
        with self._changed:
            self._release(window.number)
            self._changed.notify_all()
        self._retire(window)
        self._count_waits()

    def _release(self, number: int) -> None:
        """Windows up to `number` are done: their slots may be taken."""
        if number >= self._num_done:
            mark = self._streams.mark()
            for done in range(self._num_done, number + 1):
                self._done_marks[done] = mark
                self._done_marks.pop(done - _DEPTH - 1, None)
            self._num_done = number + 1
        for window in (self._current, *self._windows):
            if window is not None and window.number <= number:
                window.ticket.valid = False

    def _release_all(self) -> None:
        self._release(self._num_planned - 1)
        self._changed.notify_all()

    def _next_window(self) -> _Window | None:
        self._tables.turns.take(self)
        if self._paused and not self._windows:
            self._resume()
        began, before = time.perf_counter(), self._streams.mark(timed=True)
        with self._changed:
            self._changed.wait_for(lambda: bool(self._windows) or self._ended or self._error is not None)
            window = self._windows.popleft() if self._windows and self._error is None else None
        if window is not None:
            window.ready.wait()
        if self._error is not None:
            raise self._error
        if window is None:
            return None
        self._streams.after(window.ready_mark)
        if window.number and self._cached:  # nothing can be fetched ahead of the first
            if before is None:
                self._cached[0].stalled(time.perf_counter() - began)
            else:
                self._waits.append((before, self._streams.mark(timed=True)))
        return window

    def _count_waits(self) -> None:
        """How long the training stream waited, for the waits that are over."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._cached[0].stalled(before.elapsed_time(after) / 1e3)

    def _retire(self, window: _Window) -> None:
        """Side streams may use this memory again only when the training stream is past it."""
        mark = self._streams.mark()
        if mark is not None:
            self._retired.append((mark, window))
            while self._retired and self._retired[0][0].query():
                self._retired.popleft()

    # the planner

    def _plan_all(self) -> None:
        try:
            with self._streams.use(self._streams.planning), torch.set_grad_enabled(self._learns):
                batches = iter(self._loader)
                while self._fill(batches):
                    self._plan_window()
        except BaseException as error:  # handed to the training thread
            self._fail(error)
        finally:
            self._moves.put(None)
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _fill(self, batches: Iterator[Any]) -> bool:
        """Know as many batches as allowed; False when there is nothing left to plan."""
        while len(self._waiting) < self._look_ahead and not self._closing:
            batch = next(batches, _END)
            if batch is _END:
                self._look_ahead = 0
                break
            batch = to_device(batch, self._tables.device)
            named = ids_of(batch, [feature.name for feature in self._tables.features])
            given = as_given(self._tables.features, named.ids, named.bags, self._tables.device)
            groups = zip(self._tables.groups, self._tables.group_inputs)
            lookups = [flatten(group, inputs, given) for group, inputs in groups]
            for each in lookups:
                if each.check is not None:
                    each.check()
            with self._turn() as mine:
                if mine:
                    self._waiting.append(_Waiting(batch, named, given, lookups, self._arrive(lookups)))
        return bool(self._waiting) and not self._closing

    def _arrive(self, lookups: list[Lookups]) -> list[Ahead | None]:
        groups = zip(self._tables.groups, lookups)
        return [group.arrive(each) if isinstance(group, CachedGroup) else None for group, each in groups]

    def _turn(self) -> _Turn:
        return _Turn(self)

    def _plan_window(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_planned - self._num_done < _DEPTH or self._closing)
        with self._turn() as mine:
            if not mine:
                return
            length = self._length()
            chosen = [self._waiting.popleft() for _ in range(length)]
            window = self._decide(chosen)
            window.planned_mark = self._streams.mark()
            with self._changed:
                self._num_planned += 1
                self._windows.append(window)
                self._changed.notify_all()
            self._moves.put(window)

    def _length(self) -> int:
        """Of the next window: what every group can hold."""
        length = len(self._waiting)
        for g, group in enumerate(self._tables.groups):
            if isinstance(group, CachedGroup):
                num_keys = [w.aheads[g].arrival.num_keys for w in self._waiting]  # type: ignore[union-attr]
                length = min(length, window_length(num_keys, group.num_slots, self._given_window))
        return length if self._cached else 1

    def _decide(self, chosen: list[_Waiting]) -> _Window:
        num_keys: list[int] = [
            sum(w.aheads[g].arrival.num_keys for w in chosen)  # type: ignore[union-attr, misc]
            for g, group in enumerate(self._tables.groups)
            if isinstance(group, CachedGroup)
        ]
        together = self._since is not None and all(
            before + now <= group.num_slots for before, now, group in zip(self._last_keys, num_keys, self._cached)
        )
        ticket = Ticket(self._learns)
        window = _Window(self._num_planned, self._num_planned - (2 if together else 1), ticket)
        began = [group.cache.clock + 1 for group in self._cached]
        pinned = iter(self._since if together and self._since is not None else began)
        placed: list[list[Lookups]] = []
        for g, group in enumerate(self._tables.groups):
            if isinstance(group, CachedGroup):
                fetch, lookups = group.plan([w.aheads[g] for w in chosen], next(pinned), ticket)  # type: ignore[misc]
                window.fetches.append((group, fetch))
                placed.append(lookups)
            else:
                placed.append([group.ordered(w.lookups[g]) for w in chosen])
        self._since, self._last_keys = began, num_keys
        for i, w in enumerate(chosen):
            planned = Planned(w.named.ids, w.named.bags, w.given, [lookups[i] for lookups in placed])
            window.batches.append((w.batch, planned))
        return window

    # the mover

    def _move_all(self) -> None:
        try:
            while (window := self._moves.get()) is not None:
                self._move(window)
                with self._changed:
                    self._num_moved += 1
                    self._changed.notify_all()
        except BaseException as error:  # handed to the training thread
            self._tables.turns.broken = error
            self._fail(error)

    def _move(self, window: _Window) -> None:
        streams = self._streams
        with streams.use(streams.inward):
            streams.after(window.planned_mark)
            for group, fetch in window.fetches:
                group.read(fetch)
        with self._changed:
            self._changed.wait_for(lambda: self._num_done > window.after)
            done = self._done_marks.get(window.after)
        with streams.use(streams.outward):
            streams.after(window.planned_mark, done)
            for group, fetch in window.fetches:
                group.pack(fetch)
            packed = streams.mark()
        with streams.use(streams.inward):
            streams.after(packed)
            for group, fetch in window.fetches:
                group.unpack(fetch)
            window.ready_mark = streams.mark()
        window.ready.set()
        for group, fetch in window.fetches:
            group.write(fetch)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            for window in self._windows:
                window.ready.set()
            if self._current is not None:
                self._current.ready.set()
            self._changed.notify_all()


class _Turn:
    """The planner's hold on the caches; not given while the training thread claims them, or at the end."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __enter__(self) -> bool:
        feed = self._feed
        while True:
            with feed._changed:
                feed._changed.wait_for(lambda: not feed._paused or feed._closing)
            feed._caches.acquire()
            if feed._closing:
                return False
            if not feed._paused:
                break
            feed._caches.release()
        if feed._rearrive:
            feed._rearrive = False
            known = list(feed._waiting)
            feed._waiting.clear()
            for each in known:
                feed._waiting.append(each._replace(aheads=feed._arrive(each.lookups)))
        return True

    def __exit__(self, *_: object) -> None:
        self._feed._caches.release()
