"""Who asks whom for which rows: the look-ups of one batch, settled between all ranks.

In: every rank's look-ups of a group, whose slots are keys. Each key is asked of its owner once, however often the batch has
it. Out: the keys that this rank is asked for, by asking rank, and where every own look-up finds its row among those that
come back. Rows and gradients then travel along the route as often as needed without another word about keys.

All ranks make the routes of the same batches in the same order. A rank that cannot (a bad id, say) tells the others, and all
of them stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.errors import RankError
from hotbed.ops.deal import Dealt, deal
from hotbed.ops.lookups import Lookups
from hotbed.parallel.collect import exchange_along, swapped_counts
from hotbed.parallel.mesh import Mesh
from hotbed.shard import Shard

_SMALL = 1 << 31  # keys below travel in 32 bits


class Route(NamedTuple):
    """The rows of one batch in one group, between ranks."""

    mesh: Mesh
    own: Lookups  # of this rank; slots are places among the rows that come back
    asked: list[int]  # [W] rows this rank asks of each rank
    asking: list[int]  # [W] rows each rank asks of this one
    keys: Tensor  # int64 [sum of asking], local, by asking rank

    @property
    def num_rows(self) -> int:
        """That come back, each once."""
        return sum(self.asked)

    def bring(self, rows: Tensor) -> Tensor:
        """Rows [sum of asking, D] of the keys -> those that this rank has asked for [num_rows, D]."""
        return exchange_along(self.mesh, rows, self.asking, self.asked)

    def give(self, rows: Tensor) -> Tensor:
        """The other way: what belongs to the rows that were asked for -> to their owners."""
        return exchange_along(self.mesh, rows, self.asked, self.asking)


def make_routes(mesh: Mesh, parts: Sequence[tuple[int, Lookups]]) -> list[Route]:
    """The routes of one batch; parts are (number of keys there are, look-ups) of every group."""
    shard = Shard(mesh.rank, mesh.size)
    dealt = [deal(lookups.slots, shard.owner_of(lookups.slots), mesh.size) for _, lookups in parts]
    counts = torch.tensor([[*(d.counts[rank] for d in dealt), 0] for rank in range(mesh.size)])
    asking = swapped_counts(mesh.flat, counts, parts[0][1].slots.device)
    _check(mesh, asking)
    return [_route(mesh, shard, part, one, asking[:, g].tolist()) for g, (part, one) in enumerate(zip(parts, dealt))]


def refuse_routes(mesh: Mesh, num_groups: int, error: BaseException, device: torch.device) -> None:
    """Instead of `make_routes`, on a rank that cannot: all others stop, naming it."""
    counts = torch.zeros(mesh.size, num_groups + 1, dtype=torch.int64)
    counts[:, -1] = 1
    _check(mesh, swapped_counts(mesh.flat, counts, device), f"{type(error).__name__}: {error}")


def _route(mesh: Mesh, shard: Shard, part: tuple[int, Lookups], dealt: Dealt, asking: list[int]) -> Route:
    num_keys, lookups = part
    keys = shard.local_of(dealt.keys)
    if num_keys < _SMALL:
        keys = keys.to(torch.int32)
    received = exchange_along(mesh, keys, dealt.counts, asking).to(torch.int64)
    own = lookups._replace(slots=dealt.places, check=None, bad=None)
    return Route(mesh, own, dealt.counts, asking, received)


def _check(mesh: Mesh, asking: Tensor, mine: str = "") -> None:
    stopped = asking[:, -1].nonzero().squeeze(1).tolist()
    if not stopped:
        return
    messages = mesh.flat.gather_text(mine)
    others = [f"rank {rank}: {messages[rank]}" for rank in stopped if rank != mesh.rank]
    if others and not mine:
        raise RankError(f"this rank stops because of another. {'; '.join(others)}")
