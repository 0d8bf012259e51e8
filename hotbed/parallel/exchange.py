"""All ranks answer the lookups of a call together: they first agree on which rank requests which rows from which.

The requests of other ranks are a batch like any other to the groups of this rank. The rank's own lookups go to the fronts,
which request rows from their owners.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from hotbed.ops.lookups import Bags, Lookups, Span
from hotbed.parallel.auto import AutoFront, Mode, choose_front
from hotbed.parallel.collect import gather_numbers
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.order import RowUpdate
from hotbed.parallel.replicated import ReplicaRoom, ReplicatedFront
from hotbed.parallel.requests import PooledBags, WantedRows
from hotbed.parallel.routes import (
    RanksLeft,
    Route,
    end_routes,
    make_routes,
    refuse_routes,
    requests_of,
    route_of,
    tables_in_parts,
    wanted_of,
    with_unions,
)
from hotbed.parallel.shard_front import FrontContext, ShardFront, TrafficType
from hotbed.tables.autograd import Front
from hotbed.tables.group.keyspace import KeyRequest
from hotbed.tables.inputs import BatchInputs, flatten, read_inputs
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.ownership import PreparedBatch, RoutedBatch

Pooled = Literal["auto", "always", "never"]


class SharingOptions(NamedTuple):
    """How ranks share rows; the same on all of them."""

    gradients: Literal["mean", "sum"]
    traffic: TrafficType
    mode: Mode
    pooled: Pooled
    once_per_node: bool


class RankExchange:
    """The exchange of one ShardedTables, whose groups hold this rank's rows."""

    def __init__(self, tables: EmbeddingTables, ranks: FrontContext, sharing: SharingOptions) -> None:
        self._groups, self._inputs, self._features = tables.groups, tables.group_inputs, tables.features
        self._ranks, self._mode, self._pooled = ranks, sharing.mode, sharing.pooled
        self._once_per_node = sharing.once_per_node and ranks.mesh.nodes > 1 < ranks.mesh.local
        if self._once_per_node:
            self._pooled = "never"  # a sum of a part of a bag is one rank's
        scale = 1.0 if sharing.gradients == "sum" else 1.0 / ranks.mesh.size
        self._sharded = [
            ShardFront(ranks, group, number, scale, sharing.traffic) for number, group in enumerate(self._groups)
        ]
        each = zip(self._sharded, self._groups, _replica_rooms(tables, ranks.mesh))
        self._ways = [choose_front(sharing.mode, front, ranks.mesh, group, room) for front, group, room in each]
        self.fronts: list[Front] = [*self._ways]
        self._is_cached = bool(tables.caches)
        self._num_calls, self._trains = 0, False
        self._is_reported = False  # the other ranks know the outcome of the call, or will
        self._idle: list[Mesh] = []  # meshes of feeds that have ended

    @property
    def replica_bytes(self) -> int:
        """Device memory of replicas and their index."""
        return sum(way.replica_bytes for way in self._ways)

    @property
    def modes(self) -> list[dict[str, Any]]:
        """What mode="auto" has chosen so far, by group."""
        return [way.choice.figures() for way in self._ways if isinstance(way, AutoFront) and way.choice is not None]

    @property
    def replicated(self) -> dict[int, ReplicatedFront]:
        """The fronts of groups whose batches must fit into replicas, by number."""
        return {number: way for number, way in enumerate(self._ways) if isinstance(way, ReplicatedFront)}

    @property
    def _device(self) -> torch.device:
        return self._groups[0].records.device

    def begin_call(self, trains: bool) -> None:
        """One more call of the tables, on every rank."""
        self._is_reported = False
        self._num_calls += 1
        self._trains = trains

    def refuse_call(self, error: BaseException) -> None:
        """The call has failed here; report it to the other ranks, unless they know or will."""
        if not self._is_reported:
            self._is_reported = True
            self._ranks.order.refuse(error)

    def agree(self, fronts: Sequence[Front], lookups: Lookups, factor: float, number: int) -> None:
        """A RankError on all ranks unless all update these groups, in the same step and at the same rate."""
        groups = [] if len(fronts) == len(self.fronts) else sorted(self.fronts.index(front) for front in fronts)
        call = route_of(requests_of(lookups)).call
        self._ranks.order.meet("is in a backward pass and updates rows", call, groups, update=RowUpdate(number, factor))

    def refuse(self, error: BaseException) -> None:
        """Report to the other ranks that this one does not do what comes next."""
        self._ranks.order.refuse(error)

    def refuse_batch(self, error: BaseException) -> None:
        """Other ranks call the tables with their part of the batch, and learn of it there."""
        self._num_calls += 1
        self._ranks.order.refuse(error)

    def rows_replaced(self) -> None:
        """Replicas are no longer valid; called on all ranks."""
        for way in self._ways:
            way.forget()

    def new_stage(self) -> RankStage:
        """A mesh for each feed: each exchanges requests in a thread of its own, and feeds have no common order."""
        self._ranks.order.meet("begins to prefetch")
        return RankStage(self, self._idle.pop() if self._idle else self._ranks.mesh.apart())

    def release(self, mesh: Mesh) -> None:
        """A feed has ended."""
        self._idle.append(mesh)

    def routed(self, batches: Iterable[tuple[Any, Any, Any]], mesh: Mesh) -> Iterator[RoutedBatch]:
        """(batch, ids, bags) of this rank, with requests exchanged ahead of time."""
        num_groups = len(self._groups)
        done = False  # the other ranks need no further message
        try:
            for batch, ids, bags in batches:
                given = read_inputs(self._features, ids, bags, self._device)
                wanted = self._wanted(given)
                done = True  # an error from here on occurs on every rank
                routes = self._settled(mesh, wanted)
                done = False
                yield RoutedBatch(batch, given, partial(self.requested_lookups, routes))
            done = True
            end_routes(mesh, num_groups, True, self._device)
        except RanksLeft:
            done = True
        except GeneratorExit:
            raise
        except BaseException as error:
            if not done:
                done = True
                refuse_routes(mesh, num_groups, error, self._device)
            raise
        finally:
            if not done:
                with suppress(RanksLeft):
                    end_routes(mesh, num_groups, False, self._device)

    def routes(self, given: BatchInputs) -> list[Route]:
        """Exchange requests for rows between all ranks; a collective."""
        wanted = self._wanted(given)
        self._meet(prefetched=False)
        routes = self._settled(self._ranks.mesh, wanted)
        self._is_reported = not self._is_cached  # with a cache, ranks meet again when rows are in place
        return routes

    def _meet(self, *, prefetched: bool) -> None:
        """Check with the other ranks before a batch is looked up."""
        self._is_reported = True
        kind = "training batch" if self._trains else "batch"
        what = f"looks up a {kind}{' of a prefetch' if prefetched else ''}{'' if self._trains else ' without training'}"
        self._ranks.order.meet(what, self._num_calls)

    def _settled(self, mesh: Mesh, wanted: list[WantedRows]) -> list[Route]:
        routes = make_routes(mesh, wanted, self._ranks.mesh, once_per_node=self._once_per_node)
        if self._mode == "sharded":
            return routes
        wants, began = [way.wants for way in self._ways], time.perf_counter()
        routes = with_unions(mesh, routes, [group.keyspace.most_rows for group in self._groups], wants)
        if mesh is self._ranks.mesh:  # else a feed does it ahead of time
            for route in routes:
                if route.union is not None:
                    route.union.seconds = (time.perf_counter() - began) / len(routes)
        return [way.checked(route) for way, route in zip(self._ways, routes)]

    def requested_lookups(self, routes: list[Route], learns: bool) -> list[Lookups]:
        """The lookups that all ranks request from this one, by group. To dynamic ids they are the next training batch."""
        found = []
        for group, front, route in zip(self._groups, self._sharded, routes):
            request = KeyRequest(route.keys, route.tables, group.keyspace.most_rows)
            keys, origin = group.keyspace.answer(request, route.times, learns)
            if learns and front.shared is not None:
                keys = front.shared.behind(keys)
            count = keys.shape[0]
            requested = Lookups(keys, (Span("rows", 0, count, 1),), count, origin=origin, route=route)
            if route.starts is not None:
                vectors = torch.arange(route.routing.num_received, device=keys.device)
                requested = requested._replace(num_out=vectors.shape[0], bags=Bags(route.starts, vectors))
            found.append(requested)
        return found

    def _wanted(self, given: BatchInputs) -> list[WantedRows]:
        """Own lookups by group, checked."""
        found = []
        for group, inputs, way, sharded in zip(self._groups, self._inputs, self._ways, self._sharded):
            want = wanted_of(group, partial(flatten, inputs=inputs, given=given))
            # Replicas hold rows, and mode="auto" must not change a bit; occurrences are counted by row.
            want = want._replace(counted=group.optimizer.scale_by_count)
            may_pool = way is sharded and want.tables is None and self._ranks.mesh.size > 1 and self._pooled != "never"
            tables = tables_in_parts(inputs, given) if may_pool else None
            if tables is not None:
                want = want._replace(bags=PooledBags(tables, sharded.row_bytes, self._pooled == "always"))
            found.append(want)
        return found

    def settle(self, given: BatchInputs, planned: PreparedBatch | None) -> list[Route]:
        """The requests for a batch stay valid, even if its ids have changed since."""
        return self.routes(given) if planned is None else [route_of(each) for each in planned.lookups]

    def wishes(self, given: BatchInputs, settled: Any, learns: bool) -> list[Lookups]:
        """The lookups that all ranks request from this one."""
        return self.requested_lookups(settled, learns)

    def calls(self, placed: list[Lookups], planned: PreparedBatch | None) -> list[Lookups]:
        """The rank's own lookups, with the requests to this rank."""
        if planned is not None:
            self._meet(prefetched=True)
        elif self._is_cached:  # the rows of a rank may not have fit
            self._is_reported = True
            self._ranks.order.meet("has the rows of a batch in place", self._num_calls)
        return [route_of(each).own._replace(requested=self._numbered(each)) for each in placed]

    def _numbered(self, requested: Lookups) -> Lookups:
        return requested._replace(route=route_of(requested)._replace(call=self._num_calls))


