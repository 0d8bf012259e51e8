"""The lookups of one group where every row has one owner: asks the owners for rows, and sends them the sums of gradients.

`SharedRows`: the row that ids of a table share until they are admitted. Every rank has a replica of it. The owner of an id
counts and admits it, and answers from its replica until then. In backward the owner sums what came for its replica, and one
small gather brings the sums of all ranks to each. Every rank adds them in the order of the ranks and runs the same update. So
replicas are equal to the bit, and no lookup asks twice. Replicas arrive with every training batch: another rank may need them.

`SpanGradients`: gradients that an owner has received from all ranks -> what it updates its rows with. Normally the update adds
the sum of each rank. Where a row optimizer divides by how often a row occurs (`scale_by_count`), ranks report how often their
batch has it: sums are then added and divided here, and every row comes once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.ops.lookup import lookup
from hotbed.ops.lookup.reference import rows_of
from hotbed.ops.lookups import Lookups, Span
from hotbed.ops.sums import sum_by_row
from hotbed.parallel.collect import gather
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.order import RankOrder
from hotbed.parallel.routes import Route, UnionKind, requests_of, route_of
from hotbed.tables.group.group import TableGroup, UpdateStep

TrafficType = Literal["fp32", "fp16", "bf16"]
TYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class FrontContext(NamedTuple):
    """Shared by the fronts of one ShardedTables."""

    mesh: Mesh
    order: RankOrder


class ShardFront:
    """Answers the lookups of one group by asking the owners of the rows."""

    wants: UnionKind = "none"
    replica_bytes = 0

    def __init__(self, ranks: FrontContext, group: TableGroup, number: int, scale: float, traffic: TrafficType) -> None:
        self.layout = group.layout._replace(dim=group.dim)  # of whole rows
        self._ranks, self._group, self._number = ranks, group, number
        self._scale = scale
        self._type = TYPES[traffic]
        self.shared: SharedRows | None = None  # if ids have to be admitted
        if any(member.rules is not None and member.rules.admission is not None for member in group.members.values()):
            self.shared = SharedRows(ranks.mesh, group)

    def ensure(self, lookups: Lookups, learns: bool, claim: Callable[[], None]) -> Lookups:
        """The lookups with the rows that other ranks request of this one in their slots; they may have moved since."""
        requested = requests_of(lookups)
        if requested.ticket is None or not requested.ticket.holds(learns):
            requested = self._group.ensure(requested, learns, claim)
        return lookups._replace(requested=requested)

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""
        return lookup(self._vectors(lookups), lookups, self.layout.dim)

    def rows_of(self, lookups: Lookups) -> Tensor:
        """The vectors [L, D] that the lookups read: rows, or sums of parts of bags; requests them again."""
        self.meet("is in a backward pass and reads rows again", lookups)
        return rows_of(self._vectors(lookups), lookups, self.layout.dim)

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, step: UpdateStep) -> None:
        """Send the sums of the gradients to the owners, and update the rows that are here."""
        self.updated(lookups, tables, grad, step)

    def updated(
        self,
        lookups: Lookups,
        tables: tuple[str, ...],
        grad: Tensor,
        step: UpdateStep,
        also: Callable[[Lookups], None] = lambda _: None,
    ) -> None:
        """As `update`; `also` gets the lookups of other ranks."""
        requested = requests_of(lookups)
        route = route_of(requested)
        sums = self.summed(lookups, tables, grad, route.num_vectors)
        received = route.give(self.narrow(sums)).to(grad.dtype)
        summed = SpanGradients(requested, received, torch.empty(0, dtype=torch.float32, device="cpu"))
        if route.times is not None:
            summed = summed._replace(times=route.times.to(torch.int64))
            if self.shared is not None:
                summed = self.shared.together(requested, received)
            if self._group.optimizer.scale_by_count:
                summed = average_by_row(summed)
        self._group.update_rows(summed.lookups, summed.grad, step)
        also(requested)

    def meet(self, what: str, lookups: Lookups) -> None:
        """Check that the other ranks do the same with their part of the batch."""
        self._ranks.order.meet(what, route_of(requests_of(lookups)).call, [self._number])

    def narrow(self, rows: Tensor) -> Tensor:
        """Rows or gradients as sent."""
        return rows.contiguous() if self._type is None else rows.to(self._type).contiguous()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire."""
        itemsize = self._group.records.itemsize if self._type is None else self._type.itemsize
        return self.layout.dim * itemsize

    def checked(self, route: Route) -> Route:
        """The route of a batch: nothing of it has to fit here."""
        return route

    def forget(self) -> None:
        """Rows have changed other than by updates: nothing is kept here."""

    def _vectors(self, lookups: Lookups) -> Tensor:
        """The vectors [V, D] that this rank requested: rows, and sums of parts of bags."""
        requested = requests_of(lookups)
        route = route_of(requested)
        vectors = self._group.lookup(requested)[: route.routing.num_received]
        return route.bring(self.narrow(vectors)).to(vectors.dtype)

    def summed(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, num_vectors: int) -> Tensor:
        """Sums [V, D] of the gradients of every vector, in the order of the batch."""
        sums = sum_by_row(grad, lookups, num_vectors, tables)
        return sums if self._scale == 1.0 else sums * self._scale


