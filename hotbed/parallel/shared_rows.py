"""The row that ids of a table share until they are admitted, where ranks own the ids: every rank has a replica of it.

Who owns an id counts and admits it, and answers from its replica as long as it is not. In backward the owner sums what came for
its replica, the sums of all ranks go round in one small gather, and every rank adds them in the order of the ranks and runs the
same update: so replicas are equal to the bit, and no look-up asks twice. Replicas arrive with every training batch, whoever
needs them, because another rank may.

`Summed`: gradients that an owner has received from all ranks in, what it updates its rows with out.

As a rule each rank's sum stands for itself and the update adds them. Where a row optimizer divides by how often a row occurs
(`scale_by_count`), ranks tell how often their batch has it: sums are then added and divided here, and every row comes once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.ops.lookups import Lookups, Span
from hotbed.ops.sums import sum_by_row
from hotbed.parallel.collect import gather
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.routes import Route
from hotbed.tables.group.group import TableGroup


class SharedRows:
    """S replicas of one group, in the order of their tables. They stand behind the rows that ranks ask for."""

    def __init__(self, mesh: Mesh, group: TableGroup) -> None:
        members = list(group.members.values())
        tables = [t for t, one in enumerate(members) if one.rules is not None and one.rules.admission is not None]
        self._mesh, self._keyspace = mesh, group.keyspace
        self._tables = [members[table].name for table in tables]
        self._place_of = torch.full((len(members),), -1, device="cpu")  # int64 [T]
        self._place_of[tables] = torch.arange(len(tables), device="cpu")

    def behind(self, keys: Tensor) -> Tensor:
        """The keys [n] that this rank is asked for, with those of its replicas: [n + S]."""
        own = np.array([self._keyspace.shared_key(table) for table in self._tables], dtype=np.int64)
        return torch.cat([keys, torch.from_numpy(own).to(keys.device)])

    def together(self, asked: Lookups, grad: Tensor) -> SpanGradients:
        """Gradients [n, D] of the rows asked for -> [n + S, D]: those of shared rows from all ranks, at the end."""
        route: Route = asked.route
        assert route.tables is not None, "keys of dynamic ids are asked for by table"
        assert route.times is not None, "dynamic ids are asked for with how often they come"
        count, times = grad.shape[0], route.times.to(torch.int64)
        own, replicas = asked.slots[:count], asked.slots[count:]
        places = self._place_of.to(grad.device)[route.tables.to(torch.int64)]
        places = torch.where((places >= 0) & (own == replicas[places]), places, -1)  # -1: a row of its own
        sums, totals = self._sums(grad, times, places)
        slots = torch.cat([torch.where(places >= 0, -1, own), torch.where(totals > 0, replicas, -1)])
        keys = None if asked.keys is None else torch.where(slots >= 0, asked.keys, -1)
        lookups = asked._replace(slots=slots, keys=keys, sorted_keys=None, order=None)
        return SpanGradients(lookups, torch.cat([grad, sums]), torch.cat([times, totals]))

    def _sums(self, grad: Tensor, times: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Of all ranks: gradients [S, D], and how often their batches have a shared row [S]."""
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
    """Gradients [n, D] of look-ups of one span, and how often a batch has the row of each."""

    lookups: Lookups
    grad: Tensor
    times: Tensor  # int64 [n]


def averaged(summed: SpanGradients) -> SpanGradients:
    """The sum of every row, added in order, by how often all batches have it; every row once."""
    lookups, grad, times = summed
    slots, places = torch.unique(lookups.slots, return_inverse=True)
    count, size = grad.shape[0], int(slots.shape[0])
    sums = sum_by_row(grad, Lookups(places, (Span("rows", 0, count, 1),), count), size, ("rows",))
    totals = torch.zeros(size, dtype=torch.int64, device=grad.device).index_add_(0, places, times)
    keys = None
    if lookups.keys is not None:
        keys = lookups.keys.new_empty(size)
        keys[places] = lookups.keys  # any of them will do: they are one row's
    grad = sums / totals.clamp(min=1).to(grad.dtype).unsqueeze(1)
    return SpanGradients(Lookups(slots, (Span("rows", 0, size, 1),), size, keys=keys), grad, totals)
