"""The overlapped loop: batches are known, planned and fetched while earlier ones train.

    reader (thread)     loader -> batches on the device
    training thread     batch n + look_ahead is made known; window n + 2 is planned; window n trains
    mover (thread)      window n + 1, n + 2: rows read from the store; window n: victims written to it

Between two windows, on the training stream, the victims of the next leave their slots and its misses take them: two short
kernels over rows that are already on the device. So planning a window need keep no rows but its own, and the rows that are
in flight cost the policy nothing.

Planning runs on the training thread and stream, a little at every batch: it only starts kernels, and a second thread that did
so would spend its time passing Python's lock to and fro. It never waits for the device. On CUDA, batches that are id matrices
of one size go through a lane (recorded launches); all others are planned launch by launch.

The plain way (`CachedGroup.placed`) runs the same steps one after the other.

Every step that moves rows or changes an index is one change (changes.py). In between, a feed may be left at any point by an
exception: `close` then carries out what was decided, and if it is interrupted itself, the next call of the tables does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hotbed.cache import MOST_AHEAD, MOST_BATCHES, Cache, window_length
from hotbed.ops.lookups import Lookups, Ticket
from hotbed.ops.streams import after, mark
from hotbed.pipeline.batches import Ids, ids_of, to_device
from hotbed.pipeline.reader import MOST_SHARED, Reader
from hotbed.pipeline.recorded_planners import Lanes, LaneWindow, lanes_for
from hotbed.pipeline.transfer_thread import Move, Mover
from hotbed.pipeline.windows import Begun, Trial, Waiting, Window
from hotbed.tables.group.cached import Ahead, CachedGroup, Fetch
from hotbed.tables.group.dynamic import FAR_AHEAD
from hotbed.tables.inputs import Given, as_given, flatten
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.ownership import Planned, Routed
from hotbed.telemetry.clock import COPY, PLAN, READER, WAIT

_DECIDED = 2  # windows whose rows are fetched ahead


class Feed:
    """Batches of one pass over a loader, each with its rows in place when it is handed out."""

    def __init__(
        self, loader: Iterable[Any], tables: EmbeddingTables, window: int | None, look_ahead: int | None
    ) -> None:
        self._tables = tables
        self._device = tables.device
        self._clock = tables.clock
        self.changes = tables.turns.changes
        self._given_window = window
        self._given_look_ahead = None if look_ahead is None else max(look_ahead, window or 1)
        self._look_ahead = 1  # until the first batch is known
        self._names = [feature.name for feature in tables.features]
        self._cached = [group for group in tables.groups if isinstance(group, CachedGroup)]
        self._ids = [group.ids for group in self._cached if group.ids is not None]
        self._most_ahead, self._num_delivered = MOST_AHEAD, 0  # the latter since batches were last taken back
        self._learns = True
        self._owner = threading.current_thread()  # who trains
        self._caches: list[Cache] = []  # that know of the batches ahead
        self._strides: list[int] = []
        self._mesh = tables.lend_mesh() if tables.is_shared else None  # of ranks that settle their batches together
        self._reader = Reader(loader, self._device, None if self._mesh is None else self._settled)
        self._mover = Mover(self._device)
        self._waiting: deque[Waiting] = deque()
        self._begun: Begun | None = None
        self._decided: deque[Window] = deque()
        self._current: Window | None = None
        self._lanes: Lanes | None = None
        self._num_windows = 0
        self._unknown: deque[tuple[Any, Any]] = deque()  # read, and not known to the caches
        self.offered: tuple[Any, ...] = ()  # the batch that `next` gave, until whoever asked has handed it out
        self._untrained: list[Any] | None = None  # batches in hand when the feed was left
        self._started = self._paused = self._rearrive = self._in_lane = self._lanes_tried = False
        self._retired: deque[tuple[Any, Any]] = deque()  # device memory that the training stream may still read
        self._waits: deque[tuple[Any, Any]] = deque()  # marks around the waits of the training stream

    def start(self) -> None:
        self._owner = threading.current_thread()
        self._learns = self._tables.learns and torch.is_grad_enabled()
        self._mover.start()
        with self.changes.lock:
            self._tables.turns.take(self)
            for group in self._cached:
                group.let_go()  # a batch that was looked up before this and is not updated yet
            self._caches = [group.cache for group in self._cached]
        self._reader.start()

    def next(self) -> tuple[Any, ...]:
        """(the next batch,), or () at the end."""
        clock, lock = self._clock, self.changes.lock
        before = clock.enter(PLAN)
        with lock:
            found = self._next()
        while found is None:
            clock.enter(READER)
            self._reader.wait()
            clock.enter(PLAN)
            with lock:
                found = self._next()
        clock.enter(before)
        return found

    def _next(self) -> tuple[Any, ...] | None:
        """As `next`; None when the loader has to give more first, which takes as long as it takes. Holds the lock."""
        window = self._current
        if window is None or not window.batches:
            if self._mover.error is not None:
                raise self._break()
            self._leave()
            window = self._enter()
            if window is None:
                return () if self._has_ended else None
        if not self._paused:
            self._plan(wanted=False)
        batch, planned = window.batches[0]
        window.delivered.append(planned)
        self._tables.turns.deliver(planned)
        self._num_delivered += 1
        found = (batch.batch if isinstance(batch, Routed) else batch,)
        self.offered = (batch,)
        del window.batches[0]  # no call between the two: no interrupt comes there
        return found

    def close(self) -> None:
        """Let nothing be lost: what was decided is carried out, what was only known is forgotten."""
        self._reader.stop()
        self._tables.turns.left.append(self)  # until it is done: whoever comes next finishes it
        owns = threading.current_thread() is self._owner or not self._owner.is_alive()
        if owns and not self.changes.is_inside:
            self.finish()  # else garbage collected by some other thread, or amid a change: rows must not be moved now

    def finish(self) -> None:
        """The rest of `close`; may be interrupted, and called again."""
        with self.changes.lock:
            if self._untrained is None:
                self._untrained = self._in_hand()
            if self._mover.error is not None:
                self._break()
            self._leave()
            if self._tables.turns.feed is self and not self.changes.is_broken:
                self.pause(drop=True)
            self._tables.turns.leave(self)
        self._reader.close(self._untrained)
        self._mover.close()
        if self._lanes is not None:
            self._lanes.stop()
        if self._mesh is not None and self._reader.has_ended:
            mesh, self._mesh = self._mesh, None
            self._tables.take_back_mesh(mesh)
        self._tables.turns.forget(self)

    def _in_hand(self) -> list[Any]:
        """Batches that were read and not handed out, in order."""
        windows = [window for window in (self._current, *self._decided) if window is not None]
        batches = [*self.offered, *(batch for window in windows for batch, _ in window.batches)]
        if self._begun is not None:
            batches += [waiting.batch for waiting in self._begun.batches]
        return [*batches, *(waiting.batch for waiting in self._waiting), *(batch for batch, _ in self._unknown)]

    def abandon(self) -> None:
        """The process ends: rows that are not saved are lost anyway."""
        self._reader.abandon()
        self._mover.abandon()
        if self._lanes is not None:
            self._lanes.stop()

    def pause(self, *, drop: bool) -> None:
        """Carry out what was decided, so that slots are as the index says, and promise nothing any more."""
        self._paused = True
        if self._begun is not None:
            self._decide()
        for window in (self._current, *self._decided):
            if window is not None:
                self._exchange(window)
                window.ticket.valid = False
        self._drain()
        if drop:
            with self.changes.changing("dropping the batches ahead"):
                if self._lanes is not None:
                    self._lanes.forget()
                for group in self._cached:
                    group.cache.drop_ahead()
                self._rearrive = True
                if self._ids:
                    self._take_back()

    def _take_back(self) -> None:
        """Dynamic ids of batches ahead are forgotten, and translated again when it is their turn.

        Who takes them back at every batch would have them translated again and again: then few are looked at ahead.
        """
        windows = [window for window in (self._current, *self._decided) if window is not None]
        ahead = [batch for window in windows for batch, _ in window.batches]
        ahead += [waiting.batch for waiting in self._waiting]
        self._unknown.extendleft((batch, None) for batch in reversed(ahead))
        for window in windows:
            window.batches.clear()
        for window in self._decided:
            self._retire(window)
        self._decided.clear()
        self._waiting.clear()
        for group in self._cached:
            group.take_back()
        if ahead:
            self._most_ahead = max(1, self._look_ahead // 2) if self._num_delivered < self._look_ahead else MOST_AHEAD
            self._num_delivered = 0
        self._look_ahead = 1

    def _make_way(self) -> None:
        """Dynamic ids that arrive may take rows of expired ones, whose records must not be on their way any more."""
        if any(ids.has_released for ids in self._ids):
            self.pause(drop=False)
            with self.changes.changing("forgetting rows of expired ids"):
                for group in self._cached:
                    group.forget_released()

    def _drain(self) -> None:
        """Wait until every row that left is in its store."""
        try:
            self._mover.drain()
            if self._lanes is not None:
                self._lanes.drain()
        except Exception as error:
            self.changes.broken = error
            raise

    def _resume(self) -> None:
        for group in self._cached:
            group.let_go()
        with self.changes.changing("making batches known again"):
            if any(group.cache is not cache for group, cache in zip(self._cached, self._caches)):
                self._begin_anew()
            elif self._rearrive:
                for cache, stride in zip(self._caches, self._strides):
                    cache.stride = stride  # another feed may have looked less far
                self._waiting = deque([self._known_again(waiting) for waiting in self._waiting])
            self._paused = self._rearrive = False

    def _begin_anew(self) -> None:
        """Rows were loaded or moved, and the caches are others: nothing is known to them."""
        self._caches = [group.cache for group in self._cached]
        self._unknown.extendleft((waiting.batch, None) for waiting in reversed(self._waiting))
        self._waiting.clear()
        self._look_ahead = 1
        if self._lanes is not None:
            self._lanes.stop()
        self._lanes = None
        self._lanes_tried = self._in_lane = False

    def _known_again(self, waiting: Waiting) -> Waiting:
        if waiting.flat and self._lanes is not None:
            return waiting._replace(number=self._lanes.arrive(waiting.flat))
        return waiting._replace(aheads=self._arrive(waiting.lookups))

    def _break(self) -> BaseException:
        """A copy failed: rows on their way may be lost."""
        error = self._mover.error
        assert error is not None
        self.changes.broken = error
        return error

    def _leave(self) -> None:
        """Everything the training thread wanted of the current window has been asked of the device."""
        window, self._current = self._current, None
        if window is None:
            return
        window.ticket.valid = False
        for planned in window.delivered:
            self._tables.turns.withdraw(planned)
        self._retire(window)
        while self._waits and self._waits[0][1].query():
            before, until = self._waits.popleft()
            self._cached[0].stalled(before.elapsed_time(until) / 1e3)

    def _retire(self, window: Window) -> None:
        """Keep the memory of a window until the device is past it."""
        if self._device.type == "cuda" and (self._reader.moves or isinstance(window.move, Move)):
            self._retired.append((mark(self._device), window))
            while self._retired and self._retired[0][0].query():
                self._retired.popleft()

    def _enter(self) -> Window | None:
        """The next window, its rows in their slots."""
        self._tables.turns.take(self)
        if self._ids and any(ids.num_ahead > FAR_AHEAD for ids in self._ids):
            self.pause(drop=True)  # batches that were handed out are kept and not trained
        if self._paused and not self._decided:
            self._resume()
        while not self._decided:
            if not self._plan(wanted=True):
                return None
        window = self._decided[0]
        waits = self._started and not window.exchanged and not self._is_staged(window)
        began, before = time.perf_counter(), mark(self._device, timed=True) if waits else None
        self._exchange(window, before)
        if waits and before is None:
            self._cached[0].stalled(time.perf_counter() - began)
        self._started = True  # nothing can be fetched ahead of the first
        self._current = self._decided.popleft()
        return window

    def _is_staged(self, window: Window) -> bool:
        """Whether its rows are there."""
        move = window.move
        if isinstance(move, Move):
            return move.staged.is_set() and (move.mark is None or bool(move.mark.query()))
        return self._lanes is not None and self._lanes.are_staged(move)

    def _exchange(self, window: Window, before: Any = None) -> None:
        """Victims leave, misses come; on the current stream, after all that was asked of the windows before."""
        if window.exchanged:
            return
        move = window.move
        part = self._clock.enter(WAIT if isinstance(move, Move) else COPY)
        if isinstance(move, Move):
            self._mover.wait(move)
            self._clock.enter(COPY)
        with self.changes.changing("an exchange of rows"):
            window.exchanged = True
            if isinstance(move, Move):
                after(self._device, move.mark)
                for group, fetch in move.fetches:
                    group.exchange(fetch)
                self._mover.write(move)
            elif self._lanes is not None:
                self._lanes.exchange(move)
        self._clock.enter(part)
        if before is not None:
            self._waits.append((before, mark(self._device, timed=True)))

    def _plan(self, *, wanted: bool) -> bool:
        """Work ahead, as far as the loader has come; whether a window is decided. `wanted`: one that was begun is, in any case.

        Which batches a decision knows of depends on their order alone: none arrives between its beginning and its end.
        """
        if self._begun is not None and (
            wanted or (len(self._decided) < _DECIDED and all(d.row.ready() for d in self._begun.decisions))
        ):
            self._decide()
        if self._begun is None:
            self._know()
            if self._paused:
                if self._current is not None or self._decided:
                    return bool(self._decided)
                self._resume()
            if len(self._waiting) >= self._look_ahead or (self._waiting and (self._has_ended or self._is_full)):
                in_lane = bool(self._waiting[0].flat)
                if in_lane != self._in_lane:
                    if self._decided or not wanted:
                        return bool(self._decided)
                    self._drain()  # rows are moved by another thread from here on
                    self._in_lane = in_lane
                if in_lane:
                    if len(self._decided) < _DECIDED:
                        self._decide_in_lanes()
                else:
                    self._begin()
                    for group in self._cached:
                        group.cache.numbers.publish()
        if wanted and not self._decided and self._begun is not None:
            self._decide()
        return bool(self._decided)

    @property
    def _has_ended(self) -> bool:
        """Whether there is no batch left that nobody knows."""
        return self._reader.ended and not self._unknown

    def _know(self) -> None:
        """Let batches arrive until as many are ahead as allowed, or the loader has no more yet."""
        while len(self._waiting) < self._look_ahead and not (self._waiting and self._is_full):
            all_trained = not (self._waiting or self._decided or self._current)
            found = self._read(wanted=all_trained)
            if found is None:
                return
            batch, named, flat = found
            if flat and self._lanes is not None:
                given = self._lanes.given(named)
                with self.changes.changing("making a batch known"):
                    waiting = Waiting(batch, named, given, [], [], flat, self._lanes.arrive(flat))
                    self._waiting.append(waiting)
                    del self._unknown[0]
            else:
                with Trial(self._unknown):
                    given, lookups = self._lookups_of(batch, named)
                self._make_way()
                with self.changes.changing("making a batch known"):
                    waiting = Waiting(batch, named, given, lookups, self._arrive(lookups), [], 0)
                    self._waiting.append(waiting)
                    del self._unknown[0]
            if self._look_ahead == 1:
                self._see_how_far(waiting)

    @property
    def _is_full(self) -> bool:
        """Whether an index has no room for a batch more, which comes when batches have more rows than the first had."""
        return any(cache.is_full for cache in self._caches)

    def _lookups_of(self, batch: Any, named: Ids) -> tuple[Given, list[Lookups]]:
        """What a batch, or all ranks, want of the tables here."""
        if isinstance(batch, Routed):
            with self.changes.changing("translating ids"):
                return batch.given, self._tables.asked(batch.routes, self._learns)
        given = as_given(self._tables.features, named.ids, named.bags, self._device)
        groups = zip(self._cached, self._tables.group_inputs)
        with self.changes.changing("translating ids"):
            return given, [flatten(group, inputs, given, self._learns) for group, inputs in groups]

    def _settled(self, batches: Iterator[Any]) -> Iterator[Routed]:
        """Batches that the ranks have settled together."""
        return self._tables.routed(self._named(batches), self._mesh)

    def _named(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any, Any]]:
        """(batch, ids, bags), on the device."""
        for batch in loader:
            moved = to_device(batch, self._device)
            named = ids_of(moved, self._names)
            yield moved, named.ids, named.bags

    def _read(self, *, wanted: bool = False) -> tuple[Any, Ids, list[Tensor]] | None:
        """The next batch of the loader, if it is there: (batch, its ids, those ids by group if it fits the lanes).

        `wanted`: all batches before it are trained. It is the first of those not known until it is taken from there.
        """
        if not self._unknown:
            found = self._from_reader(wanted=wanted)
            if found is None:
                return None
            self._unknown.append(found)
        with Trial(self._unknown):
            return self._named_of(*self._unknown[0])

    def _named_of(self, batch: Any, point: Any) -> tuple[Any, Ids, list[Tensor]]:
        """(a batch that was read, its ids, those ids by group if it fits the lanes)."""
        after(self._device, point)
        named = ids_of(batch.batch if isinstance(batch, Routed) else batch, self._names)
        if self._lanes is None and not self._lanes_tried:
            self._lanes_tried = True
            self._lanes = lanes_for(self._tables, named, self._given_window or MOST_BATCHES, self._learns)
            if self._lanes is not None:
                self._lanes.start()
        return batch, named, [] if self._lanes is None else self._lanes.flat(named) or []

    def _from_reader(self, *, wanted: bool = False) -> tuple[Any, Any] | None:
        num_ready = self._reader.num_ready
        if num_ready:
            self._clock.asked(num_ready)
        return self._reader.get(wait=False, wanted=wanted)

    def _see_how_far(self, waiting: Waiting) -> None:
        """The first batch tells how many to look ahead."""
        found = [
            group.cache.look_ahead(num_keys, self._given_look_ahead)
            for group, num_keys in zip(self._cached, self._num_keys(waiting))
        ]
        self._look_ahead = min(*found, self._most_ahead)
        if self._tables.is_shared:
            self._look_ahead = min(self._look_ahead, MOST_SHARED)
        self._strides = [cache.stride for cache in self._caches]
        if self._lanes is not None:
            self._lanes.reserve(self._look_ahead)

    def _num_keys(self, waiting: Waiting) -> list[int]:
        """Distinct keys of a batch, by group."""
        if waiting.flat and self._lanes is not None:
            return self._lanes.num_keys(waiting.number)
        return [ahead.arrival.num_keys for ahead in waiting.aheads]

    def _arrive(self, lookups: list[Lookups]) -> list[Ahead]:
        return [group.arrive(each) for group, each in zip(self._cached, lookups)]

    def _next_batches(self) -> list[Waiting]:
        """Those of the next window: alike, and no more than every group can hold. They wait until they are planned."""
        in_lane = bool(self._waiting[0].flat)
        most: list[Waiting] = []
        for waiting in self._waiting:
            if len(most) == (self._given_window or MOST_BATCHES) or bool(waiting.flat) != in_lane:
                break
            most.append(waiting)
        length = len(most)
        for group, num_keys in zip(self._cached, zip(*(self._num_keys(waiting) for waiting in most))):
            length = min(length, window_length(num_keys, group.num_slots, self._given_window))
            if num_keys[0] > group.num_slots:
                with Trial(self._waiting):
                    group.refuse_batch(num_keys[0])
        return most[:length]

    def _begin(self) -> None:
        chosen = self._next_batches()
        for place, waiting in enumerate(chosen):
            with Trial(self._waiting, place):
                for lookups in waiting.lookups:
                    if lookups.check is not None:
                        lookups.check()
        with self.changes.changing("planning a window"):
            parts = enumerate(self._cached)
            decisions = [group.begin([w.aheads[c] for w in chosen], self._learns) for c, group in parts]
            self._begun = Begun(chosen, decisions)
            self._no_longer_wait(len(chosen))

    def _no_longer_wait(self, count: int) -> None:
        for _ in range(count):
            self._waiting.popleft()

    def _decide(self) -> None:
        """Choose slots for the window that was begun, and send for its rows."""
        assert self._begun is not None
        batches, decisions = self._begun
        ticket = Ticket(self._learns)
        fetches: list[tuple[CachedGroup, Fetch]] = []
        placed: list[list[Lookups]] = []
        with self.changes.changing("planning a window"):
            self._begun = None
            for g, (group, decision) in enumerate(zip(self._cached, decisions)):
                fetch, lookups = group.finish([w.aheads[g] for w in batches], decision, ticket)
                fetches.append((group, fetch))
                placed.append(lookups)
            move = Move(self._num_windows, fetches)
            self._num_windows += 1
            self._line_up(batches, move, placed, ticket)
            self._mover.read(move)

    def _decide_in_lanes(self) -> None:
        assert self._lanes is not None
        batches = self._next_batches()
        if self._lanes.found_bad:
            windows = [window for window in (self._current, *self._decided) if window is not None]
            planned = [each for w in windows for each in (*w.delivered, *(planned for _, planned in w.batches))]
            self._lanes.check([*planned, *(waiting.named for waiting in batches)])
        ticket = Ticket(self._learns)
        new = self._as_many_new(len(batches))
        with self.changes.changing("planning a window"):
            number = self._lanes.num_arrived
            parts, placed = self._lanes.plan([w.named for w in batches], [flat for _, _, flat in new], ticket)
            self._no_longer_wait(len(batches))
            for i, (batch, named, flat) in enumerate(new):
                del self._unknown[0]
                self._waiting.append(Waiting(batch, named, self._lanes.given(named), [], [], flat, number + i))
            self._line_up(batches, parts, placed, ticket)

    def _as_many_new(self, count: int) -> list[tuple[Any, Ids, list[Tensor]]]:
        """The next batches of the loader, if they are there and fit the lanes: all or none. They are not known until later."""
        if len(self._waiting) > self._look_ahead:
            return []
        while len(self._unknown) < count:
            found = self._from_reader()
            if found is None:
                return []
            self._unknown.append(found)
        new = []
        for i in range(count):
            batch, named, flat = self._named_of(*self._unknown[i])
            if not flat:
                return []
            new.append((batch, named, flat))
        return new

    def _line_up(
        self, batches: list[Waiting], move: Move | list[LaneWindow], placed: list[list[Lookups]], ticket: Ticket
    ) -> None:
        window = Window(move, ticket)
        for i, w in enumerate(batches):
            lookups = [each[i] for each in placed]
            planned = Planned(w.named.ids, w.named.bags, w.given, lookups, w.named.contents)
            window.batches.append((w.batch, planned))
        self._decided.append(window)
