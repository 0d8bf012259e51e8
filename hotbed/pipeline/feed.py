"""The overlapped loop: batches are known, planned and fetched while earlier ones train.

    reader (thread)     loader -> batches on the device
    training thread     batch n + look_ahead is made known; window n + 2 is planned; window n trains
    transfer (thread)   window n + 1, n + 2: rows read from the store; window n: victims written to it

Between two windows, on the training stream, the victims of the next leave their slots and its misses take them: two short
kernels over rows that are already on the device. So planning a window need keep no rows but its own, and the rows that are
in flight cost the policy nothing.

Planning runs on the training thread and stream, a little at every batch: it only starts kernels, and a second thread that did
so would spend its time passing Python's lock to and fro. It never waits for the device. How a batch is planned and how its rows
are moved is its planner's business (planner.py; choice.py says whose): recorded on CUDA where it can be, else launch by launch.

The plain way (`CachedRows.placed`) runs the same steps one after the other.

Every step that moves rows or changes an index is one change (transaction.py). In between, a feed may be left at any point by an
exception: `close` then carries out what was decided, and if it is interrupted itself, the next call of the tables does.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hotbed.cache import MOST_AHEAD, MOST_BATCHES, Cache, window_length
from hotbed.errors import HotbedError
from hotbed.host.devices import check_current
from hotbed.ops.lookups import Ticket
from hotbed.ops.streams import mark
from hotbed.pipeline.batches import IdFinder, take_over, to_device
from hotbed.pipeline.choice import PlannerChoice
from hotbed.pipeline.eager import EagerPlanner
from hotbed.pipeline.ids_ahead import BatchAhead, IdReader, reads_ahead
from hotbed.pipeline.planner import Candidate, KnownBatch, OpenWindow, PlannedWindow, Planner, RefusalGuard, Window
from hotbed.pipeline.reader import MOST_SHARED, Reader
from hotbed.pipeline.recorded import why_not_recorded
from hotbed.tables.group.dynamic import FAR_AHEAD
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.ownership import PreparedBatch, RoutedBatch
from hotbed.telemetry.clock import COPY, PLAN, READER, WAIT

_DECIDED = 2  # windows whose rows are fetched ahead


class Feed:
    """Batches of one pass over a loader, each with its rows in place when it is handed out."""

    def __init__(
        self,
        loader: Iterable[Any],
        tables: EmbeddingTables,
        window: int | None,
        look_ahead: int | None,
        ids: Callable[[Any], Any] | None = None,
    ) -> None:
        self._tables = tables
        self._device = tables.device
        self._clock = tables.clock
        self.changes = tables.ownership.changes
        self._given_window = window
        self._given_look_ahead = None if look_ahead is None else max(look_ahead, window or 1)
        self._look_ahead = 1  # until the first batch is known
        self._find_ids = IdFinder([feature.name for feature in tables.features], ids)
        self._cached = tables.caches
        self._ids = [group.keyspace for group in self._cached if group.keyspace.is_dynamic]
        self._most_ahead, self._num_delivered = MOST_AHEAD, 0  # the latter since batches were last taken back
        self._learns = True
        self._owner, self.process = threading.current_thread(), os.getpid()  # who trains
        self._caches: list[Cache] = []  # that know of the batches ahead
        self._strides: list[int] = []
        self._stage = tables.exchange.new_stage()  # of ranks that settle their batches together
        read_ids = (
            IdReader(tables, self._find_ids).read if reads_ahead(tables) and why_not_recorded(tables) is None else None
        )
        self._reader = Reader(loader, self._device, None if self._stage is None else self._settle_with_ranks, read_ids)
        self._eager = EagerPlanner(tables, self._cached)
        self._choice = PlannerChoice(tables, self._eager, window)
        self._planner: Planner = self._eager  # of the window planned last
        self._waiting: deque[KnownBatch] = deque()
        self._open: OpenWindow | None = None
        self._decided: deque[Window] = deque()
        self._current: Window | None = None
        self._unknown: deque[tuple[Any, Any, Any]] = deque()  # (batch, mark, ids read ahead): not known to the caches
        self.offered: tuple[Any, ...] = ()  # the batch that `next` gave, until the caller has handed it out
        self._untrained: list[Any] | None = None  # batches in hand when the feed was left
        self._started = self._paused = self._rearrive = False
        self._retired: deque[tuple[Any, Any]] = deque()  # device memory that the training stream may still read
        self._waits: deque[tuple[Any, Any]] = deque()  # marks around the waits of the training stream

    @property
    def stream(self) -> Iterable[Any] | None:
        """The loader, if it has one pass only."""
        return self._reader.stream

    def start(self) -> None:
        check_current(self._device)
        self._owner, self.process = threading.current_thread(), os.getpid()
        self._learns = self._tables.learns and torch.is_grad_enabled()
        self._eager.learns = self._learns
        self._eager.start()
        with self.changes.lock:
            self._tables.ownership.take(self)
            for group in self._cached:
                group.revoke_lease()  # a batch that was looked up before this and is not updated yet
            self._caches = [group.cache for group in self._cached]
        self._reader.start()

    def next(self) -> tuple[Any, ...]:
        """(the next batch,), or () at the end."""
        try:
            return self._awaited()
        except HotbedError as error:
            if error is not self._reader.error:  # of which other ranks know
                self._tables.exchange.refuse_batch(error)
            raise

    def _awaited(self) -> tuple[Any, ...]:
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
            if self._eager.error is not None:
                raise self._break(self._eager.error)
            self._leave()
            window = self._enter()
            if window is None:
                return () if self._has_ended else None
        if not self._paused:
            self._plan(wanted=False)
        batch, planned = window.batches[0]
        self._reader.contents.check(batch)
        self._reader.contents.forget(batch)
        window.delivered.append(planned)
        self._tables.ownership.deliver(planned)
        self._num_delivered += 1
        found = (batch.batch if isinstance(batch, RoutedBatch) else batch,)
        self.offered = (batch,)
        del window.batches[0]  # no call between the two: no interrupt comes there
        return found

    def close(self) -> None:
        """Let nothing be lost: what was decided is carried out, what was only known is forgotten."""
        self._reader.stop()
        self._tables.ownership.left.append(self)  # until it is done: the next caller finishes it
        owns = threading.current_thread() is self._owner or not self._owner.is_alive()
        if owns and not self.changes.is_inside:
            self.finish()  # else garbage collected by some other thread, or amid a change: rows must not be moved now

    def finish(self) -> None:
        """The rest of `close`; may be interrupted, and called again."""
        with self.changes.lock:
            if self._untrained is None:
                self._untrained = self._in_hand()
            if self._eager.error is not None:
                self._break(self._eager.error)
            self._leave()
            failure = self._carry_out()
            if self._device.type == "cuda" and not self.changes.is_broken:
                mark(self._device).synchronize()  # the next feed takes our streams, and their memory may still be read
            self._tables.ownership.leave(self)
        self._reader.close(self._untrained)
        for planner in self._planners:
            planner.stop()
        if self._stage is not None and self._reader.has_ended:
            stage, self._stage = self._stage, None
            stage.close()
        self._tables.ownership.forget(self)
        if failure is not None:
            raise failure

    def _carry_out(self) -> Exception | None:
        """Do what was decided, at the end. What broke the tables meanwhile: threads and their memory go all the same."""
        if self._tables.ownership.feed is self and not self.changes.is_broken:
            try:
                self.pause(drop=True)
            except Exception as error:
                if self.changes.broken is None:
                    raise
                return error
        return None

    def _in_hand(self) -> list[Any]:
        """Batches that were read and not handed out, in order."""
        windows = [window for window in (self._current, *self._decided) if window is not None]
        batches = [*self.offered, *(batch for window in windows for batch, _ in window.batches)]
        if self._open is not None:
            batches += [waiting.batch for waiting in self._open.batches]
        return [*batches, *(waiting.batch for waiting in self._waiting), *(batch for batch, _, _ in self._unknown)]

    def abandon(self) -> None:
        """The process ends: rows that are not saved are lost anyway."""
        self._reader.abandon()
        for planner in self._planners:
            planner.abandon()

    def pause(self, *, drop: bool) -> None:
        """Carry out what was decided, so that slots are as the index says, and revoke all tickets."""
        self._paused = True
        if self._open is not None:
            self._decide(take_along=False)
        for window in (self._current, *self._decided):
            if window is not None:
                self._exchange(window)
                window.ticket.valid = False
        self._drain()
        if drop:
            with self.changes.changing("dropping the batches ahead"):
                self._drop_ahead()

    def _drop_ahead(self) -> None:
        """No cache knows of the batches ahead: part of a change."""
        for planner in self._planners:
            planner.forget()
        for group in self._cached:
            group.cache.drop_ahead()
        self._rearrive = True
        if self._ids:
            self._take_back()

    def _take_back(self) -> None:
        """Dynamic ids of batches ahead are forgotten, and translated again when they are planned.

        A caller that takes them back at every batch would have them translated again and again: then few are looked at ahead.
        """
        windows = [window for window in (self._current, *self._decided) if window is not None]
        ahead = [(batch, None, planned.ahead) for window in windows for batch, planned in window.batches]
        ahead += [(waiting.batch, None, waiting.named.ahead) for waiting in self._waiting]
        self._unknown.extendleft(reversed(ahead))
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
            for planner in self._planners:
                planner.drain()
        except Exception as error:
            self.changes.broken = error
            raise

    def _resume(self) -> None:
        for group in self._cached:
            group.revoke_lease()
        with self.changes.changing("making batches known again"):
            if any(group.cache is not cache for group, cache in zip(self._cached, self._caches)):
                self._begin_anew()
            elif self._rearrive:
                for cache, stride in zip(self._caches, self._strides):
                    cache.stride = stride  # another feed may have had a shorter look-ahead
                self._waiting = deque([waiting.planner.arrive(waiting) for waiting in self._waiting])
            self._paused = self._rearrive = False

    def _begin_anew(self) -> None:
        """Rows were loaded or moved, and some caches are others: nothing is known to them, nor to the rest from here on."""
        self._drop_ahead()
        self._caches = [group.cache for group in self._cached]
        self._unknown.extendleft((waiting.batch, None, waiting.named.ahead) for waiting in reversed(self._waiting))
        self._waiting.clear()
        self._look_ahead = 1
        self._choice.begin_anew()
        self._planner = self._eager

    @property
    def _planners(self) -> list[Planner]:
        return self._choice.planners

    def _break(self, error: BaseException) -> BaseException:
        """A copy failed: rows on their way may be lost."""
        self.changes.broken = error
        return error

    def _leave(self) -> None:
        """Everything the training thread wanted of the current window is launched."""
        window, self._current = self._current, None
        if window is None:
            return
        window.ticket.valid = False
        for planned in window.delivered:
            self._tables.ownership.withdraw(planned)
        self._retire(window)
        while self._waits and self._waits[0][1].query():
            before, until = self._waits.popleft()
            self._cached[0].stalled(before.elapsed_time(until) / 1e3)

    def _retire(self, window: Window) -> None:
        """Keep the memory of a window until the device is past it."""
        if self._device.type == "cuda" and (self._tables.is_shared or window.transfer.holds_memory):
            self._retired.append((mark(self._device), window))
            while self._retired and self._retired[0][0].query():
                self._retired.popleft()

    def _enter(self) -> Window | None:
        """The next window, its rows in their slots."""
        self._tables.ownership.take(self)
        if self._ids and any(ids.num_ahead > FAR_AHEAD for ids in self._ids):
            self.pause(drop=True)  # batches that were handed out are kept and not trained
        if self._paused and not self._decided:
            self._resume()
        while not self._decided:
            if not self._plan(wanted=True):
                return None
        window = self._decided[0]
        waits = self._started and not window.exchanged and not window.transfer.is_staged
        began, before = time.perf_counter(), mark(self._device, timed=True) if waits else None
        self._exchange(window, before)
        if waits and before is None:
            self._cached[0].stalled(time.perf_counter() - began)
        self._started = True  # nothing can be fetched ahead of the first
        self._current = self._decided.popleft()
        return window

    def _exchange(self, window: Window, before: Any = None) -> None:
        """Victims leave, misses come; on the current stream, after all that the windows before launched."""
        if window.exchanged:
            return
        transfer = window.transfer
        if transfer.waits:
            part = self._clock.enter(WAIT)
            transfer.wait()
            self._clock.enter(COPY)
        else:
            part = self._clock.enter(COPY)
        with self.changes.changing("an exchange of rows"):
            window.exchanged = True
            transfer.exchange()
        self._clock.enter(part)
        if before is not None:
            self._waits.append((before, mark(self._device, timed=True)))

    def _plan(self, *, wanted: bool) -> bool:
        """Work ahead, as far as the loader has come; whether a window is decided. `wanted`: one that was begun is, in any case.

        Which batches a decision knows of depends on their order alone: none arrives between its beginning and its end.
        """
        if self._open is not None and (wanted or self._can_decide(self._open)):
            self._decide()
        if self._open is None:
            self._know()
            if self._paused:
                if self._current is not None or self._decided:
                    return bool(self._decided)
                self._resume()
            if len(self._waiting) >= self._look_ahead or (self._waiting and (self._has_ended or self._is_full)):
                planner = self._waiting[0].planner
                if planner is not self._planner:
                    if self._decided or not wanted:
                        return bool(self._decided)
                    self._drain()  # rows are moved by another thread from here on
                    self._planner = planner
                    self._choice.retire(planner)
                if planner.begins_early or len(self._decided) < _DECIDED:
                    self._open = self._begin(planner)
                    if self._can_decide(self._open):
                        self._decide()
        if wanted and not self._decided and self._open is not None:
            self._decide()
        return bool(self._decided)

    def _can_decide(self, window: OpenWindow) -> bool:
        """Whether there is room for one more window, without waiting."""
        return len(self._decided) < _DECIDED and window.planner.is_ready(window)

    @property
    def _has_ended(self) -> bool:
        """Whether every batch is known."""
        return self._reader.ended and not self._unknown

    def _know(self) -> None:
        """Let batches arrive until as many are ahead as allowed, or the loader has no more yet."""
        while len(self._waiting) < self._look_ahead and not (self._waiting and self._is_full):
            all_trained = not (self._waiting or self._decided or self._current)
            found = self._read(wanted=all_trained)
            if found is None:
                return
            with RefusalGuard(self._unknown):
                batch = found.planner.prepare(found)
            if self._ids:
                self._make_way()
            with self.changes.changing("making a batch known"):
                batch = found.planner.arrive(batch)
                self._waiting.append(batch)
                del self._unknown[0]
            if self._look_ahead == 1:
                self._see_how_far(batch)

    @property
    def _is_full(self) -> bool:
        """Whether an index has no room for a batch more, which comes when batches have more rows than the first had."""
        return any(cache.index.is_full for cache in self._caches)

    def _settle_with_ranks(self, batches: Iterator[Any]) -> Iterator[RoutedBatch]:
        """Batches that the ranks have settled together."""
        assert self._stage is not None, "ranks settle their batches as long as the feed is open"
        return self._stage.settle(self._named(batches))

    def _named(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any, Any]]:
        """(batch, ids, bags), on the device."""
        for batch in loader:
            moved = to_device(batch, self._device)
            named = self._find_ids(moved)
            yield moved, named.ids, named.bags

    def _read(self, *, wanted: bool = False) -> Candidate | None:
        """The next batch of the loader, if it is there.

        `wanted`: all batches before it are trained. It is the first of those not known until it is taken from there.
        """
        if not self._unknown:
            found = self._from_reader(wanted=wanted)
            if found is None:
                return None
            self._unknown.append(found)
        with RefusalGuard(self._unknown):
            return self._candidate(*self._unknown[0])

    def _candidate(self, batch: Any, point: Any, ahead: BatchAhead | None) -> Candidate:
        """A batch that was read, its ids, and who will plan it."""
        take_over(batch, self._device, point)
        named = self._find_ids(batch.batch if isinstance(batch, RoutedBatch) else batch)
        if ahead is not None and ahead.is_of(named):
            named = named._replace(ahead=ahead)
        return self._choice.choose(batch, named)

    def _from_reader(self, *, wanted: bool = False) -> tuple[Any, Any, Any] | None:
        num_ready = self._reader.num_ready
        if num_ready:
            self._clock.count_ready(num_ready)
        return self._reader.get(wait=False, wanted=wanted)

    def _see_how_far(self, batch: KnownBatch) -> None:
        """The first batch decides how far to look ahead."""
        found = [
            group.cache.look_ahead(num_keys, self._given_look_ahead)
            for group, num_keys in zip(self._cached, batch.planner.num_keys(batch))
        ]
        self._look_ahead = min(*found, self._most_ahead)
        if self._tables.is_shared:
            self._look_ahead = min(self._look_ahead, MOST_SHARED)
        self._strides = [cache.stride for cache in self._caches]
        batch.planner.reserve(self._look_ahead)

    def _next_batches(self, planner: Planner) -> list[KnownBatch]:
        """The batches of the next window: of one planner, and no more than every group can hold. They stay pending."""
        most: list[KnownBatch] = []
        for waiting in self._waiting:
            if len(most) == (self._given_window or MOST_BATCHES) or waiting.planner is not planner:
                break
            most.append(waiting)
        length = len(most)
        for group, num_keys in zip(self._cached, zip(*(planner.num_keys(waiting) for waiting in most))):
            length = min(length, window_length(num_keys, group.num_slots, self._given_window, group.most_staged))
            with RefusalGuard(self._waiting):
                if num_keys[0] > group.num_slots:
                    group.refuse_batch(num_keys[0])
                group.check_staging(num_keys[0])
        return most[:length]

    def _begin(self, planner: Planner) -> OpenWindow:
        """The next window, its rows looked for."""
        batches = self._next_batches(planner)
        if planner.may_have_bad_ids:
            self._check(planner, batches)
        with self.changes.changing("planning a window"):
            window = planner.begin(batches)
            self._open = window
            for _ in batches:
                self._waiting.popleft()
        return window

    def _check(self, planner: Planner, batches: list[KnownBatch]) -> None:
        """Raise for a bad id; also for one in an earlier batch, where it was seen late."""
        if planner.finds_late:
            windows = [window for window in (self._current, *self._decided) if window is not None]
            for window in windows:
                for planned in (*window.delivered, *(planned for _, planned in window.batches)):
                    planner.check(planned)
        for place, batch in enumerate(batches):
            with RefusalGuard(self._waiting, place):
                planner.check(batch)

    def _decide(self, *, take_along: bool = True) -> None:
        """Choose slots for the window that was begun, and send for its rows."""
        window = self._open
        assert window is not None
        planner = window.planner
        arriving = self._as_many_new(planner, len(window.batches)) if take_along and planner.takes_along else []
        ticket = Ticket(self._learns)
        with self.changes.changing("planning a window"):
            self._open = None
            planned = planner.finish(window, ticket, arriving)
            for _ in arriving:
                del self._unknown[0]
            self._waiting.extend(planned.arrived)
            self._line_up(window.batches, planned, ticket)

    def _as_many_new(self, planner: Planner, count: int) -> list[Candidate]:
        """The next batches of the loader, if they are there and the planner's: all or none. They are not known until later."""
        if len(self._waiting) + count > self._look_ahead:
            return []
        while len(self._unknown) < count:
            found = self._from_reader()
            if found is None:
                return []
            self._unknown.append(found)
        new: list[Candidate] = []
        for i in range(count):
            candidate = self._candidate(*self._unknown[i])
            if candidate.planner is not planner:
                return []
            new.append(candidate)
        return new

    def _line_up(self, batches: list[KnownBatch], planned: PlannedWindow, ticket: Ticket) -> None:
        window = Window(planned.transfer, ticket)
        for i, each in enumerate(batches):
            lookups, named = [placed[i] for placed in planned.placed], each.named
            prepared = PreparedBatch(named.ids, named.bags, each.given, lookups, named.contents, named.ahead)
            window.batches.append((each.batch, prepared))
        self._decided.append(window)
