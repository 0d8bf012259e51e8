"""Tables spread over ranks: every row has one owner, who keeps it, looks it up and updates it.

    torchrun --nproc-per-node 2 train.py        # in it: tables = hotbed.ShardedTables({...}, optimizer, cache=0.015)

Forward: each rank asks the owners for the distinct rows of its batch and pools what comes back, or has each owner pool its
part of every bag, whichever moves fewer bytes. Backward: sums of gradients over the batch, or one gradient for each part, go to
the owners, who add them in the order of the ranks and update. Behind each owner are its own cache and stores: to them what
others ask for is a batch like any other.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from hotbed.errors import ConfigError
from hotbed.ops.lookup import lookup
from hotbed.ops.lookup.reference import rows_of
from hotbed.ops.lookups import Lookups, Span
from hotbed.ops.shard import Shard
from hotbed.ops.sums import sum_by_row
from hotbed.optim import RowOptimizer
from hotbed.parallel.asks import Bags, Wanted
from hotbed.parallel.auto import Mode, check_mode, way_of
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.order import Order
from hotbed.parallel.routes import (
    RanksLeft,
    Route,
    Want,
    end_routes,
    make_routes,
    refuse_routes,
    tables_in_parts,
    wanted_of,
    with_unions,
)
from hotbed.parallel.shared_rows import SharedRows, Summed, averaged
from hotbed.tables.group.group import TableGroup, UpdateStep
from hotbed.tables.group.keyspace import Question
from hotbed.tables.inputs import Given, as_given, flatten
from hotbed.tables.keyed import KeyedJagged
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.ownership import Planned, Routed
from hotbed.tables.snapshot.snapshot import TablesSink
from hotbed.tables.spec import Table
from hotbed.tables.torch_hooks import eager
from hotbed.types import Jagged

Traffic = Literal["fp32", "fp16", "bf16"]
Pooled = Literal["auto", "always", "never"]
_ALIKE = ("seed", "precision")  # options that are the same on all ranks
_TYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class ShardedTables(EmbeddingTables):
    """EmbeddingTables whose rows are spread over all ranks.

    Made with the same arguments on every rank, after `torch.distributed.init_process_group`; byte budgets are those of one
    rank. A call looks up the rank's own part of the global batch, which may be empty; all ranks call the tables and run
    backward equally often.

    `gradients="mean"` divides the sums by the number of ranks, as DistributedDataParallel does with those of the model: right
    when every rank's loss is the mean over its part. With "sum" the ranks' losses add up to the loss.

    `traffic="bf16"` or "fp16" sends rows and gradients in 16 bits: an approximation (docs/numerics.md).

    `mode="replicated"` keeps the rows that batches lately wanted at every rank too; "auto" chooses for every group, from its
    first batches and the speed of the wires. The rows are the same to the bit (docs/distributed.md).

    `pooled="auto"` lets owners add up their parts of bags where that moves fewer bytes than rows do; vectors then are sums of
    at most W partial sums, which are rounded otherwise than in one process. "never" moves rows: the vectors of one process to
    the bit, and so do dynamic ids, weighted bags and the other modes. "always" is for measuring.
    """

    is_shared = True

    def __init__(
        self,
        tables: Mapping[str, Table],
        optimizer: RowOptimizer | None = None,
        *,
        mesh: Mesh | None = None,
        gradients: Literal["mean", "sum"] = "mean",
        traffic: Traffic = "fp32",
        mode: Mode = "sharded",
        pooled: Pooled = "auto",
        **options: Any,
    ) -> None:
        mesh = Mesh.from_environment() if mesh is None else mesh
        order = Order(mesh)
        try:
            _check_settings(gradients, traffic, pooled)
            check_mode(mode, optimizer)
            super().__init__(tables, optimizer, shard=Shard(mesh.rank, mesh.size), **options)
        except BaseException as error:
            order.refuse(error)
            raise
        self.mesh, self.order = mesh, order
        settings = {"gradients": gradients, "traffic": traffic, "mode": mode, "pooled": pooled}
        order.compare(_description(self, settings | {name: options.get(name) for name in _ALIKE}))
        self.stop_recording()  # what it records is of one rank
        scale = 1.0 if gradients == "sum" else 1.0 / mesh.size
        self._sharded = [ShardFront(self, group, scale, traffic) for group in self.groups]
        self._ways = [way_of(mode, front, mesh, group) for front, group in zip(self._sharded, self.groups)]
        self.fronts = [*self._ways]
        self._mode, self._pooled = mode, pooled
        self._is_cached = bool(self.caches)
        self._num_calls, self._trains = 0, False
        self._told = False  # the others know what became of the call, or will
        self._idle: list[Mesh] = []  # that feeds have settled their batches over

    @eager
    def forward(
        self, ids: Tensor | Mapping[str, Tensor | Jagged] | KeyedJagged, bags: Mapping[str, Jagged] | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Look up this rank's part of a batch; see EmbeddingTables."""
        self._told = False
        self._num_calls += 1
        self._trains = torch.is_grad_enabled() and self.learns
        try:
            return super().forward(ids, bags)
        except BaseException as error:
            if not self._told:
                self._told = True
                self.order.refuse(error)
            raise

    def restore(self) -> TablesSink:
        """A sink for saved rows; all ranks take one."""
        self.forget_replicas()
        return super().restore()

    def forget_replicas(self) -> None:
        """Rows have changed by other means than updates; all ranks say so."""
        for way in self._ways:
            way.forget()

    def lend_mesh(self) -> Mesh:
        """A mesh of its own for every feed: each settles its batches in a thread, and feeds in no common order."""
        self.order.meet("begins to prefetch")
        return self._idle.pop() if self._idle else self.mesh.apart()

    def take_back_mesh(self, mesh: Mesh) -> None:
        """The feed has ended."""
        self._idle.append(mesh)

    def routed(self, batches: Iterable[tuple[Any, Any, Any]], mesh: Mesh) -> Iterator[Routed]:
        """(batch, ids, bags) of this rank, settled with the other ranks ahead of time."""
        num_groups = len(self.groups)
        done = False  # there is nothing left to tell the others
        try:
            for batch, ids, bags in batches:
                given = as_given(self.features, ids, bags, self.device)
                wanted = self._wanted(given)
                done = True  # whatever goes wrong from here on does so on every rank
                routes = self._settled(mesh, wanted)
                done = False
                yield Routed(batch, given, routes)
            done = True
            end_routes(mesh, num_groups, True, self.device)
        except RanksLeft:
            done = True
        except GeneratorExit:
            raise
        except BaseException as error:
            if not done:
                done = True
                refuse_routes(mesh, num_groups, error, self.device)
            raise
        finally:
            if not done:
                with suppress(RanksLeft):
                    end_routes(mesh, num_groups, False, self.device)

    def routes(self, given: Given) -> list[Route]:
        """Settle between all ranks who asks for which rows; a collective."""
        wanted = self._wanted(given)
        self._meet(prefetched=False)
        routes = self._settled(self.mesh, wanted)
        self._told = not self._is_cached  # where it is, ranks meet again when rows are in place
        return routes

    def _meet(self, *, prefetched: bool) -> None:
        """With the other ranks, before a batch is looked up."""
        self._told = True
        kind = "training batch" if self._trains else "batch"
        what = f"looks up a {kind}{' of a prefetch' if prefetched else ''}{'' if self._trains else ' without training'}"
        self.order.meet(what, self._num_calls)

    def _settled(self, mesh: Mesh, wanted: list[Wanted]) -> list[Route]:
        routes = make_routes(mesh, wanted, self.mesh)
        if self._mode == "sharded":
            return routes
        return with_unions(mesh, routes, [group.num_rows for group in self.groups], [way.wants for way in self._ways])

    def asked(self, routes: list[Route], learns: bool) -> list[Lookups]:
        """The look-ups that all ranks ask this one for, by group. Dynamic ids take them for the next training batch."""
        found = []
        for group, front, route in zip(self.groups, self._sharded, routes):
            question = Question(route.keys, route.tables, group.num_rows)
            keys, sense = group.keyspace.answer(question, route.times, learns)
            if learns and front.shared is not None:
                keys = front.shared.behind(keys)
            count = keys.shape[0]
            asked = Lookups(keys, (Span("rows", 0, count, 1),), count, sense=sense, route=route)
            if route.starts is not None:
                vectors = torch.arange(route.passage.num_received, device=keys.device)
                asked = asked._replace(num_out=vectors.shape[0], starts=route.starts, out_rows=vectors)
            found.append(asked)
        return found

    def _wanted(self, given: Given) -> list[Wanted]:
        """Own look-ups by group, checked."""
        found = []
        for group, inputs, way, sharded in zip(self.groups, self.group_inputs, self._ways, self._sharded):
            want = wanted_of(group, partial(flatten, inputs=inputs, given=given))
            # Replicas are of rows, and what mode="auto" chooses may change no bit; what is counted is counted one by one.
            want = want._replace(counted=group.optimizer.scale_by_count)
            may_pool = way is sharded and want.tables is None and self.mesh.size > 1 and self._pooled != "never"
            tables = tables_in_parts(inputs, given) if may_pool else None
            if tables is not None:
                want = want._replace(bags=Bags(tables, sharded.row_bytes, self._pooled == "always"))
            found.append(want)
        return found

    def _settle(self, given: Given, planned: Planned | None) -> list[Route]:
        """What the ranks have settled about a batch holds, whatever became of its ids since."""
        return self.routes(given) if planned is None else [each.route for each in planned.lookups]

    def _wished(self, given: Given, settled: Any, learns: bool) -> list[Lookups]:
        """What all ranks want of this one."""
        return self.asked(settled, learns)

    def _prepared(self, given: Given, planned: Planned | None, learns: bool) -> list[Lookups]:
        """The rank's own look-ups; with them goes what it is asked for, rows in place."""
        found = super()._prepared(given, planned, learns)
        if planned is not None:
            self._meet(prefetched=True)
        elif self._is_cached:  # not all rows may have had room
            self._told = True
            self.order.meet("has the rows of a batch in place", self._num_calls)
        return [each.route.own._replace(route=self._numbered(each)) for each in found]

    def _numbered(self, asked: Lookups) -> Lookups:
        return asked._replace(route=asked.route._replace(call=self._num_calls))


