"""Tables spread over ranks: every row has one owner, who keeps it, looks it up and updates it.

    torchrun --nproc-per-node 2 train.py        # in it: tables = hotbed.ShardedTables({...}, optimizer, cache=0.015)

Forward: each rank asks the owners for the distinct rows of its batch and pools what comes back. Backward: it sums the
gradients of each of those rows over its batch and sends the sums to the owners, who add them in the order of the ranks and
update. Behind each owner are its own cache and stores: to them the rows that others ask for are a batch like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hotbed.declared import Table
from hotbed.errors import ConfigError
from hotbed.group import TableGroup
from hotbed.inputs import Given, flatten
from hotbed.ops.lookup import lookup
from hotbed.ops.lookup.reference import rows_of
from hotbed.ops.lookups import Lookups, Span
from hotbed.ops.records import layout_of
from hotbed.ops.update import TableRows, settings_of, update
from hotbed.optim import SGD, RowOptimizer
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.routes import Route, make_routes, refuse_routes
from hotbed.shard import Shard
from hotbed.tables import EmbeddingTables
from hotbed.turns import Planned
from hotbed.types import Jagged

Traffic = Literal["fp32", "fp16", "bf16"]
_TYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
_SUM = SGD(lr=1.0)  # at a rate of -1, rows of zeros become the sums of their gradients


class ShardedTables(EmbeddingTables):
    """EmbeddingTables whose rows are spread over all ranks.

    Made with the same arguments on every rank, after `torch.distributed.init_process_group`; byte budgets are those of one
    rank. A call looks up the rank's own part of the global batch, which may be empty; all ranks call the tables and run
    backward equally often.

    `gradients="mean"` divides the sums by the number of ranks, as DistributedDataParallel does with those of the model: right
    when every rank's loss is the mean over its part. With "sum" the ranks' losses add up to the loss.

    `traffic="bf16"` or "fp16" sends rows and gradients in 16 bits: an approximation (docs/numerics.md).
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        optimizer: RowOptimizer | None = None,
        *,
        mesh: Mesh | None = None,
        gradients: Literal["mean", "sum"] = "mean",
        traffic: Traffic = "fp32",
        **options: Any,
    ) -> None:
        mesh = Mesh.from_environment() if mesh is None else mesh
        _check_settings(optimizer, gradients, traffic)
        super().__init__(tables, optimizer, shard=Shard(mesh.rank, mesh.size), **options)
        self.mesh = mesh
        self._recorded = None  # what it records is of one rank
        scale = 1.0 if gradients == "sum" else 1.0 / mesh.size
        self.fronts = [ShardFront(self, group, scale, traffic) for group in self.groups]
        self._told = False  # the others know of the batch

    def forward(
        self, ids: Tensor | Mapping[str, Tensor | Jagged], bags: Mapping[str, Jagged] | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Look up this rank's part of a batch; see EmbeddingTables."""
        self._told = False
        try:
            return super().forward(ids, bags)
        except BaseException as error:
            if not self._told:
                self._told = True
                refuse_routes(self.mesh, len(self.groups), error, self.device)
            raise

    def routes(self, mesh: Mesh, given: Given) -> list[Route]:
        """Settle between all ranks who asks for which rows; a collective over `mesh`."""
        parts = []
        for group, inputs in zip(self.groups, self.group_inputs):
            lookups = flatten(group, inputs, given)
            if lookups.check is not None:
                lookups.check()
            parts.append((group.num_rows, lookups))
        self._told = True
        return make_routes(mesh, parts)

    def asked(self, routes: list[Route]) -> list[Lookups]:
        """The look-ups that all ranks ask this one for, by group."""
        return [
            Lookups(route.keys, (Span("rows", 0, route.keys.shape[0], 1),), route.keys.shape[0], route=route)
            for route in routes
        ]

    def _prepared(self, given: Given, planned: Planned | None, learns: bool) -> list[Lookups]:
        """The rank's own look-ups; with them goes what it is asked for, rows in place."""
        self._told |= planned is not None
        asked = planned.lookups if planned is not None else self.asked(self.routes(self.mesh, given))
        placed = [self._placed(group, each, learns) for group, each in zip(self.groups, asked)]
        return [each.route.own._replace(route=each) for each in placed]


class ShardFront:
    """Answers the look-ups of one group by asking the owners of the rows."""

    def __init__(self, tables: ShardedTables, group: TableGroup, scale: float, traffic: Traffic) -> None:
        self.layout = group.layout
        self._tables = tables
        self._group = group
        self._scale = scale
        self._type = _TYPES[traffic]
        self._sums = layout_of(group.layout.dim, _SUM)

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""
        return lookup(self._rows(lookups), lookups, self.layout.dim)

    def rows_of(self, lookups: Lookups) -> Tensor:
        """The weights [L, D] that the look-ups read; asks for them again."""
        return rows_of(self._rows(lookups), lookups, self.layout.dim)

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, lr: float, number: int) -> None:
        """Send the sums of the gradients to the owners, and update the rows that are here."""
        route: Route = lookups.route.route
        sums = self._summed(lookups, tables, grad, route.num_rows)
        received = route.give(self._narrow(sums)).to(grad.dtype)
        asked = self._tables._placed(self._group, lookups.route, True)  # they may have been moved
        self._group.update_rows(asked, received, lr, number)

    def _rows(self, lookups: Lookups) -> Tensor:
        """The rows [U, D] that this rank has asked for."""
        asked: Lookups = lookups.route
        rows = self._group.lookup(asked)
        brought: Tensor = asked.route.bring(self._narrow(rows))
        return brought.to(rows.dtype)

    def _summed(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, num_rows: int) -> Tensor:
        """Sums [U, D] of the gradients of every row, in the order of the batch."""
        records = torch.zeros(num_rows, self._sums.width, dtype=grad.dtype, device=grad.device)
        starts = [p for p, table in enumerate(tables) if p == 0 or tables[p - 1] != table]
        runs = [TableRows(0, num_rows, first, stop) for first, stop in zip(starts, [*starts[1:], len(tables)])]
        update(records, self._sums, grad, lookups, settings_of(_SUM, -1.0, tuple(runs)))
        sums = records[:, : self.layout.dim]
        return sums if self._scale == 1.0 else sums * self._scale

    def _narrow(self, rows: Tensor) -> Tensor:
        return rows.contiguous() if self._type is None else rows.to(self._type).contiguous()


def _check_settings(optimizer: RowOptimizer | None, gradients: str, traffic: str) -> None:
    wrong = []
    if gradients not in ("mean", "sum"):
        wrong.append(f"gradients must be 'mean' or 'sum', not {gradients!r}")
    if traffic not in _TYPES:
        wrong.append(f"traffic must be one of {', '.join(map(repr, _TYPES))}, not {traffic!r}")
    if optimizer is not None and optimizer.scale_by_count:
        wrong.append("scale_by_count=True needs the counts of all ranks, which do not travel; leave it out")
    if wrong:
        raise ConfigError("; ".join(wrong))
