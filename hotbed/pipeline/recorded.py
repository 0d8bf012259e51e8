"""Planning by replaying recordings (cache/recorded_planner.py), one for each group, and moving rows by compiled code.

For id matrices of one shape on CUDA, over rows in host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hotbed.ops.backend import backend_of
from hotbed.ops.lookups import Lookups, Ticket
from hotbed.pipeline.batches import Ids
from hotbed.pipeline.planner import Candidate, KnownBatch, OpenWindow, PlannedWindow
from hotbed.tables.group.cached import CachedRows
from hotbed.tables.inputs import BatchInputs, flatten, read_inputs
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.ownership import PreparedBatch

if TYPE_CHECKING:
    from hotbed.cache.recorded_planner import RecordedPlan
    from hotbed.ops.move.compiled_transfer import CompiledTransfer

_MOST_KEPT = 4  # shapes of batches whose planner the next feed finds again; each takes device memory
CELLS_FACTOR = 1.6  # cells of an index for every key that it may hold
CELLS_PER_KEY = 0.6  # of the batches ahead, keys that are no other's and in no slot: a first guess


def recorded_for(tables: EmbeddingTables, named: Ids, window: int, learns: bool) -> RecordedPlanner | None:
    """A planner for batches like this one, or None: it needs CUDA, a cache over memory, and one id a feature."""
    ids = named.ids
    alike = (
        isinstance(ids, Tensor) and not named.bags and ids.ndim == 2 and ids.shape[0] > 0 and ids.dtype == torch.int64
    )
    if not alike or backend_of(ids) != "triton" or ids.device != tables.device or ids.shape[1] != len(tables.features):
        return None
    if not tables.caches or not all(group.can_record for group in tables.caches):
        return None
    if any(feature.pooling == "none" for feature in tables.features):
        return None
    return _kept(tables, tuple(ids.shape), window, learns)


def _kept(tables: EmbeddingTables, shape: tuple[int, ...], window: int, learns: bool) -> RecordedPlanner:
    """The planner of an earlier feed, with its recordings, or a new one; those used last are kept."""
    kept, key = tables.ownership.planners, (shape, window, learns)
    if key in kept and kept[key].busy:
        return RecordedPlanner(tables, shape, window, learns)  # another feed will go on with that one
    planner: RecordedPlanner | None = kept.pop(key, None)
    if planner is None or not planner.serves(tables):
        planner = RecordedPlanner(tables, shape, window, learns)
    kept[key] = planner
    for old in list(kept)[:-_MOST_KEPT]:
        if not kept[old].busy:
            del kept[old]
    return planner


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
    """For id matrices of one shape [B, F]."""

    takes_along = finds_late = True
    begins_early = False  # each planned window has buffers of its own, and there are few

    def __init__(self, tables: EmbeddingTables, shape: tuple[int, ...], window: int, learns: bool) -> None:
        self._tables = weakref.proxy(tables)  # whose ownership record keeps this
        self._shape = shape
        self._names = [feature.name for feature in tables.features]
        self._columns_of = {name: column for column, name in enumerate(self._names)}
        self._groups = tables.caches
        self._spans = [inputs.matrix_spans(shape[0]) for inputs in tables.group_inputs]
        self._columns: list[list[int] | None] = []
        self._recorded_caches, self._makers, self._transfers = [], [], []
        self.busy = False  # between start and stop
        for group, inputs, spans in zip(self._groups, tables.group_inputs, self._spans):
            columns = [self._names.index(feature.name) for feature in inputs.features]
            self._columns.append(None if columns == list(range(len(self._names))) else columns)
            recorded, maker = group.new_recorded_cache(spans, inputs.tables, window, learns)
            self._recorded_caches.append(recorded)
            self._makers.append(maker)
            self._transfers.append(group.new_transfer(recorded))

    def serves(self, tables: EmbeddingTables) -> bool:
        """Whether it still belongs to the tables' caches: loading rows makes new ones."""
        return all(recorded.serves(group.cache) for recorded, group in zip(self._recorded_caches, self._groups))

    def flat(self, named: Ids) -> list[Tensor] | None:
        """The ids of each group, one after the other; None for a batch that does not fit."""
        ids = named.ids
        if not isinstance(ids, Tensor) or ids.shape != self._shape or ids.dtype != torch.int64 or named.bags:
            return None
        return [(ids if columns is None else ids[:, columns]).reshape(-1) for columns in self._columns]

    def start(self) -> None:
        self.busy = True
        for maker in self._makers:
            maker.clear()  # a bad id ended the feed before
        for transfer, recorded in zip(self._transfers, self._recorded_caches):
            transfer.start(recorded.num_windows)

    def stop(self) -> None:
        self.busy = False
        for transfer in self._transfers:
            transfer.stop()

    abandon = stop

    def prepare(self, candidate: Candidate) -> KnownBatch:
        given = BatchInputs(self._shape[0], candidate.named.ids, self._columns_of, {}, {})
        return KnownBatch(candidate.batch, candidate.named, given, self, candidate.ids, None)

    def arrive(self, batch: KnownBatch) -> KnownBatch:
        numbers = [recorded.arrive(ids) for recorded, ids in zip(self._recorded_caches, batch.ids)]
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
        return any(maker.found_bad for maker in self._makers)

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
            windows.append(GroupWindow(plan.number, plan, len(batches), len(batches) * recorded.num_lookups))
            placed.append([self._lookups(g, row, batch.named, ticket) for row, batch in zip(rows, batches)])
        arrived = [self.prepare(candidate)._replace(place=number + i) for i, candidate in enumerate(arriving)]
        return PlannedWindow(RecordedTransfer(self._groups, self._transfers, windows), placed, arrived)

    def drain(self) -> None:
        for transfer in self._transfers:
            transfer.drain()

    def forget(self) -> None:
        for recorded in self._recorded_caches:
            recorded.forget()

    def _lookups(self, g: int, row: Any, named: Ids, ticket: Ticket) -> Lookups:
        return Lookups(
            slots=row.slots,
            spans=self._spans[g],
            num_out=self._recorded_caches[g].num_lookups,
            sorted_keys=row.sorted_keys,
            order=row.order,
            ticket=ticket,
            renew=lambda: self._flatten(named)[g],
        )

    def _flatten(self, named: Ids | PreparedBatch) -> list[Lookups]:
        given = read_inputs(self._tables.features, named.ids, named.bags, self._tables.device)
        groups = zip(self._tables.groups, self._tables.group_inputs)
        return [flatten(group, inputs, given) for group, inputs in groups]