class SharedRows:
    """S replicas of one group, in the order of their tables. They come after the rows that ranks request."""

    def __init__(self, mesh: Mesh, group: TableGroup) -> None:
        members = list(group.members.values())
        tables = [t for t, one in enumerate(members) if one.rules is not None and one.rules.admission is not None]
        self._mesh, self._keyspace = mesh, group.keyspace
        self._tables = [members[table].name for table in tables]
        self._place_of = torch.full((len(members),), -1, device="cpu")  # int64 [T]
        self._place_of[tables] = torch.arange(len(tables), device="cpu")

    def behind(self, keys: Tensor) -> Tensor:
        """The requested keys [n], followed by those of the replicas: [n + S]."""
        own = np.array([self._keyspace.shared_key(table) for table in self._tables], dtype=np.int64)
        return torch.cat([keys, torch.from_numpy(own).to(keys.device)])

    def together(self, requested: Lookups, grad: Tensor) -> SpanGradients:
        """Gradients [n, D] of the requested rows -> [n + S, D]: those of shared rows, from all ranks, at the end."""
        route = route_of(requested)
        assert route.tables is not None, "dynamic ids are requested by table"
        assert route.times is not None, "dynamic ids are requested with their occurrences"
        count, times = grad.shape[0], route.times.to(torch.int64)
        own, replicas = requested.slots[:count], requested.slots[count:]
        places = self._place_of.to(grad.device)[route.tables.to(torch.int64)]
        places = torch.where((places >= 0) & (own == replicas[places]), places, -1)  # -1: a row of its own
        sums, totals = self._sums(grad, times, places)
        slots = torch.cat([torch.where(places >= 0, -1, own), torch.where(totals > 0, replicas, -1)])
        keys = None if requested.keys is None else torch.where(slots >= 0, requested.keys, -1)
        lookups = requested._replace(slots=slots, keys=keys, sorted=None)
        return SpanGradients(lookups, torch.cat([grad, sums]), torch.cat([times, totals]))

    def _sums(self, grad: Tensor, times: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over all ranks: gradients [S, D], and occurrences of the shared rows [S] in their batches."""
        size, count = len(self._tables), grad.shape[0]
        lookups = Lookups(places, (Span("rows", 0, count, 1),), count)
        mine = sum_by_row(grad, lookups, size, ("rows",))
        totals = torch.zeros(size + 1, dtype=torch.int64, device=grad.device).index_add_(0, places + 1, times)[1:]
        counted = totals.contiguous().view(torch.uint8).view(size, -1)
        bits = torch.cat([mine.contiguous().view(torch.uint8).view(size, -1), counted], dim=1)
        ranks = gather(self._mesh, bits, [size] * self._mesh.size).view(self._mesh.size, size, -1)
        width = mine.shape[1] * mine.itemsize
        parts = ranks[..., :width].contiguous().view(mine.dtype)
        sums = parts[0]
        for part in parts[1:]:
            sums = sums + part
        return sums, ranks[..., width:].contiguous().view(torch.int64).sum(0).view(size)


class SpanGradients(NamedTuple):
    """Gradients [n, D] of lookups of one span, and the occurrences of the row of each in a batch."""

    lookups: Lookups
    grad: Tensor
    times: Tensor  # int64 [n]


def average_by_row(summed: SpanGradients) -> SpanGradients:
    """The sum of every row, added in order, divided by its occurrences in all batches; every row once."""
    lookups, grad, times = summed
    slots, places = torch.unique(lookups.slots, return_inverse=True)
    count, size = grad.shape[0], int(slots.shape[0])
    sums = sum_by_row(grad, Lookups(places, (Span("rows", 0, count, 1),), count), size, ("rows",))
    totals = torch.zeros(size, dtype=torch.int64, device=grad.device).index_add_(0, places, times)
    keys = None
    if lookups.keys is not None:
        keys = lookups.keys.new_empty(size)
        keys[places] = lookups.keys  # any of them: they are the same row's
    grad = sums / totals.clamp(min=1).to(grad.dtype).unsqueeze(1)
    return SpanGradients(Lookups(slots, (Span("rows", 0, size, 1),), size, keys=keys), grad, totals)
