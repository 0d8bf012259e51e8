"""Planning by replaying recordings (cache/recorded_planner.py), one for each group.

On CUDA, for batches of any size up to a capacity: single ids, bags, or both. A batch is described by numbers in device memory
(tables/descriptions.py), so batches of other sizes replay the same recordings. One that is too large gets a planner of more
capacity, and so do those that follow. Rows in host memory are moved by compiled code; where a group's are on an ssd, by the
transfer thread, which reads any store.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from hotbed.ops.backend import backend_of
from hotbed.ops.inputs import Capacity, Description
from hotbed.ops.lookups import Lookups, Ticket
from hotbed.pipeline.batches import Ids
from hotbed.pipeline.planner import Candidate, KnownBatch, OpenWindow, PlannedWindow, Transfer
from hotbed.pipeline.transfer_thread import TransferThread
from hotbed.tables.descriptions import BatchParts, GroupDescriber, Kinds, capacity_for, why_not_described
from hotbed.tables.group.cached import CachedRows, Fetch
from hotbed.tables.inputs import BatchInputs, flatten, read_inputs
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.ownership import PreparedBatch

if TYPE_CHECKING:
    from hotbed.cache.recorded_planner import BatchSlots, RecordedPlan
    from hotbed.ops.move.compiled_transfer import CompiledTransfer

_MOST_KEPT = 4  # planners that the next feed finds again; each takes device memory
CELLS_FACTOR = 1.6  # cells of an index for every key that it may hold
CELLS_PER_KEY = 0.6  # of the batches ahead, keys that are no other's and in no slot: a first guess


def why_not_recorded(tables: EmbeddingTables) -> str | None:
    """Why no batch of these tables can have a recorded planner; None where it can."""
    if not tables.caches or backend_of(tables.caches[0].records) != "triton":
        return "there is no cache on a CUDA device"
    if not tables.ownership.records:
        return "recording was stopped"
    reasons = (group.why_not_recorded for group in tables.caches)
    return next((reason for reason in reasons if reason is not None), why_not_described(tables.features))


def recorded_for(
    tables: EmbeddingTables, batch: BatchParts, window: int, too_small: RecordedPlanner | None
) -> RecordedPlanner:
    """A planner that holds this batch, and what one that was too small holds; those used last are kept.

    That of an earlier feed, with its recordings, or a new one.
    """
    kept: list[RecordedPlanner] = tables.ownership.planners
    kept[:] = [planner for planner in kept if planner.busy or planner.serves(tables)]
    fitting = (p for p in reversed(kept) if not p.busy and p.window == window and p.holds(batch))
    found = next((p for p in fitting if too_small is None or p.replaces(too_small)), None)
    if found is None:
        found = RecordedPlanner(tables, batch, window, None if too_small is None else too_small.capacities)
        kept[:] = [planner for planner in kept if planner.busy or not found.replaces(planner)]
    else:
        kept.remove(found)
    kept.append(found)
    for old in kept[:-_MOST_KEPT]:
        if not old.busy:
            kept.remove(old)
    return found


class GroupWindow(NamedTuple):
    """A planned window of one group."""

    number: int
    plan: RecordedPlan
    num_batches: int
    num_lookups: int


class RecordedTransfer:
    """Rows that a compiled transfer of each group moves."""

    waits = False  # the exchange is put on the stream behind the rows
    holds_memory = False  # staging buffers are kept from feed to feed

    def __init__(
        self, groups: Sequence[CachedRows], transfers: Sequence[CompiledTransfer], windows: Sequence[GroupWindow]
    ) -> None:
        self._groups, self._transfers, self._windows = groups, transfers, windows

    @property
    def is_staged(self) -> bool:
        return all(transfer.is_staged(window.number) for transfer, window in zip(self._transfers, self._windows))

    def wait(self) -> None:
        """`exchange` does."""

    def exchange(self) -> None:
        for group, transfer, window in zip(self._groups, self._transfers, self._windows):
            group.exchange_with(transfer, *window)


class RecordedPlanner:
    """For batches of some kinds of features, up to a capacity."""

    takes_along = finds_late = True
    begins_early = False  # each planned window has buffers of its own, and there are few

    def __init__(
        self, tables: EmbeddingTables, batch: BatchParts, window: int, at_least: Sequence[Capacity] | None = None
    ) -> None:
        """For batches like this one, and smaller ones; with `at_least` that capacity by group."""
        self._tables = weakref.proxy(tables)  # whose ownership record keeps this
        self.kinds: Kinds = batch.kinds
        self.window = window
        self.learns = True  # whether rows will be updated
        self._groups = tables.caches
        names = [feature.name for feature in tables.features]
        groups = zip(tables.groups, tables.group_inputs)
        self._describers = [GroupDescriber(group, inputs, names, batch.kinds) for group, inputs in groups]
        before = [Capacity(0, 0)] * len(self._groups) if at_least is None else at_least
        self.capacities = [
            capacity_for(describer.describe(batch, False), batch.varies, capacity)
            for describer, capacity in zip(self._describers, before)
        ]
        self._nothing = torch.empty(0, 0, dtype=torch.int64, device=tables.device)
        self._recorded_caches, self._inputs = [], []
        self._transfers: list[CompiledTransfer] = []
        self.thread: TransferThread | None = None  # of the feed; moves the rows where no compiled code can
        is_compiled = all(group.has_array for group in self._groups)
        self.busy = False  # between start and stop
        for group, describer, capacity in zip(self._groups, self._describers, self.capacities):
            recorded, inputs = group.new_recorded_cache(describer.layout, capacity, window)
            self._recorded_caches.append(recorded)
            self._inputs.append(inputs)
            if is_compiled:
                self._transfers.append(group.new_transfer(recorded))

    def holds(self, batch: BatchParts) -> bool:
        """Whether it has room for a batch."""
        return batch.kinds == self.kinds and self.describe(batch) is not None

    def replaces(self, other: RecordedPlanner) -> bool:
        """Whether it takes every batch that the other takes."""
        same = self.kinds == other.kinds and self.window == other.window
        return same and all(
            ours.num_lookups >= theirs.num_lookups and ours.num_samples >= theirs.num_samples
            for ours, theirs in zip(self.capacities, other.capacities)
        )

    def describe(self, batch: BatchParts) -> list[Description] | None:
        """A batch of these kinds, for each group; None for one that is too large."""
        found = [describer.describe(batch, self.learns) for describer in self._describers]
        return found if all(map(Capacity.holds, self.capacities, found)) else None

    def serves(self, tables: EmbeddingTables) -> bool:
        """Whether it still belongs to the tables' caches: loading rows makes new ones."""
        return all(recorded.serves(group.cache) for recorded, group in zip(self._recorded_caches, self._groups))

    def start(self) -> None:
        self.busy = True
        for inputs in self._inputs:
            inputs.clear()  # a bad id ended the feed before
        for transfer, recorded in zip(self._transfers, self._recorded_caches):
            transfer.start(recorded.num_windows)

    def stop(self) -> None:
        self.busy = False
        for transfer in self._transfers:
            transfer.stop()

    abandon = stop

    def prepare(self, candidate: Candidate) -> KnownBatch:
        size = candidate.ids[0].num_samples
        given = BatchInputs(size, self._nothing, {}, {}, {})  # of pooled features nothing else is asked for
        return KnownBatch(candidate.batch, candidate.named, given, self, candidate.ids, None)

    def arrive(self, batch: KnownBatch) -> KnownBatch:
        numbers = [recorded.arrive(each) for recorded, each in zip(self._recorded_caches, batch.ids)]
        return batch._replace(place=numbers[0])

    def num_keys(self, batch: KnownBatch) -> list[int]:
        return [recorded.num_keys(batch.place) for recorded in self._recorded_caches]

    def reserve(self, look_ahead: int) -> None:
        for group, recorded in zip(self._groups, self._recorded_caches):
            if group.cache.bounded:
                continue  # it has its room
            ahead = look_ahead * recorded.num_keys(group.cache.num_arrived - 1)
            group.cache.reserve(int(CELLS_FACTOR * (group.num_slots + CELLS_PER_KEY * ahead)))

    @property
    def may_have_bad_ids(self) -> bool:
        """Whether a kernel has seen one in any batch that has arrived. Those whose counts are on the host are known."""
        return any(inputs.found_bad for inputs in self._inputs)

    def check(self, batch: KnownBatch | PreparedBatch) -> None:
        named = batch.named if isinstance(batch, KnownBatch) else batch
        for lookups in self._flatten(named):
            if lookups.check is not None:
                lookups.check()

    def begin(self, batches: list[KnownBatch]) -> OpenWindow:
        return OpenWindow(batches, self, [])  # all of it is one replay, in `finish`

    def is_ready(self, window: OpenWindow) -> bool:
        return True

    def finish(self, window: OpenWindow, ticket: Ticket, arriving: Sequence[Candidate]) -> PlannedWindow:
        batches, number = window.batches, self._groups[0].cache.num_arrived
        windows, placed = [], []
        for g, recorded in enumerate(self._recorded_caches):
            plan, rows = recorded.plan(len(batches), [candidate.ids[g] for candidate in arriving])
            num_lookups = sum(batch.ids[g].num_lookups for batch in batches)
            windows.append(GroupWindow(plan.number, plan, len(batches), num_lookups))
            placed.append([self._lookups(g, row, batch, ticket) for row, batch in zip(rows, batches)])
        arrived = [self.prepare(candidate)._replace(place=number + i) for i, candidate in enumerate(arriving)]
        return PlannedWindow(self._transfer(windows), placed, arrived)

    def _transfer(self, windows: list[GroupWindow]) -> Transfer:
        if self._transfers:
            return RecordedTransfer(self._groups, self._transfers, windows)
        assert self.thread is not None, "a feed lends its transfer thread"
        fetches = [Fetch(window.plan, window.num_batches, window.num_lookups) for window in windows]
        return self.thread.transfer(list(zip(self._groups, fetches)))

    def drain(self) -> None:
        for transfer in self._transfers:
            transfer.drain()

    def forget(self) -> None:
        for recorded in self._recorded_caches:
            recorded.forget()

    def _lookups(self, g: int, row: BatchSlots, batch: KnownBatch, ticket: Ticket) -> Lookups:
        named = batch.named
        return (
            self._describers[g]
            .lookups(batch.ids[g], row.slots)
            ._replace(
                starts=row.starts,
                out_row=row.out_row,
                scale=row.scale,
                sorted_keys=row.sorted_keys,
                order=row.order,
                ticket=ticket,
                renew=lambda: self._flatten(named)[g],
            )
        )

    def _flatten(self, named: Ids | PreparedBatch) -> list[Lookups]:
        given = read_inputs(self._tables.features, named.ids, named.bags, self._tables.device)
        groups = zip(self._tables.groups, self._tables.group_inputs)
        return [flatten(group, inputs, given) for group, inputs in groups]
