"""The overlapped loop: batches are known, planned and fetched while earlier ones train.

    reader (thread)     loader -> batches on the device
    training thread     batch n + look_ahead arrives; window n + 2 begins; window n + 1 is decided; window n trains
    mover (thread)      window n + 1: rows read from the store; window n: victims written to it

Between two windows, on the training stream, the victims of the next leave their slots and its misses take them: two short
kernels over rows that are already on the device. So planning a window need keep no rows but its own, and the rows that are
in flight cost the policy nothing.

Planning runs on the training thread, a little at every batch: it only starts kernels, and a second thread that did so would
spend its time passing Python's lock to and fro. It never waits for the device: numbers asked for at one batch are read at the
next.

The plain way (`CachedGroup.placed`) runs the same steps one after the other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from hotbed.cache import MOST_BATCHES, Decision, window_length
from hotbed.cached_group import Ahead, CachedGroup
from hotbed.inputs import Given, as_given, flatten
from hotbed.ops.lookups import Lookups, Ticket
from hotbed.pipeline.batches import Ids, ids_of
from hotbed.pipeline.mover import Move, Mover
from hotbed.pipeline.reader import Reader
from hotbed.pipeline.streams import Streams
from hotbed.tables import EmbeddingTables
from hotbed.turns import Planned

_DECIDED = 2  # windows whose rows are fetched ahead


class _Waiting(NamedTuple):
    """A batch that is known."""

    batch: Any
    named: Ids
    given: Given
    lookups: list[Lookups]  # by group; slots are keys
    aheads: list[Ahead]  # by cached group


class _Begun(NamedTuple):
    """A window that is being planned."""

    batches: list[_Waiting]
    decisions: list[Decision]  # by cached group


class _Window:
    """Batches whose rows are in place, or on their way."""

    def __init__(self, move: Move, ticket: Ticket) -> None:
        self.move = move
        self.ticket = ticket
        self.batches: deque[tuple[Any, Planned]] = deque()
        self.delivered: list[Planned] = []
        self.exchanged = False


class Feed:
    """Batches of one pass over a loader, each with its rows in place when it is handed out."""

    def __init__(self, loader: Iterable[Any], tables: EmbeddingTables, window: int | None, look_ahead: int) -> None:
        self._tables = tables
        self._given_window = window
        self._look_ahead = look_ahead
        self._names = [feature.name for feature in tables.features]
        self._cached = [group for group in tables.groups if isinstance(group, CachedGroup)]
        self._learns = tables.training and torch.is_grad_enabled()
        self._streams = Streams(tables.device)
        self._reader = Reader(loader, tables.device)
        self._mover = Mover(tables.device)
        self._waiting: deque[_Waiting] = deque()
        self._begun: _Begun | None = None
        self._decided: deque[_Window] = deque()
        self._current: _Window | None = None
        self._num_windows = 0
        self._paused = self._rearrive = False
        self._retired: deque[tuple[Any, Any]] = deque()  # device memory that the training stream may still read
        self._waits: deque[tuple[Any, Any]] = deque()  # marks around the waits of the training stream

    def start(self) -> None:
        self._tables.turns.take(self)
        self._streams.planning_after(self._streams.mark())
        self._reader.start()
        self._mover.start()

    def next(self) -> tuple[Any, ...]:
        """(the next batch,), or () at the end."""
        if self._mover.error is not None:
            raise self._break()
        window = self._current
        if window is None or not window.batches:
            self._leave()
            window = self._current = self._enter()
            if window is None:
                return ()
        batch, planned = window.batches.popleft()
        window.delivered.append(planned)
        self._tables.turns.deliver(planned)
        if not self._paused:
            self._plan(wait=False)
        return (batch,)

    def close(self) -> None:
        """Let nothing be lost: what was decided is carried out, what was only known is forgotten."""
        try:
            self._leave()
            self._reader.close()
            if self._tables.turns.feed is self and self._mover.error is None:
                self.pause(drop=True)
        finally:
            self._mover.close()
            self._tables.turns.leave(self)
            if self._mover.error is not None:
                self._tables.turns.broken = self._mover.error

    def pause(self, *, drop: bool) -> None:
        """Carry out what was decided, so that slots are as the index says, and promise nothing any more."""
        self._paused = True
        with self._streams.use(self._streams.planning):
            if self._begun is not None:
                self._decide()
        for window in (self._current, *self._decided):
            if window is not None:
                self._exchange(window)
                window.ticket.valid = False
        try:
            self._mover.drain()
        except BaseException:
            raise self._break() from None
        self._streams.after_planning()
        if drop:
            for group in self._cached:
                group.cache.drop_ahead()
            self._rearrive = True

    def _resume(self) -> None:
        for group in self._cached:
            group.let_go()
        self._streams.planning_after(self._streams.mark())
        self._paused = False
        if self._rearrive:
            self._rearrive = False
            with self._streams.use(self._streams.planning):
                known = [waiting._replace(aheads=self._arrive(waiting.lookups)) for waiting in self._waiting]
            self._waiting = deque(known)

    def _break(self) -> BaseException:
        """A copy failed: rows on their way may be lost."""
        error = self._mover.error
        assert error is not None
        self._tables.turns.broken = error
        return error

    def _leave(self) -> None:
        """Everything the training thread wanted of the current window has been asked of the device."""
        window, self._current = self._current, None
        if window is None:
            return
        window.ticket.valid = False
        for planned in window.delivered:
            self._tables.turns.withdraw(planned)
        mark = self._streams.mark()
        if mark is not None:
            self._retired.append((mark, window))
            while self._retired and self._retired[0][0].query():
                self._retired.popleft()
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._cached[0].stalled(before.elapsed_time(after) / 1e3)

    def _enter(self) -> _Window | None:
        """The next window, its rows in their slots."""
        self._tables.turns.take(self)
        if self._paused and not self._decided:
            self._resume()
        first = self._num_windows == 0  # nothing can be fetched ahead of it
        began, before = time.perf_counter(), self._streams.mark(timed=True)
        while not self._decided:
            if not self._plan(wait=True):
                return None
        window = self._decided.popleft()
        self._exchange(window)
        if self._cached and not first:
            if before is None:
                self._cached[0].stalled(time.perf_counter() - began)
            else:
                self._waits.append((before, self._streams.mark(timed=True)))
        return window

    def _exchange(self, window: _Window) -> None:
        """Victims leave, misses come; on the current stream, after all that was asked of the windows before."""
        if window.exchanged:
            return
        window.exchanged = True
        move = window.move
        move.staged.wait()
        if self._mover.error is not None:
            raise self._break()
        self._streams.after(move.planned)
        self._streams.after(move.mark)
        for group, fetch in move.fetches:
            group.exchange(fetch)
        if move.fetches:
            self._mover.write(move)

    def _plan(self, *, wait: bool) -> bool:
        """Work ahead, as far as it goes; with `wait`, until a window is decided. False when there is none left.

        Which batches a decision knows of depends on their order alone: none arrives between its beginning and its end.
        """
        with self._streams.use(self._streams.planning):
            if self._begun is not None and (
                wait or (len(self._decided) < _DECIDED and all(d.row.ready() for d in self._begun.decisions))
            ):
                self._decide()
            if self._begun is None:
                self._know(wait=wait and not self._decided)
                if self._waiting and (len(self._waiting) >= self._look_ahead or self._reader.ended):
                    self._begin()
                for group in self._cached:
                    group.cache.numbers.publish()
            if wait and not self._decided and self._begun is not None:
                self._decide()
        return bool(self._decided)

    def _know(self, *, wait: bool) -> None:
        """Let batches arrive until as many are ahead as allowed."""
        while len(self._waiting) < self._look_ahead:
            found = self._reader.get(wait=wait)
            if found is None:
                return
            batch, mark = found
            self._streams.after(mark)
            named = ids_of(batch, self._names)
            given = as_given(self._tables.features, named.ids, named.bags, self._tables.device)
            groups = zip(self._tables.groups, self._tables.group_inputs)
            lookups = [flatten(group, inputs, given) for group, inputs in groups]
            self._waiting.append(_Waiting(batch, named, given, lookups, self._arrive(lookups)))

    def _arrive(self, lookups: list[Lookups]) -> list[Ahead]:
        groups = zip(self._tables.groups, lookups)
        return [group.arrive(each) for group, each in groups if isinstance(group, CachedGroup)]

    def _begin(self) -> None:
        length = 1 if not self._cached else len(self._waiting)
        for c, group in enumerate(self._cached):
            num_keys = [waiting.aheads[c].arrival.num_keys for waiting in self._some_waiting()]
            length = min(length, window_length(num_keys, group.num_slots, self._given_window))
        chosen = [self._waiting[i] for i in range(length)]
        for waiting in chosen:
            for lookups in waiting.lookups:
                if lookups.check is not None:
                    lookups.check()
        parts = enumerate(self._cached)
        decisions = [group.begin([w.aheads[c] for w in chosen], self._learns) for c, group in parts]
        for _ in chosen:
            self._waiting.popleft()
        self._begun = _Begun(chosen, decisions)

    def _some_waiting(self) -> list[_Waiting]:
        most = self._given_window or MOST_BATCHES
        return [self._waiting[i] for i in range(min(most, len(self._waiting)))]

    def _decide(self) -> None:
        """Choose slots for the window that was begun, and send for its rows."""
        assert self._begun is not None
        (batches, decisions), self._begun = self._begun, None
        ticket = Ticket(self._learns)
        fetches, placed = [], []
        parts = iter(range(len(self._cached)))
        for g, group in enumerate(self._tables.groups):
            if isinstance(group, CachedGroup):
                c = next(parts)
                fetch, lookups = group.finish([w.aheads[c] for w in batches], decisions[c], ticket)
                fetches.append((group, fetch))
                placed.append(lookups)
            else:
                placed.append([group.ordered(w.lookups[g]) for w in batches])
        window = _Window(Move(self._num_windows, fetches, self._streams.mark()), ticket)
        self._num_windows += 1
        for i, w in enumerate(batches):
            planned = Planned(w.named.ids, w.named.bags, w.given, [lookups[i] for lookups in placed])
            window.batches.append((w.batch, planned))
        self._decided.append(window)
        self._mover.read(window.move)
