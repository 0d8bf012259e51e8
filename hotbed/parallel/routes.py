"""Who asks whom for which rows: the look-ups of one batch, settled between all ranks.

In: every rank's look-ups of a group, whose slots are keys. Each key is asked of its owner once, however often the batch has
it. Out: the keys that this rank is asked for, by asking rank, and where every own look-up finds its row among those that
come back. Rows and gradients then travel along the route as often as needed without another word about keys.

All ranks make the routes of the same batches in the same order. A rank that cannot (a bad id, say) tells the others, and all
of them stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.errors import RankError
from hotbed.ops.deal import Dealt, Owners, deal
from hotbed.ops.lookups import Lookups
from hotbed.parallel.collect import Passage, carry, carry_back, passages
from hotbed.parallel.mesh import Mesh
from hotbed.shard import Shard

_SMALL = 1 << 31  # keys below travel in 32 bits
_FAILED, _ENDED, _LEFT = 1, 2, 3  # what a rank says that has no batch to settle


class Wanted(NamedTuple):
    """What this rank wants of one group."""

    lookups: Lookups  # slots are negative for padding
    keys: Tensor  # int64 [L], or dynamic ids
    owner_of: Owners
    tables: Tensor | None = None  # int32 [L], of dynamic ids
    num_local: int = 0  # keys that a rank may have


class Route(NamedTuple):
    """The rows of one batch in one group, between ranks."""

    mesh: Mesh  # that rows travel over
    own: Lookups  # of this rank; slots are places among the rows that come back
    passage: Passage  # rows this rank asks of each, and each asks of this one
    keys: Tensor  # int64 [rows that are asked for], by asking rank: local keys, or dynamic ids
    tables: Tensor | None = None  # int32, of dynamic ids
    times: Tensor | None = None  # int32, how often their rank's batch has them
    union: Any = None  # of the rows that all ranks ask for, where replicas are

    @property
    def num_rows(self) -> int:
        """That come back, each once."""
        return self.passage.num_sent

    def bring(self, rows: Tensor) -> Tensor:
        """Rows [.., D] of the keys -> those that this rank has asked for [num_rows, D]."""
        return carry_back(self.mesh, rows, self.passage)

    def give(self, rows: Tensor) -> Tensor:
        """The other way: what belongs to the rows that were asked for -> to their owners."""
        return carry(self.mesh, rows, self.passage)


def make_routes(mesh: Mesh, wanted: Sequence[Wanted], rows_over: Mesh) -> list[Route]:
    """The routes of one batch by group, settled over `mesh`."""
    dealt = [deal(want.keys, want.lookups.slots, want.owner_of, mesh.size, want.tables) for want in wanted]
    counts = torch.tensor([[*(d.counts[rank] for d in dealt), 0] for rank in range(mesh.size)])
    *settled, said = passages(mesh, counts, wanted[0].keys.device)
    _check(mesh, said.receive)
    return [_route(mesh, *each)._replace(mesh=rows_over) for each in zip(wanted, dealt, settled)]


def refuse_routes(mesh: Mesh, num_groups: int, error: BaseException, device: torch.device) -> None:
    """Instead of `make_routes`, on a rank that cannot: all others stop, naming it."""
    _check(mesh, _told(mesh, num_groups, _FAILED, device), f"{type(error).__name__}: {error}")


def end_routes(mesh: Mesh, num_groups: int, ended: bool, device: torch.device) -> None:
    """Instead of `make_routes`: this rank has no batch any more, or (not `ended`) wants none."""
    _check(mesh, _told(mesh, num_groups, _ENDED if ended else _LEFT, device), ends=True)


class RanksLeft(Exception):  # noqa: N818  not an error: the loop was left
    """Another rank wants no further batches, so there are none."""


def _told(mesh: Mesh, num_groups: int, what: int, device: torch.device) -> list[int]:
    counts = torch.zeros(mesh.size, num_groups + 1, dtype=torch.int64)
    counts[:, -1] = what
    return passages(mesh, counts, device)[-1].receive


def _route(mesh: Mesh, want: Wanted, dealt: Dealt, passage: Passage) -> Route:
    own = want.lookups._replace(slots=dealt.places, check=None, bad=None, sense=None)
    if dealt.kinds is not None:
        marks = torch.stack([dealt.kinds, dealt.times], dim=1)
        keys, marks = (carry(mesh, part, passage) for part in (dealt.keys, marks))
        return Route(mesh, own, passage, keys, marks[:, 0], marks[:, 1])
    keys = Shard(mesh.rank, mesh.size).local_of(dealt.keys)
    narrow = keys.to(torch.int32) if want.num_local < _SMALL else keys
    return Route(mesh, own, passage, carry(mesh, narrow, passage).to(torch.int64))


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
