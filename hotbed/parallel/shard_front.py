"""The lookups of one group where every row has one owner: asks the owners for rows, and sends them the sums of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hotbed.ops.lookup import lookup
from hotbed.ops.lookup.reference import rows_of
from hotbed.ops.lookups import Lookups
from hotbed.ops.sums import sum_by_row
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.order import Order
from hotbed.parallel.routes import Route, Want
from hotbed.parallel.shared_rows import SharedRows, SpanGradients, averaged
from hotbed.tables.group.group import TableGroup, UpdateStep
from hotbed.tables.ownership import Ownership

Traffic = Literal["fp32", "fp16", "bf16"]
TYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Ranks(NamedTuple):
    """What the fronts of one ShardedTables share."""

    mesh: Mesh
    order: Order
    ownership: Ownership


class ShardFront:
    """Answers the lookups of one group by asking the owners of the rows."""

    wants: Want = "none"

    def __init__(self, ranks: Ranks, group: TableGroup, number: int, scale: float, traffic: Traffic) -> None:
        self.layout = group.layout
        self._ranks, self._group, self._number = ranks, group, number
        self._scale = scale
        self._type = TYPES[traffic]
        self.shared: SharedRows | None = None  # where ids have to be admitted
        if any(member.rules is not None and member.rules.admission is not None for member in group.members.values()):
            self.shared = SharedRows(ranks.mesh, group)

    def ensure(self, lookups: Lookups, learns: bool, claim: Callable[[], None]) -> Lookups:
        """Rows are in the slots of their owners when they are asked for: see `asked`."""
        return lookups if lookups.renew is None else lookups.renew()

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""
        return lookup(self._vectors(lookups), lookups, self.layout.dim)

    def rows_of(self, lookups: Lookups) -> Tensor:
        """The vectors [L, D] that the lookups read: rows, or sums of parts of bags; asks for them again."""
        self.meet("is in a backward pass and reads rows again", lookups)
        here = lookups._replace(route=self.asked(lookups, learns=False))
        return rows_of(self._vectors(here), lookups, self.layout.dim)

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, step: UpdateStep) -> None:
        """Send the sums of the gradients to the owners, and update the rows that are here."""
        self.updated(lookups, tables, grad, step)

    def updated(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, step: UpdateStep) -> Lookups:
        """As `update`; what this rank was asked for, rows in place."""
        route: Route = lookups.route.route
        sums = self._summed(lookups, tables, grad, route.num_vectors)
        self.meet("is in a backward pass and updates rows", lookups)
        received = route.give(self.narrow(sums)).to(grad.dtype)
        asked = self.asked(lookups, learns=True)
        summed = SpanGradients(asked, received, torch.empty(0, dtype=torch.float32, device="cpu"))
        if route.times is not None:
            summed = summed._replace(times=route.times.to(torch.int64))
            if self.shared is not None:
                summed = self.shared.together(asked, received)
            if self._group.optimizer.scale_by_count:
                summed = averaged(summed)
        with self._group.changes.changing("an update of rows"):
            self._group.update_rows(summed.lookups, summed.grad, step)
        return asked

    def meet(self, what: str, lookups: Lookups) -> None:
        """With the other ranks, which do the same with their part of the batch."""
        self._ranks.order.meet(what, lookups.route.route.call, self._number)

    def asked(self, lookups: Lookups, learns: bool) -> Lookups:
        """What this rank is asked for; the rows may have been moved since the lookups were made."""
        asked: Lookups = lookups.route
        if asked.ticket is not None and asked.ticket.holds(learns):
            return asked
        return self._group.ensure(asked, learns, self._ranks.ownership.claim)

    def narrow(self, rows: Tensor) -> Tensor:
        """Rows or gradients as they travel."""
        return rows.contiguous() if self._type is None else rows.to(self._type).contiguous()

    @property
    def row_bytes(self) -> int:
        """Of a row that travels."""
        itemsize = self._group.records.itemsize if self._type is None else self._type.itemsize
        return self.layout.dim * itemsize

    def forget(self) -> None:
        """Rows change by other means than updates: nothing is kept here."""

    def _vectors(self, lookups: Lookups) -> Tensor:
        """The vectors [V, D] that this rank has asked for: rows, and sums of parts of bags."""
        asked: Lookups = lookups.route
        route: Route = asked.route
        vectors = self._group.lookup(asked)[: route.passage.num_received]
        return route.bring(self.narrow(vectors)).to(vectors.dtype)

    def _summed(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, num_vectors: int) -> Tensor:
        """Sums [V, D] of the gradients of every vector, in the order of the batch."""
        sums = sum_by_row(grad, lookups, num_vectors, tables)
        return sums if self._scale == 1.0 else sums * self._scale