class ShardFront:
    """Answers the look-ups of one group by asking the owners of the rows."""

    wants: Want = "none"

    def __init__(self, tables: ShardedTables, group: TableGroup, scale: float, traffic: Traffic) -> None:
        self.layout = group.layout
        self._tables = cast(ShardedTables, weakref.proxy(tables))  # which own this
        self._group, self._number = group, tables.groups.index(group)
        self._scale = scale
        self._type = _TYPES[traffic]
        self.shared: SharedRows | None = None  # where ids have to be admitted
        if any(member.rules is not None and member.rules.admission is not None for member in group.members.values()):
            self.shared = SharedRows(tables.mesh, group)

    def ensure(self, lookups: Lookups, learns: bool, claim: Callable[[], None]) -> Lookups:
        """Rows are in the slots of their owners when they are asked for: see `asked`."""
        return lookups if lookups.renew is None else lookups.renew()

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""
        return lookup(self._vectors(lookups), lookups, self.layout.dim)

    def rows_of(self, lookups: Lookups) -> Tensor:
        """The vectors [L, D] that the look-ups read: rows, or sums of parts of bags; asks for them again."""
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
        summed = Summed(asked, received, torch.empty(0, dtype=torch.float32, device="cpu"))
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
        self._tables.order.meet(what, lookups.route.route.call, self._number)

    def asked(self, lookups: Lookups, learns: bool) -> Lookups:
        """What this rank is asked for; the rows may have been moved since the look-ups were made."""
        return self._tables.placed(self._group, lookups.route, learns)

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


def _description(tables: EmbeddingTables, settings: dict[str, Any]) -> dict[str, str]:
    """What must be the same on all ranks; budgets and places are each rank's own."""
    cached = [sorted(group.members) for group in tables.groups if group.num_slots]
    found = {"the tables": list(tables.tables), **{f"table {name!r}": table for name, table in tables.tables.items()}}
    found |= {"optimizer": tables.optimizer, "output": tables.output, "tables behind a cache": cached, **settings}
    return {name: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for name, value in found.items()}


def _check_settings(gradients: str, traffic: str, pooled: str) -> None:
    wrong = []
    if gradients not in ("mean", "sum"):
        wrong.append(f"gradients must be 'mean' or 'sum', not {gradients!r}")
    if traffic not in _TYPES:
        wrong.append(f"traffic must be one of {', '.join(map(repr, _TYPES))}, not {traffic!r}")
    if pooled not in get_args(Pooled):
        wrong.append(f"pooled must be one of {', '.join(map(repr, get_args(Pooled)))}, not {pooled!r}")
    if wrong:
        raise ConfigError("; ".join(wrong))
