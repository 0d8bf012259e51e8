"""Replicated rows: the rows that any rank needs for a batch are at every rank, so a lookup is local (after MixCache).

Rows still have one owner, which keeps them with their optimizer state behind its own cache and stores. In front of that every
rank has replicas: the weights of recently used rows, the same rows on all ranks. Forward: rows of the union of all ranks'
batches without a replica come from their owners in one gather; then each rank looks up its own. Backward: sums of gradients go
to the owners, which add them in the order of the ranks and update; one gather distributes the new weights of the whole union.
Frequently used rows stay in the replicas from batch to batch.

Only the owner updates, and weights are distributed instead of summed gradients, which are as many bytes. So replicas have no
optimizer state, rows that come in are only as wide as their weights, the update runs once and not W times, and every value
equals that of sharded tables to the bit. The unions alone determine which rows have a replica: ranks agree without
communication. So rows are given replicas, and replicas their weights, inside a change (tables/transaction.py): where that is
broken off, they would be read as if they had arrived, and the ranks would disagree.

Replicas and their index have a share of the bytes of `hbm=` (tables/sizing/budget.py), the least of all ranks. A batch whose
union does not fit there is refused on all ranks, before any row moves.

`mode="all-reduce"` is the collective that MixCache publishes: replicas are whole records, the gradients of the union are summed
by one all-reduce of a dense block, and every rank applies the same update to its replicas, the owner to its rows too. The sum
is in the order of the collective: with more than two ranks its last bits may differ from those of sharded tables.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hotbed.cache import BYTES_PER_SLOT, Cache
from hotbed.cache.policies import LFU
from hotbed.errors import BudgetError
from hotbed.host.memory import in_words, typed
from hotbed.ops.lookup import lookup
from hotbed.ops.lookup.reference import result_type, rows_of
from hotbed.ops.lookups import Lookups, Span
from hotbed.parallel.collect import gather
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.routes import Route, Union, UnionKind, requests_of, route_of
from hotbed.tables.group.group import TableGroup, UpdateStep
from hotbed.tables.sizing.enough import with_some_to_spare
from hotbed.tables.transaction import Change

if TYPE_CHECKING:
    from hotbed.parallel.shard_front import ShardFront

_ROOM = 4  # replicas, in unions of the largest batch, where there is room
Read = Callable[[Tensor], Tensor]  # places among the own rows of a union [n] -> their weights [n, D], as sent


class RowTally(NamedTuple):
    """Counts of the rows of this rank."""

    batches: int = 0
    requested: int = 0  # that it requested
    union: int = 0  # of its own that any rank requested
    new: int = 0  # of those, rows without a replica

    def plus(self, other: RowTally) -> RowTally:
        return RowTally(*(a + b for a, b in zip(self, other)))


class ReplicaRoom(NamedTuple):
    """The room of the replicas of one group; the same on all ranks."""

    num_bytes: int | None  # of replicas and their index; None: not limited
    num_rows: int | None  # that there are on all ranks; None: dynamic ids
    budget: int  # bytes, of which a share is for replicas
    name: str  # of the budget

    def most(self, per_replica: int) -> int | None:
        """Replicas that fit."""
        return None if self.num_bytes is None else self.num_bytes // per_replica


def replica_bytes(row: int, kept: bool) -> int:
    """Bytes of a replica: a row of float32, as that of a cache; with its part of the index if it is kept."""
    return row + (BYTES_PER_SLOT if kept else 0)


def num_replicas(union: int, room: ReplicaRoom, per_replica: int, kept: bool) -> int:
    """Replicas for unions of this many rows; some more where there is room."""
    wanted = _ROOM * union if kept else with_some_to_spare(union)
    limits = [limit for limit in (room.most(per_replica), room.num_rows) if limit is not None]
    return max(1, min([wanted, *limits]))


def refusal(room: ReplicaRoom, per_replica: int, union: int, needs: str) -> BudgetError:
    """The error for a union that does not fit."""
    assert room.num_bytes is not None, "every union fits where nothing is limited"
    name, enough = room.name, with_some_to_spare(union)
    amount = typed(room.budget * enough * per_replica / max(1, room.num_bytes))
    return BudgetError(
        f"{needs}, and {name}= has room for {room.most(per_replica):,} replicas of them at every rank: "
        f"{in_words(room.num_bytes)} of {in_words(room.budget)}, {per_replica} bytes each. Give {name}={amount!r} "
        f"(--{name} {amount}) or more, a larger share for replicas (replicas=, parallel.replicas), smaller batches, or "
        "mode='sharded' (parallel.mode), which has no replicas.",
        enough,
    )


class Replicas:
    """Weights [S, D] of rows of one group, or their whole records [S, W]; of the same rows on all ranks."""

    def __init__(self, mesh: Mesh, group: TableGroup, whole: bool, kept: bool, room: ReplicaRoom) -> None:
        self._mesh = mesh
        self._group = group
        self._whole = whole
        self._kept_over = kept  # rows stay from batch to batch
        self._room = room
        self.row_bytes = replica_bytes(4 * (group.layout.width if whole else group.layout.dim), kept)
        self.most = room.most(self.row_bytes)
        self._cache: Cache | None = None  # which row is where
        self.rows = torch.empty(0, 0, dtype=torch.float32, device="cpu")
        self.version = 0  # batches placed

    def place(self, union: Union, read: Read) -> int:
        """Give every row of a union a replica; returns how many of this rank's had none."""
        self._make_room(union.num_rows)
        slots, new = self._kept(union, union.keys) if union.keys is not None else self._start_over(union)
        self.version += 1
        union.version, union.slots = self.version, torch.cat([slots, slots.new_full((1,), -1)])
        bounds = torch.searchsorted(new, torch.tensor(union.starts, device=new.device)).tolist()
        first, stop = bounds[self._mesh.rank], bounds[self._mesh.rank + 1]
        mine = read(new[first:stop] - union.starts[self._mesh.rank])
        rows = gather(self._mesh, mine, [b - a for a, b in pairwise(bounds)])
        self.rows[slots[new]] = rows.to(self.rows.dtype)
        return int(stop - first)

    @property
    def num_bytes(self) -> int:
        """Bytes of replicas and their index."""
        return self.rows.nbytes + (0 if self._cache is None else self._cache.num_bytes)

    def refusal(self, num_rows: int, what: str = "a batch of all ranks") -> BudgetError:
        """The error for a union that does not fit."""
        tables = f"tables of dim {self._group.layout.dim} ({', '.join(self._group.members)})"
        return refusal(self._room, self.row_bytes, num_rows, f"{what} needs {num_rows:,} rows of {tables} at once")

    def refresh(self, union: Union, rows: Tensor) -> None:
        """All rows of a union have new weights; `rows` are those of this rank."""
        self.rows[union.slots[:-1]] = gather(self._mesh, rows, union.sizes).to(self.rows.dtype)

    def forget(self) -> None:
        """Rows may have changed other than by updates; called on all ranks between the same two batches."""
        self._drop()
        self.version += 1

    def _kept(self, union: Union, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(slots [U] of the rows, ascending places in the union of missing ones)."""
        if self._cache is None:
            with torch.inference_mode(False):  # cache and replicas outlive a first batch in inference mode
                self._cache = Cache(self.rows.shape[0], LFU, self.rows.device, bounded=self.most is not None)
        arrival = self._cache.arrive_at_once(keys, union.order)
        plan = self._cache.plan([arrival], train=False)
        slots = self._cache.slots_of(arrival, plan).to(torch.int64)
        self._cache.counters.publish()
        is_new = torch.zeros(self.rows.shape[0], dtype=torch.bool, device=slots.device)
        is_new[plan.miss_slots] = True
        return slots, is_new[slots].nonzero().squeeze(1)

    def _start_over(self, union: Union) -> tuple[Tensor, Tensor]:
        every = torch.arange(union.num_rows, device=self.rows.device)
        return every, every

    def _make_room(self, num_rows: int) -> None:
        """Start over if the replicas are too few, or differ from the rows in type or device."""
        records = self._group.records
        dtype, device = records.dtype if self._whole else result_type(self._group.numbers), records.device
        is_alike = self.rows.dtype == dtype and self.rows.device == device
        if num_rows > self.rows.shape[0] or not self.rows.shape[0] or not is_alike:
            self._drop()  # first: both together may not fit
            with torch.inference_mode(False):
                width = records.shape[1] if self._whole else self._group.layout.dim
                shape = num_replicas(num_rows, self._room, self.row_bytes, self._kept_over), width
                self.rows = torch.empty(shape, dtype=dtype, device=device)

    def _drop(self) -> None:
        self._cache = None
        self.rows = self.rows.new_empty(0, 0)


class ReplicatedFront:
    """Answers the lookups of one group from replicas; updates go to the owners of the rows, and come back.

    With `everywhere` gradients go to all ranks instead, and each updates its replicas.
    """

    def __init__(
        self, sharded: ShardFront, mesh: Mesh, group: TableGroup, room: ReplicaRoom, *, everywhere: bool = False
    ) -> None:
        self.layout = group.layout
        # With one rank the user can write to rows through views, and the meaning of dynamic ids can change.
        self.wants: UnionKind = "once" if group.keyspace.is_dynamic or mesh.size == 1 else "kept"
        self.tally = RowTally()
        self._sharded = sharded  # sends sums of gradients to the owners
        self._group, self._mesh = group, mesh
        self._everywhere = everywhere
        self._replicas = Replicas(mesh, group, everywhere, self.wants == "kept", room)

    @property
    def replica_bytes(self) -> int:
        """Device memory of replicas and their index."""
        return self._replicas.num_bytes

    @property
    def most_replicas(self) -> int | None:
        """Rows that the batches of all ranks may need at once; None: not limited."""
        return self._replicas.most

    def refusal(self, num_rows: int, what: str) -> BudgetError:
        """The error for batches that need `num_rows` rows at once."""
        return self._replicas.refusal(num_rows, what)

    def checked(self, route: Route) -> Route:
        """The route of a batch, before any row moves; a BudgetError on all ranks if its union does not fit."""
        num_rows = route.kept_union().num_rows
        if self._replicas.most is not None and num_rows > self._replicas.most:
            raise self._replicas.refusal(num_rows)
        return route

    def ensure(self, lookups: Lookups, learns: bool, claim: Callable[[], None]) -> Lookups:
        """See ShardFront."""
        return self._sharded.ensure(lookups, learns, claim)

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""
        with self._bringing():
            union = self._place(requests_of(lookups))
        return lookup(self._replicas.rows, _here(lookups, union), self.layout.dim)

    def rows_of(self, lookups: Lookups) -> Tensor:
        """The weights [L, D] that the lookups read."""
        self._sharded.meet("is in a backward pass and reads rows again", lookups)
        with self._bringing():
            union = self._placed(requests_of(lookups))
        return rows_of(self._replicas.rows, _here(lookups, union), self.layout.dim)

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, step: UpdateStep) -> None:
        """Send the sums of the gradients to the owners, and take the new weights of all rows of the union."""
        if self._everywhere:
            self._update_everywhere(lookups, tables, grad, step)
            return
        self._sharded.updated(lookups, tables, grad, step, self._refresh if self.wants == "kept" else self._outdate)

    def _outdate(self, requested: Lookups) -> None:
        """Rows of a batch that was looked up before, and reads them again in backward, may be among those updated."""
        self._replicas.version += 1

    def _refresh(self, requested: Lookups) -> None:
        union = self._placed(requested)
        self._replicas.refresh(union, self._read(requested, union.standing))

    def _update_everywhere(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, step: UpdateStep) -> None:
        """Sum the gradients of the union on all ranks; update the rows that are here, and all replicas."""
        requested = requests_of(lookups)
        union = self._placed(requested)
        mine = self._sharded.summed(lookups._replace(slots=union.places), tables, grad, union.num_rows)
        sums = self._sharded.narrow(mine)
        self._mesh.sum_(sums)
        sums = sums.to(grad.dtype)
        own = slice(union.starts[self._mesh.rank], union.starts[self._mesh.rank + 1])
        self._group.update_rows(_each(requested.slots[union.standing]), sums[own], step)
        if self.wants == "kept":
            self._group.update_copies(self._replicas.rows, _each(union.slots[:-1]), sums, step)

    def forget(self) -> None:
        """Rows have changed other than by updates."""
        self._replicas.forget()

    def _bringing(self) -> Change:
        return self._group.changes.changing("bringing in replicas of rows")

    def _place(self, requested: Lookups) -> Union:
        """Part of a change."""
        route = route_of(requested)
        union = route.kept_union()
        num_new = self._replicas.place(union, lambda places: self._read(requested, union.standing[places]))
        num_own = int(union.standing.shape[0])
        self.tally = self.tally.plus(RowTally(1, route.num_vectors, num_own, num_new))
        return union

    def _placed(self, requested: Lookups) -> Union:
        """The union of a batch; if another was placed since, its rows are brought in again."""
        union = route_of(requested).kept_union()
        return union if union.version == self._replicas.version else self._place(requested)

    def _read(self, requested: Lookups, which: Tensor) -> Tensor:
        """The weights [n, D] of some of the rows that other ranks request, as sent; or their records [n, W]."""
        slots = requested.slots[which]
        if self._everywhere:
            return self._group.records.index_select(0, slots.to(torch.int64))
        return self._sharded.narrow(self._group.lookup(_each(slots)))


def _each(slots: Tensor) -> Lookups:
    """One lookup of each row, which are distinct."""
    count = slots.shape[0]
    return Lookups(slots.contiguous(), (Span("rows", 0, count, 1),), count)


def _here(lookups: Lookups, union: Union) -> Lookups:
    """Lookups into the replicas; the slot of padding is the last."""
    return lookups._replace(slots=union.slots[union.places])
