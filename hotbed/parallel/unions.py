"""The rows of one batch that any rank wants: each once, in the same order on every rank, with their owners side by side.

In: a route, which tells an owner what it is asked for. The owner strikes out what several ranks ask for, tells everyone its
list, and tells those who ask where in the list their rows stand. Out: the union, the same on all ranks, and the place in it
of each own look-up. Like routes, unions are made ahead of time, by all ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from hotbed.ops.partition import Dealt, deal
from hotbed.parallel.collect import carry_back
from hotbed.parallel.gather import gather, gather_numbers
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.routes import Route

# Of one group: no union; one whose rows have no names beyond this batch (dynamic ids); one whose rows may be kept.
Want = Literal["none", "once", "kept"]
_SMALL = 1 << 31  # keys below travel in 32 bits
_NOT_WANTED = -1


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
            keys = _keys(mesh, one.keys, sizes, num_keys[g] < _SMALL) if wants[g] == "kept" else None
            found.append(route._replace(union=_union(mesh, route, one, sizes, keys)))
        else:
            found.append(route)
    return found


def _distinct(route: Route) -> Dealt:
    """What this rank is asked for, each once."""
    return deal(route.keys, None, lambda keys, _: torch.zeros_like(keys), 1, route.tables)


def _keys(mesh: Mesh, keys: Tensor, sizes: list[int], small: bool) -> Tensor:
    """A name [U] for every row of the union."""
    lists = gather(mesh, keys.to(torch.int32) if small else keys, sizes).to(torch.int64)
    return lists * mesh.size + _repeated(torch.arange(mesh.size, device="cpu"), sizes, keys.device)


def _union(mesh: Mesh, route: Route, own: Dealt, sizes: list[int], keys: Tensor | None) -> Union:
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
