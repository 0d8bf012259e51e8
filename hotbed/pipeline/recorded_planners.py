"""The lanes of a feed, one for each group: who may use them, and what comes out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hotbed.ops.backend import backend_of
from hotbed.ops.lookups import Lookups, Ticket
from hotbed.pipeline.batches import Ids
from hotbed.tables.group.cached import CachedGroup
from hotbed.tables.inputs import Given, as_given, flatten
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.ownership import Planned

if TYPE_CHECKING:
    from hotbed.cache.recorded_planner import LanePlan

_MOST_KEPT = 4  # shapes of batches whose lanes the next feed finds again; each takes device memory
_CELLS_PER_KEY = 0.6  # of the batches ahead, keys that are no other's and in no slot: a first guess


def lanes_for(tables: EmbeddingTables, named: Ids, window: int, learns: bool) -> Lanes | None:
    """Lanes for batches like this one, or None: they need CUDA, a cache over memory, and one id a feature."""
    ids = named.ids
    alike = (
        isinstance(ids, Tensor) and not named.bags and ids.ndim == 2 and ids.shape[0] > 0 and ids.dtype == torch.int64
    )
    if not alike or backend_of(ids) != "triton" or ids.device != tables.device or ids.shape[1] != len(tables.features):
        return None
    if not all(isinstance(group, CachedGroup) and group.has_lanes for group in tables.groups):
        return None
    if any(feature.pooling == "none" for feature in tables.features):
        return None
    return _kept_lanes(tables, tuple(ids.shape), window, learns)


def _kept_lanes(tables: EmbeddingTables, shape: tuple[int, ...], window: int, learns: bool) -> Lanes:
    """Lanes of an earlier feed, with their recordings, or new ones; those used last are kept."""
    kept, key = tables.turns.lanes, (shape, window, learns)
    if key in kept and kept[key].busy:
        return Lanes(tables, shape, window, learns)  # another feed will go on with those
    lanes: Lanes | None = kept.pop(key, None)
    if lanes is None or not lanes.serve(tables):
        lanes = Lanes(tables, shape, window, learns)
    kept[key] = lanes
    for old in list(kept)[:-_MOST_KEPT]:
        if not kept[old].busy:
            del kept[old]
    return lanes


class LaneWindow(NamedTuple):
    """A planned window of one group."""

    number: int
    plan: LanePlan
    num_batches: int
    num_lookups: int


class Lanes:
    """For id matrices of one shape [B, F]."""

    def __init__(self, tables: EmbeddingTables, shape: tuple[int, ...], window: int, learns: bool) -> None:
        self._tables = weakref.proxy(tables)  # whose turns keep this
        self._shape = shape
        self._names = [feature.name for feature in tables.features]
        self._places = {name: column for column, name in enumerate(self._names)}
        self._groups = [group for group in tables.groups if isinstance(group, CachedGroup)]
        self._spans = [inputs.matrix_spans(shape[0]) for inputs in tables.group_inputs]
        self._columns: list[list[int] | None] = []
        self._lanes, self._makers, self._porters = [], [], []
        self.busy = False  # between start and stop
        for group, inputs, spans in zip(self._groups, tables.group_inputs, self._spans):
            columns = [self._names.index(feature.name) for feature in inputs.features]
            self._columns.append(None if columns == list(range(len(self._names))) else columns)
            lane, maker = group.new_lane(spans, inputs.tables, window, learns)
            self._lanes.append(lane)
            self._makers.append(maker)
            self._porters.append(group.new_porter(lane))

    def serve(self, tables: EmbeddingTables) -> bool:
        """Whether they still belong to the tables' caches: loading rows makes new ones."""
        return all(lane.serves(group.cache) for lane, group in zip(self._lanes, self._groups))

    def flat(self, named: Ids) -> list[Tensor] | None:
        """The ids of each group, one after the other; None for a batch that does not fit the lanes."""
        ids = named.ids
        if not isinstance(ids, Tensor) or ids.shape != self._shape or ids.dtype != torch.int64 or named.bags:
            return None
        return [(ids if columns is None else ids[:, columns]).reshape(-1) for columns in self._columns]

    def given(self, named: Ids) -> Given:
        """The batch as the tables see it."""
        return Given(self._shape[0], named.ids, self._places, {}, {})

    def arrive(self, flat: Sequence[Tensor]) -> int:
        """Make a batch known; its number."""
        numbers = [lane.arrive(ids) for lane, ids in zip(self._lanes, flat)]
        return numbers[0]

    def num_keys(self, number: int) -> list[int]:
        """Distinct keys of a known batch, by group."""
        return [lane.num_keys(number) for lane in self._lanes]

    def reserve(self, look_ahead: int) -> None:
        """Room in the index for the batches ahead; a bounded one has it."""
        for group, lane in zip(self._groups, self._lanes):
            if group.cache.bounded:
                continue
            ahead = look_ahead * lane.num_keys(group.cache.num_arrived - 1)
            group.cache.reserve(int(1.6 * (group.num_slots + _CELLS_PER_KEY * ahead)))

    @property
    def found_bad(self) -> bool:
        """Whether a kernel has seen a bad id in any batch that has arrived. Those whose counts are on the host are known."""
        return any(maker.found_bad for maker in self._makers)

    def check(self, batches: Iterable[Ids | Planned]) -> None:
        """Raise for a bad id among these batches. Until it is their turn, bad ones wait."""
        for named in batches:
            for lookups in self._flatten(named):
                if lookups.check is not None:
                    lookups.check()

    def start(self) -> None:
        """Have the porters ready for the next window."""
        self.busy = True
        for maker in self._makers:
            maker.clear()  # a bad id ended the feed before
        for porter, lane in zip(self._porters, self._lanes):
            porter.start(lane.num_windows)

    def stop(self) -> None:
        """Let the porters go."""
        self.busy = False
        for porter in self._porters:
            porter.stop()

    def drain(self) -> None:
        """Wait until all victims are in their stores."""
        for porter in self._porters:
            porter.drain()

    def plan(
        self, window: Sequence[Ids], arriving: Sequence[list[Tensor]], ticket: Ticket
    ) -> tuple[list[LaneWindow], list[list[Lookups]]]:
        """The next batches' turn: what comes and goes by group, and the look-ups by group and batch.

        As many new ones may be made known in the same go.
        """
        plans, placed = [], []
        for g, lane in enumerate(self._lanes):
            plan, rows = lane.plan(len(window), [flat[g] for flat in arriving])
            plans.append(LaneWindow(plan.number, plan, len(window), len(window) * lane.num_lookups))
            placed.append([self._lookups(g, row, named, ticket) for row, named in zip(rows, window)])
        return plans, placed

    @property
    def num_arrived(self) -> int:
        """Batches made known so far."""
        return self._groups[0].cache.num_arrived

    def are_staged(self, window: Sequence[LaneWindow]) -> bool:
        """Whether `exchange` would not wait."""
        return all(porter.is_staged(part.number) for porter, part in zip(self._porters, window))

    def exchange(self, window: Sequence[LaneWindow]) -> None:
        """Victims leave, misses come; waits for the rows."""
        for group, porter, part in zip(self._groups, self._porters, window):
            group.exchange_with(porter, *part)

    def forget(self) -> None:
        """The batches that are known are about to be dropped."""
        for lane in self._lanes:
            lane.forget()

    def _lookups(self, g: int, row: Any, named: Ids, ticket: Ticket) -> Lookups:
        return Lookups(
            slots=row.slots,
            spans=self._spans[g],
            num_out=self._lanes[g].num_lookups,
            sorted_keys=row.sorted_keys,
            order=row.order,
            ticket=ticket,
            renew=lambda: self._flatten(named)[g],
        )

    def _flatten(self, named: Ids | Planned) -> list[Lookups]:
        given = as_given(self._tables.features, named.ids, named.bags, self._tables.device)
        groups = zip(self._tables.groups, self._tables.group_inputs)
        return [flatten(group, inputs, given) for group, inputs in groups]
