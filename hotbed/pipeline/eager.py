"""Planning launch by launch, for every kind of batch; rows are moved by a thread (transfer_thread.py), or directly on a CPU.

The CPU's way and the reference, and CUDA's way for batches that no recording fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hotbed.ops.lookups import Ticket
from hotbed.pipeline.planner import Candidate, KnownBatch, OpenWindow, PlannedWindow
from hotbed.pipeline.transfer_thread import KeysAhead, TransferThread, Wait
from hotbed.store.memory_tier import Ints
from hotbed.tables.group.cached import CachedRows
from hotbed.tables.group.fetch import Fetch
from hotbed.tables.inputs import flatten, read_inputs
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.ownership import PreparedBatch, RoutedBatch


class DirectTransfer:
    """Rows that the training thread moves between two windows, from memory to memory: the second copy of staging is saved."""

    waits = holds_memory = False
    is_staged = True

    def __init__(self, fetches: list[Fetch]) -> None:
        self._fetches = fetches

    def wait(self) -> None:
        """There is nothing to wait for."""

    def exchange(self) -> None:
        for fetch in self._fetches:
            fetch.exchange()


def _same(keys: Ints, wait: Wait) -> Ints:
    return keys


class EagerPlanner:
    """For every kind of batch, also of ranks that settle theirs together."""

    takes_along = finds_late = False
    begins_early = True  # the device looks for the rows meanwhile
    may_have_bad_ids = True  # the device may still be checking them

    def __init__(self, tables: EmbeddingTables, groups: Sequence[CachedRows]) -> None:
        self._tables = tables
        self._groups = groups
        self._device = tables.device
        self._changes = tables.ownership.changes
        self.learns = True  # whether rows will be updated
        self._tiered = [group.store.tiered for group in groups]
        self.thread = TransferThread(tables.device, [store for store in self._tiered if store is not None])

    @property
    def error(self) -> BaseException | None:
        """What ended the transfers; no rows are moved from then on."""
        return self.thread.error

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.thread.close()

    def abandon(self) -> None:
        self.thread.abandon()

    def prepare(self, candidate: Candidate) -> KnownBatch:
        batch, named = candidate.batch, candidate.named
        if isinstance(batch, RoutedBatch):
            with self._changes.changing("translating ids"):
                lookups = batch.lookups(self.learns)
            return KnownBatch(batch, named, batch.given, self, lookups, None)
        given = read_inputs(self._tables.features, named.ids, named.bags, self._device)
        groups = zip(self._tables.groups, self._tables.group_inputs)
        with self._changes.changing("translating ids"):
            lookups = [flatten(group, inputs, given, self.learns) for group, inputs in groups]
        return KnownBatch(batch, named, given, self, lookups, None)

    def arrive(self, batch: KnownBatch) -> KnownBatch:
        places = [group.arrive(each) for group, each in zip(self._groups, batch.ids)]
        ahead = [
            KeysAhead(store, partial(_same, new_keys), group.cache.num_arrived - group.cache.num_planned - 1)
            for group, store, place in zip(self._groups, self._tiered, places)
            if store is not None and (new_keys := place.arrival.arrived.new_keys) is not None
        ]
        if ahead:
            self.thread.foresee(ahead)
        return batch._replace(place=places)

    def num_keys(self, batch: KnownBatch) -> list[int]:
        return [ahead.arrival.num_keys for ahead in batch.place]

    def reserve(self, look_ahead: int) -> None:
        """The index grows as batches arrive."""

    def check(self, batch: KnownBatch | PreparedBatch) -> None:
        for lookups in batch.ids if isinstance(batch, KnownBatch) else batch.lookups:
            lookups.check_ids()

    def begin(self, batches: list[KnownBatch]) -> OpenWindow:
        decisions = [
            group.begin([batch.place[g] for batch in batches], self.learns) for g, group in enumerate(self._groups)
        ]
        for group in self._groups:
            group.cache.counters.publish()
        return OpenWindow(batches, self, decisions)

    def is_ready(self, window: OpenWindow) -> bool:
        return all(decision.row.ready() for decision in window.decisions)

    def finish(self, window: OpenWindow, ticket: Ticket, arriving: Sequence[Candidate]) -> PlannedWindow:
        assert not arriving, "batches are made known one by one"
        fetches, placed = [], []
        for g, (group, decision) in enumerate(zip(self._groups, window.decisions)):
            fetch, lookups = group.finish([batch.place[g] for batch in window.batches], decision, ticket)
            fetches.append(fetch)
            placed.append(lookups)
        if all(group.is_direct for group in self._groups):
            return PlannedWindow(DirectTransfer(fetches), placed, [])
        return PlannedWindow(self.thread.transfer(fetches), placed, [])

    def drain(self) -> None:
        self.thread.drain()

    def forget(self) -> None:
        """Nothing: only the cache knows of the batches."""
