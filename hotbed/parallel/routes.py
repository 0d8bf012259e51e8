"""Who asks whom for which rows: the look-ups of one batch, settled between all ranks.

In: every rank's look-ups of a group, whose slots are keys. What it asks for are rows, each once, or sums of parts of bags (see
asks.py). Out: the keys that this rank is asked for, by asking rank, and where every own look-up finds its vector among those
that come back. Vectors and gradients then travel along the route as often as needed without another word about keys.

All ranks make the routes of the same batches in the same order. A rank that cannot (a bad id, say) tells the others, and all
of them stop.

`Union`: the rows of one batch that any rank wants: each once, in the same order on every rank, with their owners side by side.

In: a route, which tells an owner what it is asked for. The owner strikes out what several ranks ask for, tells everyone its
list, and tells those who ask where in the list their rows stand. Out: the union, the same on all ranks, and the place in it
of each own look-up. Like routes, unions are made ahead of time, by all ranks in the same order.

`wanted_of`: what a rank wants of the owners: the keys of its look-ups, or, where ids are dynamic, the ids themselves.

Keys of dynamic ids are their owner's business, and it has to know how often each id comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hotbed.errors import RankError
from hotbed.ops.keys import FirstBad
from hotbed.ops.lookups import Lookups, Span
from hotbed.ops.partition import OwnerPartition, deal
from hotbed.ops.shard import Shard
from hotbed.parallel.asks import SMALL, OwnerRequest, WantedRows, ask_of
from hotbed.parallel.collect import RowRouting, carry, carry_back, gather, gather_numbers, passages
from hotbed.parallel.mesh import Mesh
from hotbed.tables.group.group import TableGroup
from hotbed.tables.inputs import BatchInputs, GroupInputs

# Of one group: no union; one whose rows have no names beyond this batch (dynamic ids); one whose rows may be kept.
Want = Literal["none", "once", "kept"]
_NOT_WANTED = -1
_FAILED, _ENDED, _LEFT = 1, 2, 3  # what a rank says that has no batch to settle


class Route(NamedTuple):
    """The rows of one batch in one group, between ranks."""

    mesh: Mesh  # that vectors travel over
    own: Lookups  # of this rank; slots are places among the vectors that come back
    passage: RowRouting  # vectors this rank asks of each, and each asks of this one: rows, or sums of parts of bags
    keys: Tensor  # int64, by asking rank: local keys, or dynamic ids
    starts: Tensor | None = None  # int64 [V + 1]: the keys of each vector; None where each is a row
    tables: Tensor | None = None  # int32, of dynamic ids
    times: Tensor | None = None  # int32, how often their rank's batch has them
    union: Any = None  # of the rows that all ranks ask for, where replicas are
    call: int = 0  # of the tables

    @property
    def num_vectors(self) -> int:
        """That come back."""
        return self.passage.num_sent

    def bring(self, vectors: Tensor) -> Tensor:
        """Vectors [V, D] of the keys -> those that this rank has asked for [num_vectors, D]."""
        return carry_back(self.mesh, vectors, self.passage)

    def give(self, gradients: Tensor) -> Tensor:
        """The other way: what belongs to the vectors that were asked for -> to the owners."""
        return carry(self.mesh, gradients, self.passage)


def make_routes(mesh: Mesh, wanted: Sequence[WantedRows], rows_over: Mesh) -> list[Route]:
    """The routes of one batch by group, settled over `mesh`."""
    asks = [ask_of(want, Shard(mesh.rank, mesh.size)) for want in wanted]
    numbers = [numbers for ask in asks for numbers in (ask.num_keys, ask.num_vectors)]
    counts = torch.tensor([*numbers, [0] * mesh.size], device="cpu").t().contiguous()
    *settled, said = passages(mesh, counts, wanted[0].keys.device)
    _check(mesh, said.receive)
    return [_route(mesh, ask, *both)._replace(mesh=rows_over) for ask, *both in zip(asks, settled[::2], settled[1::2])]


def refuse_routes(mesh: Mesh, num_groups: int, error: BaseException, device: torch.device) -> None:
    """Instead of `make_routes`, on a rank that cannot: all others stop, naming it."""
    _check(mesh, _told(mesh, num_groups, _FAILED, device), f"{type(error).__name__}: {error}")


def end_routes(mesh: Mesh, num_groups: int, ended: bool, device: torch.device) -> None:
    """Instead of `make_routes`: this rank has no batch any more, or (not `ended`) wants none."""
    _check(mesh, _told(mesh, num_groups, _ENDED if ended else _LEFT, device), ends=True)


class RanksLeft(Exception):  # noqa: N818  not an error: the loop was left
    """Another rank wants no further batches, so there are none."""


def _told(mesh: Mesh, num_groups: int, what: int, device: torch.device) -> list[int]:
    counts = torch.zeros(mesh.size, 2 * num_groups + 1, dtype=torch.int64, device="cpu")
    counts[:, -1] = what
    return passages(mesh, counts, device)[-1].receive


def _route(mesh: Mesh, ask: OwnerRequest, of_keys: RowRouting, of_vectors: RowRouting) -> Route:
    keys = carry(mesh, ask.keys, of_keys).to(torch.int64)
    route = Route(mesh, ask.own, of_vectors, keys)
    if ask.marks is not None:
        marks = carry(mesh, ask.marks, of_keys)
        return route._replace(tables=marks[:, 0] if marks.shape[1] > 1 else None, times=marks[:, -1])
    if of_keys.num_received == of_vectors.num_received:
        return route
    is_first = keys >= 0
    starts = torch.cat([is_first.nonzero().squeeze(1), torch.tensor([keys.shape[0]], device=keys.device)])
    return route._replace(keys=torch.where(is_first, keys, ~keys), starts=starts)


def _check(mesh: Mesh, said: list[int], mine: str = "", *, ends: bool = False) -> None:
    """Raise where other ranks do not go on; all of them come to the same result."""
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
        self.standing = standing  # int64 [U of this rank]: where each own row stands among the keys it is asked for
        self.places = places  # int64 [L]: the row of each own look-up; -1 is padding
        self.keys = keys  # int64 [U], distinct: the key on its owner x W + the owner; on CUDA ascending
        self.order: Tensor | None = None  # int64 [U], on CUDA: the places of the keys
        if keys is not None and keys.device.type == "cuda":
            self.keys, self.order = torch.sort(keys)
        self.turn = -1  # of the replicas, when they gave out `slots`
        self.slots = places[:0]  # int64 [U + 1]: where the rows are; the last is -1

    @property
    def num_rows(self) -> int:
        """U."""
        return self.starts[-1]


def with_unions(mesh: Mesh, routes: Sequence[Route], num_keys: Sequence[int], wants: Sequence[Want]) -> list[Route]:
    """The routes of one batch, with unions where all ranks want them; a collective over `mesh`.

    `num_keys` are those that a rank may have in each group.
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
    """What this rank is asked for, each once."""
    return deal(route.keys, None, lambda keys, _: torch.zeros_like(keys), 1, route.tables)