def _replica_rooms(tables: EmbeddingTables, mesh: Mesh) -> list[ReplicaRoom]:
    """By group; budgets of ranks may differ, and replicas are the same on all. A collective."""
    unlimited = 1 << 62
    name, budget = tables.cache_budget
    rooms = [unlimited if room is None else room for room in tables.replica_rooms]
    ranks = gather_numbers(mesh, [budget, *rooms, *(group.num_rows for group in tables.groups)], tables.device)
    least, rows = ranks.min(0).values.tolist(), ranks.sum(0).tolist()[1 + len(rooms) :]
    return [
        ReplicaRoom(
            None if room == unlimited else room, None if group.keyspace.is_dynamic else num_rows, least[0], name
        )
        for group, room, num_rows in zip(tables.groups, least[1:], rows)
    ]


class RankStage:
    """The batches of one feed, whose requests are exchanged over a mesh of its own."""

    def __init__(self, exchange: RankExchange, mesh: Mesh) -> None:
        self._exchange, self._mesh = exchange, mesh

    def settle(self, batches: Iterable[tuple[Any, Any, Any]]) -> Iterator[RoutedBatch]:
        """(batch, ids, bags) of this rank, with requests exchanged ahead of time."""
        return self._exchange.routed(batches, self._mesh)

    def close(self) -> None:
        """The next feed may have the mesh."""
        self._exchange.release(self._mesh)
