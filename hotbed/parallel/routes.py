"""Who asks whom for which rows: the look-ups of one batch, settled between all ranks.

In: every rank's look-ups of a group, whose slots are keys. What it asks for are rows, each once, or sums of parts of bags (see
asks.py). Out: the keys that this rank is asked for, by asking rank, and where every own look-up finds its vector among those
that come back. Vectors and gradients then travel along the route as often as needed without another word about keys.

All ranks make the routes of the same batches in the same order. A rank that cannot (a bad id, say) tells the others, and all
of them stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.errors import RankError
from hotbed.ops.lookups import Lookups
from hotbed.ops.shard import Shard
from hotbed.parallel.asks import Ask, Wanted, ask_of
from hotbed.parallel.collect import Passage, carry, carry_back, passages
from hotbed.parallel.mesh import Mesh

_FAILED, _ENDED, _LEFT = 1, 2, 3  # what a rank says that has no batch to settle


class Route(NamedTuple):
    """The rows of one batch in one group, between ranks."""

    mesh: Mesh  # that vectors travel over
    own: Lookups  # of this rank; slots are places among the vectors that come back
    passage: Passage  # vectors this rank asks of each, and each asks of this one: rows, or sums of parts of bags
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


def make_routes(mesh: Mesh, wanted: Sequence[Wanted], rows_over: Mesh) -> list[Route]:
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


def _route(mesh: Mesh, ask: Ask, of_keys: Passage, of_vectors: Passage) -> Route:
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
