"""A group: tables with the same record width, stored and looked up together.

In: keys of one batch. Out: pooled vectors; and, with their gradient, updated rows. A group is put together of two parts, and
callers ask the group, never which kind they are:

    keyspace     ids -> keys: PresetKeys (keyspace.py) or DynamicIds (dynamic.py)
    residency    keys -> slots, and where rows are: ResidentRows (resident.py) or CachedRows (cached.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hotbed.cache import Cache, CacheCounts
from hotbed.errors import IdError
from hotbed.ids.index import Ints
from hotbed.ops.init_rows import stream_of
from hotbed.ops.keys import Addresses, FirstBad
from hotbed.ops.lookup import lookup
from hotbed.ops.lookup.reference import rows_of
from hotbed.ops.lookups import Lookups, Origin, Span
from hotbed.ops.precision import salt_of
from hotbed.ops.records import Layout
from hotbed.ops.shard import Shard
from hotbed.ops.update import TableRows, UpdateSettings, settings_of, update
from hotbed.optim import RowOptimizer
from hotbed.optim.schedules import as_schedule
from hotbed.store import Store
from hotbed.store.counts import Tiers
from hotbed.store.held import Holder
from hotbed.tables.group.keyspace import Keyspace, Member, addresses_of
from hotbed.tables.snapshot.parts import KeysSnapshot
from hotbed.tables.transaction import Changes
from hotbed.types import group_name

if TYPE_CHECKING:
    from hotbed.tables.group.cached import CachedRows


class UpdateStep(Protocol):
    """The step that an update of rows belongs to; all groups of one call share it."""

    def taken(self) -> tuple[float, int]:
        """(factor on the learning rate, number among all updates); the step counts from now on."""


class Residency(Protocol):
    """Where the rows of one group are. Slots are rows of `records`."""

    records: Tensor  # [S, W], on the device
    layout: Layout
    changes: Changes  # of the tables

    @property
    def caches(self) -> Sequence[CachedRows]:
        """What has to bring rows in before a batch: itself, or nothing."""

    @property
    def num_slots(self) -> int:
        """Rows that a cache holds; 0 without one."""

    @property
    def index_bytes(self) -> int:
        """Device memory besides the records."""

    def initialise(self) -> None:
        """Rows have the initial values of the keyspace."""

    def clear(self) -> None:
        """Again: part of a change."""

    def ensure(self, lookups: Lookups, learns: bool, claim: Callable[[], None]) -> Lookups:
        """The lookups with the slots their rows are in; what has to move rows for it calls `claim` first."""

    def placed(self, lookups: Lookups, learns: bool = True) -> Lookups:
        """As `ensure`: part of a change."""

    def slots_of(self, member: Member) -> tuple[int, int]:
        """(first, number) of the slots a table's rows may be in."""

    def touch(self, slots: Tensor) -> None:
        """These rows are about to change; negative is padding."""

    def flush(self) -> None:
        """Write every changed row to where whole tables are read and written."""

    def whole(self, member: Member) -> Tensor:
        """The records of a table, after `flush`: a view, or a copy on the host."""

    def writable(self, member: Member) -> Tensor:
        """As `whole`, for a caller who may write to it, now or later."""

    def writable_rows(self, member: Member, keys: Tensor) -> Tensor:
        """As `writable`, of all keys of a table that are here."""

    def copy_rows(self, keys: Tensor) -> Tensor:
        """Copies of records, after `flush`."""

    def write_rows(self, keys: Tensor, records: Tensor) -> None:
        """Replace records: part of a load, which ends with `forget`."""

    def drop_rows(self, keys: Tensor) -> None:
        """Replace records by initial ones: part of a load, which ends with `forget`."""

    def written_keys(self) -> Iterator[Ints]:
        """Keys that have a record below a cache, some at a time, in no order; some may come twice."""

    def forget(self) -> None:
        """Rows were replaced: what is kept of them elsewhere no longer holds. Part of a change."""

    def load(self, member: Member, columns: Mapping[str, Tensor]) -> None:
        """Take over columns of a table: part of a load."""

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow `nn.Module.to`."""

    def take_back(self) -> None:
        """Forget what dynamic ids taught that were not trained: part of a change."""

    def warm(self, keys: Tensor, uses: Tensor | None) -> None:
        """Bring these keys in and let the policy know them, with their uses."""

    def counters(self) -> CacheCounts:
        """What a cache did so far."""

    def tiers(self) -> Tiers | None:
        """What memory and ssd did and hold; None without an ssd."""

    def holder(self) -> Holder:
        """Holds the rows of one moment for a checkpoint, after `flush`."""

    def count_as_saved(self) -> None:
        """All rows are as a checkpoint has them."""

    def adopt(self, folder: Path) -> None:
        """Take over the rows of a folder of files: part of a load."""

    def policy_state(self, group: str) -> dict[str, Tensor]:
        """What caches hold, for a checkpoint."""

    def load_policy_state(self, group: str, tensors: Mapping[str, Tensor]) -> list[str]:
        """Bring in what they held; what was left out, and why."""


class TableGroup:
    """Tables of one record width, and the ops over their rows."""

    def __init__(
        self,
        members: Sequence[Member],
        optimizer: RowOptimizer,
        keyspace: Keyspace,
        residency: Residency,
        shard: Shard,
        *,
        own: str = "",
        is_frozen: bool = False,
    ) -> None:
        """`own`: the first of tables with settings of their own."""
        self.own, self.is_frozen = own, is_frozen
        self._schedule = as_schedule(optimizer.lr)
        self.members = {member.name: member for member in members}
        self.layout = residency.layout
        self.optimizer = optimizer
        self.keyspace, self.residency = keyspace, residency
        self.shard = shard  # which of the tables' rows are here
        self.seed = 0
        self._rows: dict[tuple[str, ...], tuple[TableRows, ...]] = {}

    @property
    def name(self) -> str:
        """In manifests."""
        return group_name(self.dim, self.keyspace.is_dynamic, self.own)

    @property
    def dim(self) -> int:
        """The dim of whole rows; ranks may have some of their columns."""
        return self.layout.dim * self.shard.num_slices

    @property
    def records(self) -> Tensor:
        """[S, W], on the device; a row is in the slot that `ensure` says."""
        return self.residency.records

    @property
    def changes(self) -> Changes:
        """Who moves rows; those of the tables."""
        return self.residency.changes

    @changes.setter
    def changes(self, changes: Changes) -> None:
        self.residency.changes = changes

    @property
    def num_rows(self) -> int:
        """Keys that there may be here."""
        return self.keyspace.num_rows

    @property
    def num_slots(self) -> int:
        """Rows that a cache holds; 0 without one."""
        return self.residency.num_slots

    @property
    def num_bytes(self) -> int:
        """Device memory, with all that finds the rows."""
        return self.records.nbytes + self.residency.index_bytes

    @property
    def caches(self) -> Sequence[CachedRows]:
        """What has to bring rows in before a batch; none where all are on the device."""
        return self.residency.caches

    @property
    def cache(self) -> Cache:
        """The cache of rows behind one, for inspection: `cache.check_integrity()`."""
        return self.caches[0].cache

    @property
    def store(self) -> Store:
        """Below a cache, to look into."""
        return self.caches[0].store

    def initialise(self, seed: int) -> None:
        """Every row has its initial value."""
        self.seed = seed
        self.keyspace.initialise(seed)
        self.residency.initialise()

    def clear(self) -> None:
        """All rows have their initial values again, and no dynamic id has one."""
        with self.changes.changing("clearing rows"):
            self.keyspace.initialise(self.seed)
            self.residency.clear()

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Origin]:
        """Keys [L] of ids [L], one table name per span; the first position with a bad id; the origin of the keys."""
        return self.keyspace.keys(ids, spans, tables, learns)

    def addresses(self, tables: tuple[str, ...]) -> Addresses:
        """How preset ids become keys, one table name per span."""
        return addresses_of(self.members, tables)

    def refuse(self, table: str, feature: str, sample: int, value: int) -> IdError:
        """The error for an id outside its table."""
        rows = self.members[table].rows
        return IdError(
            f"id {value} of feature {feature!r} in sample {sample} is outside table {table!r}, which has {rows:,} rows "
            f"(ids 0 to {rows - 1:,}). Give the table more rows, or hashing=True to take ids modulo its rows."
        )

    def ensure(self, lookups: Lookups, learns: bool, claim: Callable[[], None]) -> Lookups:
        """The lookups with the slots their rows are in; what has to move rows for it calls `claim` first."""
        return self.residency.ensure(lookups, learns, claim)

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""
        layout = self.layout
        return lookup(layout.numbers(self.residency.records), lookups, layout.dim)

    def rows_of(self, lookups: Lookups) -> Tensor:
        """The weights [L, D] that the lookups read; zero for padding."""
        return rows_of(self.numbers, lookups, self.layout.dim)

    @property
    def weight_type(self) -> torch.dtype:
        """The type of the weights."""
        return self.layout.weights(self.records[:0]).dtype

    @property
    def numbers(self) -> Tensor:
        """The records in the type of their weights, which are its first D columns."""
        return self.layout.numbers(self.records)

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, step: UpdateStep) -> None:
        """One row-optimizer step from the gradient of the pooled vectors, part of a change; `tables`: one for each span."""
        self.apply(lookups, self._table_rows(tables), grad, step)

    def update_rows(self, lookups: Lookups, grad: Tensor, step: UpdateStep) -> None:
        """As `update`, for lookups of one span that stands for all tables."""
        self.apply(lookups, (TableRows(0, self.records.shape[0], 0, 1),), grad, step)

    def apply(self, lookups: Lookups, rows: tuple[TableRows, ...], grad: Tensor, step: UpdateStep) -> None:
        """Update the rows; every update ends here. `rows`: the slots and spans of the tables."""
        settings = self._settings(rows, step)
        residency = self.residency
        residency.touch(lookups.slots)
        update(residency.records, self.layout, grad, lookups, settings)

    def update_copies(self, records: Tensor, lookups: Lookups, grad: Tensor, step: UpdateStep) -> None:
        """As `update_rows`, for copies [S, W] of rows, which somebody else keeps."""
        settings = self._settings((TableRows(0, records.shape[0], 0, 1),), step)
        update(records, self.layout, grad, lookups, settings)

    def _settings(self, rows: tuple[TableRows, ...], step: UpdateStep) -> UpdateSettings:
        factor, number = step.taken()
        lr = self._schedule.at(number) * factor
        salt = 0
        if self.layout.precision != "fp32":  # a stream of random bits rounds this group's weights
            salt = salt_of(stream_of(self.seed, f"rounding of {', '.join(self.members)}"), number)
        return settings_of(self.optimizer, lr, rows, salt)

    def columns(self, table: str) -> dict[str, Tensor]:
        """`weight` [rows, D] and every optimizer state [rows, D] or [rows, 1] of one table.

        Views, so writing changes it; behind a cache a copy on the host.
        """
        self.keyspace.refuse_whole(table)
        self.flush()
        return self.layout.cut(self.residency.whole(self.members[table]))

    def writable(self, table: str) -> dict[str, Tensor]:
        """`columns` for a caller who may write to them, now or later."""
        self.keyspace.refuse_whole(table)
        self.flush()
        return self.layout.cut(self.residency.writable(self.members[table]))

    def rows(self, table: str) -> tuple[Tensor, dict[str, Tensor]]:
        """(ids ascending [N], their columns [N, ...]) of one table: those that are here."""
        self.flush()
        ids, keys = self.keyspace.rows_of(table)
        return ids, self.layout.cut(self.residency.writable_rows(self.members[table], keys))

    def weight_pieces(self, table: str) -> Iterator[Tensor]:
        """The weights of a table, some rows at a time, in order: copies."""
        for keys in self.keyspace.chunks_of(table):
            self.flush()
            yield self.layout.weights(self.residency.copy_rows(keys))

    def shared_row(self, table: str) -> dict[str, Tensor] | None:
        """The columns [1, ...] of the row that ids without one of their own share; None where none does."""
        key = self.keyspace.shared_key(table)
        return None if key < 0 else self.layout.cut(self.read_rows(torch.tensor([key], device="cpu")))

    def owns(self, table: str, ids: Tensor) -> Tensor:
        """Whether ids [N] of a table are here."""
        return self.keyspace.owners_of(table, ids) == self.shard.rank

    def first(self, table: str, ids: Tensor) -> dict[str, Tensor]:
        """The columns of ids at their initial values, on the host."""
        return self.layout.cut(self.keyspace.first_of_ids(table, ids).to(self.records.dtype))

    def read_rows(self, keys: Tensor) -> Tensor:
        """Records of keys on the host."""
        self.flush()
        return self.residency.copy_rows(keys).detach().cpu()

    def write_rows(self, keys: Tensor, records: Tensor) -> None:
        """Replace records: part of a load, which ends with `forget`."""
        self.residency.write_rows(keys, records)

    def drop_rows(self, keys: Tensor) -> None:
        """Replace records by initial ones: part of a load, which ends with `forget`."""
        self.residency.drop_rows(keys)

    def forget(self) -> None:
        """Rows were replaced: part of a change."""
        self.residency.forget()

    def load(self, table: str, columns: Mapping[str, Tensor]) -> None:
        """Take over columns of one table: part of a load."""
        self.keyspace.refuse_whole(table)
        self.residency.load(self.members[table], columns)

    def flush(self) -> None:
        """Write every changed row to where whole tables are read and written."""
        self.residency.flush()

    def warm(self, keys: Tensor, uses: Tensor | None = None) -> None:
        """Bring these keys in and let the policy know them, with their uses."""
        self.residency.warm(keys, uses)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow `nn.Module.to`."""
        self.residency.move(fn)

    def counters(self) -> CacheCounts:
        """What a cache did so far."""
        return self.residency.counters()

    def tiers(self) -> Tiers | None:
        """What memory and ssd did and hold; None without an ssd."""
        return self.residency.tiers()

    def holder(self) -> Holder:
        """Holds the rows of one moment for a checkpoint; `take` of it, then `snapshot`."""
        self.flush()
        return self.residency.holder()

    def snapshot(self, held: Holder) -> KeysSnapshot:
        """The rows that are held, by table."""
        return self.keyspace.snapshot(held, self.name, self.read_rows)

    def policy_state(self) -> dict[str, Tensor]:
        """What caches hold, for a checkpoint."""
        return self.residency.policy_state(self.name)

    def _table_rows(self, tables: tuple[str, ...]) -> tuple[TableRows, ...]:
        """The slots of every table and the spans that read it; computed once, because every batch asks the same."""
        if tables not in self._rows:
            rows = []
            for name, member in self.members.items():
                spans = [p for p, table in enumerate(tables) if table == name]
                first, stop = (spans[0], spans[-1] + 1) if spans else (0, 0)
                if spans or self.optimizer.decay_scope == "table":
                    rows.append(TableRows(*self.residency.slots_of(member), first, stop))
            self._rows[tables] = tuple(rows)
        return self._rows[tables]
