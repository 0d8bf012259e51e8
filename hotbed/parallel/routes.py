"""Which rank requests which rows from which: the lookups of one batch, exchanged between all ranks.

A rank requests the rows of its lookups, each once, or sums of parts of bags (see requests.py). A route has the keys that other
ranks request from this one, by requesting rank, and the place of every own lookup among the vectors that come back. Vectors
and gradients then travel along the route as often as needed, without keys.

All ranks make the routes of the same batches in the same order. A rank that cannot (because of a bad id, say) reports it to the
others, and all of them stop.

`Union`: the rows of one batch that any rank needs: each once, in the same order on every rank, grouped by owner. An owner
removes duplicates from the requests of all ranks, sends its list to every rank, and sends each requesting rank the places of
its rows in the list. Like routes, unions are made ahead of time, by all ranks in the same order.

`wanted_of`: what a rank needs from the owners: the keys of its lookups, or dynamic ids themselves. Only the owner of a dynamic
id knows its key, and it has to know how often each id occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hotbed.errors import RankError
from hotbed.ops.keys import FirstBad
from hotbed.ops.lookups import Lookups, Origin, Span
from hotbed.ops.partition import OwnerPartition, partition_by_owner
from hotbed.parallel.collect import (
    RowRouting,
    carry,
    carry_back,
    gather,
    gather_numbers,
    make_routings,
    merge_in_node,
)
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.requests import SMALL, OwnerRequest, WantedRows, make_request
from hotbed.tables.group.group import TableGroup
from hotbed.tables.inputs import BatchInputs, GroupInputs

# Of one group: no union; one whose keys are valid for this batch only (dynamic ids); one whose rows may be kept.
UnionKind = Literal["none", "once", "kept"]
_NOT_WANTED = -1
_FAILED, _ENDED, _LEFT = 1, 2, 3  # messages of a rank that has no batch


class Route(NamedTuple):
    """The rows of one batch in one group, between ranks."""

    mesh: Mesh  # that carries vectors
    own: Lookups  # of this rank; slots are places among the vectors that come back
    routing: RowRouting  # vectors that this rank requests of each, and each of this one: rows, or sums of parts of bags
    keys: Tensor  # int64, by requesting rank, or by node if its ranks request together: local keys, or dynamic ids
    starts: Tensor | None = None  # int64 [V + 1]: the keys of each vector; None if each is a row
    tables: Tensor | None = None  # int32, of dynamic ids
    times: Tensor | None = None  # int32, their occurrences in the batch of their rank
    union: Union | None = None  # of the rows that all ranks request, if there are replicas
    num_slices: int = 1  # of every vector: one from each rank, where rows are placed by column
    call: int = 0  # of the tables

    @property
    def num_vectors(self) -> int:
        """Vectors that come back."""
        return self.routing.num_sent // self.num_slices

    def kept_union(self) -> Union:
        """The union, where the tables have replicas."""
        assert self.union is not None, "replicas need the rows that all ranks request"
        return self.union

    def bring(self, vectors: Tensor) -> Tensor:
        """Vectors [V, D] of the keys -> those that this rank requested [num_vectors, D]."""
        found = carry_back(self.mesh, vectors, self.routing)
        S, V = self.num_slices, self.num_vectors
        return found if S == 1 else found.view(S, V, found.shape[1]).transpose(0, 1).reshape(V, S * found.shape[1])

    def give(self, gradients: Tensor) -> Tensor:
        """The inverse: gradients of the requested vectors -> to the owners."""
        S, V = self.num_slices, self.num_vectors
        if S > 1:
            width = gradients.shape[1] // S
            gradients = gradients.view(V, S, width).transpose(0, 1).reshape(S * V, width)
        return carry(self.mesh, gradients, self.routing)


def requests_of(lookups: Lookups) -> Lookups:
    """What all ranks request from this one, of the lookups of one of its batches."""
    assert lookups.requested is not None, "lookups of several ranks come with their requests"
    return lookups.requested


def route_of(requested: Lookups) -> Route:
    """The route of requested lookups."""
    assert isinstance(requested.route, Route), "requested lookups have a route"
    return requested.route


def make_routes(
    mesh: Mesh, wanted: Sequence[WantedRows], rows_over: Mesh, *, once_per_node: bool = False
) -> list[Route]:
    """The routes of one batch by group, exchanged over `mesh`; `once_per_node`: see `merge_in_node`."""
    requests = [make_request(want) for want in wanted]
    numbers = [numbers for request in requests for numbers in (request.num_keys, request.num_vectors)]
    counts = torch.tensor([*numbers, [0] * mesh.size], device="cpu").t().contiguous()
    *settled, said = make_routings(mesh, counts, wanted[0].keys.device)
    _check(mesh, said.receive)
    found = []
    for want, request, of_keys, of_vectors in zip(wanted, requests, settled[::2], settled[1::2]):
        route = _route(mesh, request, of_keys, of_vectors, want.num_local if once_per_node else 0)
        found.append(route._replace(mesh=rows_over, num_slices=want.shard.num_slices))
    return found


def refuse_routes(mesh: Mesh, num_groups: int, error: BaseException, device: torch.device) -> None:
    """Instead of `make_routes`, on a rank that has failed: all others stop and name it."""
    _check(mesh, _announce(mesh, num_groups, _FAILED, device), f"{type(error).__name__}: {error}")


def end_routes(mesh: Mesh, num_groups: int, ended: bool, device: torch.device) -> None:
    """Instead of `make_routes`: this rank has no more batches, or (not `ended`) wants none."""
    _check(mesh, _announce(mesh, num_groups, _ENDED if ended else _LEFT, device), ends=True)


class RanksLeft(Exception):  # noqa: N818  not an error: the loop was left
    """Another rank wants no more batches, so there are none."""


def _announce(mesh: Mesh, num_groups: int, what: int, device: torch.device) -> list[int]:
    """Send a message instead of requests; returns the messages of all ranks."""
    counts = torch.zeros(mesh.size, 2 * num_groups + 1, dtype=torch.int64, device="cpu")
    counts[:, -1] = what
    return make_routings(mesh, counts, device)[-1].receive


def _route(mesh: Mesh, request: OwnerRequest, of_keys: RowRouting, of_vectors: RowRouting, num_keys: int) -> Route:
    """`num_keys`: of a rank, at most, where ranks of a node request a row once; else 0. Marks are of each rank."""
    if num_keys and request.marks is None and of_vectors.held is not None:
        assert request.num_keys == request.num_vectors, "parts of bags are of one rank"
        merged, keys = merge_in_node(mesh, request.keys, of_vectors, num_keys)
        return Route(mesh, request.own, merged, keys.to(torch.int64))
    keys = carry(mesh, request.keys, of_keys).to(torch.int64)
    route = Route(mesh, request.own, of_vectors, keys)
    if request.marks is not None:
        marks = carry(mesh, request.marks, of_keys)
        return route._replace(tables=marks[:, 0] if marks.shape[1] > 1 else None, times=marks[:, -1])
    if of_keys.num_received == of_vectors.num_received:
        return route
    is_first = keys >= 0
    starts = torch.cat([is_first.nonzero().squeeze(1), torch.tensor([keys.shape[0]], device=keys.device)])
    return route._replace(keys=torch.where(is_first, keys, ~keys), starts=starts)


def _check(mesh: Mesh, said: list[int], mine: str = "", *, ends: bool = False) -> None:
    """Raise if other ranks do not continue; all ranks come to the same result."""
    if _FAILED in said:
        messages = mesh.flat.gather_text(mine)
        others = [f"rank {rank}: {messages[rank]}" for rank, what in enumerate(said) if what == _FAILED]
        if not mine:
            raise RankError(f"this rank stops because of another. {'; '.join(others)}")
    elif _LEFT in said:
        raise RanksLeft
    elif _ENDED in said and said != [_ENDED] * mesh.size:
        what = f"this rank has another batch, but rank {said.index(_ENDED)} has none"
        if ends:
            what = "this rank has no more batches, but others have"
        raise RankError(f"{what}. Every rank needs equally many; one without samples may yield an empty batch.")


class Union:
    """U rows of one group, by owner."""

    def __init__(self, sizes: Sequence[int], standing: Tensor, places: Tensor, keys: Tensor | None) -> None:
        self.sizes = list(sizes)  # [W] rows of each owner
        self.starts = [0, *accumulate(self.sizes)]  # [W + 1]
        self.standing = standing  # int64 [U of this rank]: the place of each own row among the requested keys
        self.places = places  # int64 [L]: the row of each own lookup; -1 is padding
        self.keys = keys  # int64 [U], distinct: the key on its owner x W + the owner; on CUDA ascending
        self.order: Tensor | None = None  # int64 [U], on CUDA: the places of the keys
        if keys is not None and keys.device.type == "cuda":
            self.keys, self.order = torch.sort(keys)
        self.seconds = 0.0  # that training waited for it
        self.version = -1  # of the replicas, when `slots` were assigned
        self.slots = places[:0]  # int64 [U + 1]: where the rows are; the last is -1

    @property
    def num_rows(self) -> int:
        """U."""
        return self.starts[-1]


def with_unions(
    mesh: Mesh, routes: Sequence[Route], num_keys: Sequence[int], wants: Sequence[UnionKind]
) -> list[Route]:
    """The routes of one batch, with unions if all ranks want them; a collective over `mesh`.

    `num_keys` is the most keys of a rank in each group.
    """
    own = [None if want == "none" else _distinct(route) for route, want in zip(routes, wants)]
    mine = [_NOT_WANTED if one is None else one.counts[0] for one in own]
    sizes_GW = gather_numbers(mesh, mine, routes[0].keys.device).t().tolist()
    found = []
    for g, (route, one, sizes) in enumerate(zip(routes, own, sizes_GW)):
        if one is not None and min(sizes) > _NOT_WANTED:
            keys = _keys(mesh, one.keys, sizes, num_keys[g] < SMALL) if wants[g] == "kept" else None
            found.append(route._replace(union=_union(mesh, route, one, sizes, keys)))
        else:
            found.append(route)
    return found


def _distinct(route: Route) -> OwnerPartition:
    """The rows that other ranks request from this one, each once."""
    return partition_by_owner(route.keys, None, lambda keys, _: torch.zeros_like(keys), 1, route.tables)


def _keys(mesh: Mesh, keys: Tensor, sizes: list[int], small: bool) -> Tensor:
    """A name [U] for every row of the union."""
    lists = gather(mesh, keys.to(torch.int32) if small else keys, sizes).to(torch.int64)
    return lists * mesh.size + _repeated(torch.arange(mesh.size, device="cpu"), sizes, keys.device)


def _union(mesh: Mesh, route: Route, own: OwnerPartition, sizes: list[int], keys: Tensor | None) -> Union:
    device = route.keys.device
    placed = carry_back(mesh, own.places.to(torch.int32), route.routing).to(torch.int64)
    starts = torch.tensor([0, *accumulate(sizes)][:-1], device="cpu")
    rows = placed + _repeated(starts, route.routing.send, device)
    places = torch.cat([rows, rows.new_full((1,), -1)])[route.own.slots]  # the place of padding is the last
    standing = torch.empty_like(own.keys)
    standing[own.places] = torch.arange(own.places.shape[0], device=device)  # any of them: they are the same row
    return Union(sizes, standing, places, keys)


def _repeated(values: Tensor, times: Sequence[int], device: torch.device) -> Tensor:
    return torch.repeat_interleave(values, torch.tensor(times, device="cpu")).to(device)


def wanted_of(group: TableGroup, flattened: Callable[[Any], Lookups]) -> WantedRows:
    """The rows of one group; `flattened` gives the lookups of a batch for an object that maps ids to keys."""
    lookups = flattened(_Places(group))
    keys, tables, num_local = group.keyspace.request(lookups)
    return WantedRows(lookups, keys, group.shard, tables, num_local)


def tables_in_parts(inputs: GroupInputs, given: BatchInputs) -> tuple[int, ...] | None:
    """The table of every span, or -1 where owners cannot pool: features with weights, sequences, tables without bags."""
    features = [inputs.features[j] for j in inputs.order]
    tables = dict.fromkeys(feature.table for feature in features if feature.name in given.bags)
    for feature in features:
        bag = given.bags.get(feature.name)
        if feature.pooling == "none" or (bag is not None and bag.weights is not None):
            tables.pop(feature.table, None)
    number_of_table = {table: number for number, table in enumerate(tables)}
    return tuple(number_of_table.get(feature.table, -1) for feature in features) if tables else None


class _Places:
    """Takes the place of a group whose rows are on several ranks: keys are those of requests to their owners."""

    def __init__(self, group: TableGroup) -> None:
        self._group = group
        self.records, self.refuse = group.records, group.refuse

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Origin]:
        """See Keyspace.places."""
        return self._group.keyspace.places(ids, spans, tables)
