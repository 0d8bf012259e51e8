"""Planning by replaying recordings (cache/recorded_planner.py), one for each group.

On CUDA, for batches of any size up to a capacity. A batch is described by numbers in device memory (encodings.py), so batches
of other sizes replay the same recordings. One that is too large gets a planner of more capacity, and so do those that follow.
Rows in host memory are moved by compiled code, also over an ssd, once the transfer thread has found their slots there.
Temporary rows (of dynamic ids that an evaluation does not know), and all where memory is small, are moved by that thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hotbed.ops.backend import backend_of
from hotbed.ops.inputs import Capacity
from hotbed.ops.lookups import BatchSlots, Lookups, Ticket
from hotbed.pipeline.encodings import BatchEncoding
from hotbed.pipeline.planner import Candidate, KnownBatch, OpenWindow, PlannedWindow, Transfer
from hotbed.pipeline.transfer_thread import KeysAhead, TransferThread, WindowSlots
from hotbed.store.tier_windows import TierWindows
from hotbed.tables.descriptions import capacity_for
from hotbed.tables.group.cached import CachedRows
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.ownership import PreparedBatch

if TYPE_CHECKING:
    from hotbed.cache.recorded_planner import RecordedPlan
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
    return "rows are spread over ranks" if tables.is_shared else None


def recorded_for(
    tables: EmbeddingTables,
    encoding: BatchEncoding,
    need: Sequence[Capacity],
    window: int,
    varies: bool,
    least: Sequence[Capacity],
) -> RecordedPlanner:
    """A planner that holds batches with these needs by group, and at least what is given; those used last are kept.

    That of an earlier feed, with its recordings, or a new one.
    """
    kept: list[RecordedPlanner] = tables.ownership.planners
    kept[:] = [planner for planner in kept if planner.busy or planner.serves(tables)]
    alike = [p for p in kept if not p.busy and p.encoding.kinds == encoding.kinds and p.window == window]
    found = next((p for p in reversed(alike) if p.holds(need) and p.holds(least)), None)
    if found is None:
        capacities = [capacity_for(each, varies, before) for each, before in zip(need, least)]
        found = RecordedPlanner(tables, encoding, capacities, window)
        for planner in alike:
            if found.holds(planner.capacities):
                kept.remove(planner)
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
    """Rows that a compiled transfer of each group moves; over an ssd, once they have slots in memory."""

    holds_memory = False  # staging buffers are kept from feed to feed

    def __init__(
        self,
        groups: Sequence[CachedRows],
        transfers: Sequence[CompiledTransfer],
        windows: Sequence[GroupWindow],
        slots: tuple[TransferThread, WindowSlots] | None,
    ) -> None:
        self._groups, self._transfers, self._windows = groups, transfers, windows
        self._slots = slots  # and who finds them

    @property
    def waits(self) -> bool:
        return self._slots is not None  # else the exchange is put on the stream behind the rows

    @property
    def is_staged(self) -> bool:
        if self._slots is not None and not self._slots[1].found.is_set():
            return False
        return all(transfer.is_staged(window.number) for transfer, window in zip(self._transfers, self._windows))

    def wait(self) -> None:
        """For slots; `exchange` waits for the rows."""
        if self._slots is not None:
            thread, slots = self._slots
            thread.wait_for_slots(slots)

    def exchange(self) -> None:
        for group, transfer, window in zip(self._groups, self._transfers, self._windows):
            group.exchange_with(transfer, *window)


class RecordedPlanner:
    """For batches of one encoding, up to a capacity by group."""

    begins_early = False  # each planned window has buffers of its own, and there are few

    def __init__(
        self, tables: EmbeddingTables, encoding: BatchEncoding, capacities: Sequence[Capacity], window: int
    ) -> None:
        self.encoding = encoding
        self.capacities = capacities
        self.window = window
        self.learns = True  # whether rows will be updated
        self.thread: TransferThread | None = None  # of the feed; moves the rows where no compiled code can
        self.busy = False  # between start and stop
        self._groups = tables.caches
        self._recorded_caches, self._inputs = [], []
        self._transfers: list[CompiledTransfer] = []
        self._tier_windows: list[TierWindows] = []
        for group, layout, capacity in zip(self._groups, encoding.layouts, capacities):
            recorded, inputs = group.new_recorded_cache(layout, capacity, window)
            self._recorded_caches.append(recorded)
            self._inputs.append(inputs)
        if encoding.names_rows and all(group.is_compiled for group in self._groups):
            for group, recorded in zip(self._groups, self._recorded_caches):
                transfer, windows = group.new_transfer(recorded)
                self._transfers.append(transfer)
                if windows is not None:
                    self._tier_windows.append(windows)

    @property
    def takes_along(self) -> bool:
        return self.encoding.is_described_early

    @property
    def finds_late(self) -> bool:
        return self.encoding.is_checked_late

    def holds(self, need: Sequence[Capacity]) -> bool:
        """Whether there is room for this much."""
        return all(map(Capacity.holds, self.capacities, need))

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
        self.abandon()
        if not any(group.changes.is_broken for group in self._groups):  # else rows may be on their way still
            for transfer in self._transfers:
                transfer.release()

    def abandon(self) -> None:
        self.busy = False
        for transfer in self._transfers:
            transfer.stop()

    def prepare(self, candidate: Candidate) -> KnownBatch:
        given, described = self.encoding.prepare(candidate, self.learns)
        return KnownBatch(candidate.batch, candidate.named, given, self, described, None)

    def arrive(self, batch: KnownBatch) -> KnownBatch:
        numbers = [recorded.arrive(each) for recorded, each in zip(self._recorded_caches, batch.ids)]
        self._foresee(numbers[:1])
        return batch._replace(place=numbers[0])

    def num_keys(self, batch: KnownBatch) -> list[int]:
        return [recorded.num_keys(batch.place) for recorded in self._recorded_caches]

    def reserve(self, look_ahead: int) -> None:
        for group, recorded in zip(self._groups, self._recorded_caches):
            if group.cache.index.bounded:
                continue  # it has its room
            ahead = look_ahead * recorded.num_keys(group.cache.num_arrived - 1)
            group.cache.reserve(int(CELLS_FACTOR * (group.num_slots + CELLS_PER_KEY * ahead)))

    @property
    def may_have_bad_ids(self) -> bool:
        """Whether a kernel has seen one in any batch that has arrived. Those whose counts are on the host are known."""
        return not self.encoding.is_checked_late or any(inputs.found_bad for inputs in self._inputs)

    def check(self, batch: KnownBatch | PreparedBatch) -> None:
        self.encoding.check(batch)

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
        transfer = self._transfer(windows)
        self._foresee(range(number, number + len(arriving)))
        return PlannedWindow(transfer, placed, arrived)

    def _transfer(self, windows: list[GroupWindow]) -> Transfer:
        assert self.thread is not None, "a feed lends its transfer thread"
        if self._transfers:
            slots = None
            if self._tier_windows:
                numbers = [window.number for window in windows]
                slots = self.thread, self.thread.find_slots([*zip(self._tier_windows, numbers)], windows[0].num_batches)
            return RecordedTransfer(self._groups, self._transfers, windows, slots)
        fetches = [group.fetch(*window[1:]) for group, window in zip(self._groups, windows)]
        return self.thread.transfer(fetches)

    def _foresee(self, numbers: Sequence[int]) -> None:
        """Let rows of batches that have just arrived be brought to memory."""
        ahead = [
            KeysAhead(
                group.store.tiered,
                partial(recorded.new_keys, number),
                number - group.cache.num_planned,
                partial(recorded.has_new_keys, number),
            )
            for number in numbers
            for group, recorded in zip(self._groups, self._recorded_caches)
            if group.store.tiered is not None
        ]
        if ahead and self.thread is not None:
            self.thread.foresee(ahead)

    def drain(self) -> None:
        for transfer in self._transfers:
            transfer.drain()

    def forget(self) -> None:
        for recorded in self._recorded_caches:
            recorded.forget()

    def _lookups(self, g: int, row: BatchSlots, batch: KnownBatch, ticket: Ticket) -> Lookups:
        return self.encoding.lookups(g, batch, row)._replace(ticket=ticket)