def _keys(mesh: Mesh, keys: Tensor, sizes: list[int], small: bool) -> Tensor:
    """A name [U] for every row of the union."""
    lists = gather(mesh, keys.to(torch.int32) if small else keys, sizes).to(torch.int64)
    return lists * mesh.size + _repeated(torch.arange(mesh.size, device="cpu"), sizes, keys.device)


def _union(mesh: Mesh, route: Route, own: OwnerPartition, sizes: list[int], keys: Tensor | None) -> Union:
    device = route.keys.device
    told = carry_back(mesh, own.places.to(torch.int32), route.passage).to(torch.int64)
    starts = torch.tensor([0, *accumulate(sizes)][:-1], device="cpu")
    rows = told + _repeated(starts, route.passage.send, device)
    places = torch.cat([rows, rows.new_full((1,), -1)])[route.own.slots]  # that of padding is the last
    standing = torch.empty_like(own.keys)
    standing[own.places] = torch.arange(own.places.shape[0], device=device)  # any of them will do: they are one row
    return Union(sizes, standing, places, keys)


def _repeated(values: Tensor, times: Sequence[int], device: torch.device) -> Tensor:
    return torch.repeat_interleave(values, torch.tensor(times, device="cpu")).to(device)


def wanted_of(group: TableGroup, flattened: Callable[[Any], Lookups]) -> WantedRows:
    """Of one group; `flattened` gives the look-ups of a batch for what makes keys of ids."""
    lookups = flattened(_Places(group))
    keys, tables, num_local = group.keyspace.asked(lookups)
    return WantedRows(lookups, keys, group.shard.owner_of_any, tables, num_local)


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
    """Stands in for a group whose rows other ranks have, too: keys are what a question to their owners is made of."""

    def __init__(self, group: TableGroup) -> None:
        self._group = group
        self.records, self.refuse = group.records, group.refuse

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Any]:
        """See Keyspace.places."""
        return self._group.keyspace.places(ids, spans, tables)
