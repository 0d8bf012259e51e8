"""A group: tables with the same record width, stored and looked up together.

In: keys of one batch. Out: pooled vectors; and, with their gradient, updated rows. Every row is in one tensor here (slot =
key), which is the exact reference for everything that keeps rows elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hotbed.errors import ConfigError, HotbedError, IdError
from hotbed.ids import TableRules
from hotbed.ops.init_rows import Init, stream_of
from hotbed.ops.keys import Addresses, FirstBad, make_keys
from hotbed.ops.lookup import lookup
from hotbed.ops.lookup.reference import rows_of
from hotbed.ops.lookups import Lookups, Span
from hotbed.ops.move import FirstRows, FirstTable, first_records, first_rows
from hotbed.ops.precision import salt_of
from hotbed.ops.records import Layout, Precision, empty_records, layout_of
from hotbed.ops.shard import WHOLE, Shard
from hotbed.ops.update import TableRows, settings_of, update
from hotbed.optim import RowOptimizer
from hotbed.tables.transaction import Changes

_MAX_ROWS = 1 << 32  # of one table: the update sorts rows as 32-bit numbers
_INIT_CHUNK = 1 << 20
_PIECE = 1 << 18  # rows copied at once


class Member(NamedTuple):
    """One table as its group sees it."""

    name: str
    rows: int
    base: int  # its first slot
    init: Init
    hashing: bool
    padding_id: int | None
    rules: TableRules | None = None  # of dynamic ids, which have no number of rows


class UpdateStep(Protocol):
    """The step that an update of rows belongs to; all groups of one call share it."""

    def taken(self) -> tuple[float, int]:
        """(learning rate, number among all updates); the step counts from now on."""


class _Way(NamedTuple):
    """What a sequence of spans, named by their tables, means inside the group."""

    addresses: Addresses
    rows: tuple[TableRows, ...]


class TableGroup:
    """Records of several tables and the ops over them."""

    def __init__(
        self,
        members: Sequence[Member],
        dim: int,
        optimizer: RowOptimizer,
        device: torch.device,
        num_slots: int = 0,
        precision: Precision = "fp32",
        shard: Shard = WHOLE,
    ) -> None:
        too_large = [f"{m.name} ({m.rows:,})" for m in members if m.rows >= _MAX_ROWS]
        if too_large:
            raise ConfigError(f"tables with 2^32 rows or more: {', '.join(too_large)}. Hash their ids into fewer rows.")
        self.members = {member.name: member for member in members}
        self.layout: Layout = layout_of(dim, optimizer, precision)
        self.optimizer = optimizer
        self._ways: dict[tuple[str, ...], _Way] = {}
        self.shard = shard  # which of the tables' rows are here
        self.num_rows = shard.num_local(sum(member.rows for member in members))
        self.records = empty_records(num_slots or self.num_rows, self.layout, torch.float32, device)
        self._seed = 0
        self.changes = Changes()  # the tables put their own in its place
        # where all rows are here, for checkpoints (snapshot/rows.py):
        self.touched: Tensor | None = None  # uint8 [R]: rows that have changed; None: no checkpoint has asked yet
        self.digests: dict[tuple[int, int], Tensor] = {}  # (first row, end) -> int64: records as they were saved last
        self.held_by: object | None = None  # the snapshot that is open
        self._lent: set[str] = set()  # tables whose rows somebody can write to

    @property
    def _rounding(self) -> int:
        """The stream of random bits that round this group's weights."""
        return stream_of(self._seed, f"rounding of {', '.join(self.members)}")

    def initialise(self, seed: int) -> None:
        """Write the first value and state of every row."""
        self._seed = seed
        first = self.first_rows()
        for start in range(0, self.num_rows, _INIT_CHUNK):
            stop = min(start + _INIT_CHUNK, self.num_rows)
            self.records[start:stop] = first_records(torch.arange(start, stop, device=self.records.device), first)

    def first_rows(self) -> FirstRows:
        """What rows start from, as the kernels need it."""
        tables = [
            FirstTable(m.base, stream_of(self._seed, m.name), m.init, m.padding_id) for m in self.members.values()
        ]
        return first_rows(self.layout.dim, self.optimizer, tables, self.layout.precision, self.shard)

    def columns(self, table: str) -> dict[str, Tensor]:
        """`weight` [rows, D] and every optimizer state [rows, D] or [rows, 1] of one table: views, so writing changes it."""
        self._refuse_part(table)
        member = self.members[table]
        return self._cut(self.records[member.base : member.base + member.rows])

    def lend(self, table: str) -> dict[str, Tensor]:
        """`columns` for somebody who may write to them, now or later: checkpoints compare this table from now on."""
        self._lent.add(table)
        return self.columns(table)

    def touch(self, keys: Tensor) -> None:
        """These rows [N] are about to change."""
        if self.touched is not None:
            self.touched.index_fill_(0, keys, 1)

    def count_as_saved(self) -> None:
        """All rows are as a checkpoint has them."""
        self.touched = torch.zeros(self.num_rows, dtype=torch.uint8, device=self.records.device)
        self.digests = {}

    @property
    def compared(self) -> list[tuple[int, int]]:
        """(first row, end) of what may change without a mark."""
        if self.optimizer.decay_scope == "table":
            return [(0, self.num_rows)]
        return [(m.base, m.base + m.rows) for m in self.members.values() if m.name in self._lent]

    def rows(self, table: str) -> tuple[Tensor, dict[str, Tensor]]:
        """(ids ascending [N], their columns [N, ...]) of one table: those that are here."""
        if self.shard.world == 1:
            return torch.arange(self.members[table].rows, device="cpu"), self.lend(table)
        ids = self.ids_of(table)
        return ids, self._cut(self.records[self.local_keys(table, ids).to(self.records.device)])

    def ids_of(self, table: str) -> Tensor:
        """The ids of one table that have a row here, ascending [N]."""
        member, world = self.members[table], self.shard.world
        stop = member.base + member.rows
        keys = self.shard.keys_of(torch.arange(member.base // world, -(-stop // world), device="cpu"))
        return keys[(keys >= member.base) & (keys < stop)] - member.base

    def local_keys(self, table: str, ids: Tensor) -> Tensor:
        """Where ids [N] of a table that are here have their rows."""
        return self.shard.local_of(ids + self.members[table].base)

    def owns(self, table: str, ids: Tensor) -> Tensor:
        """Whether ids [N] of a table are here."""
        return self.shard.owner_of(ids + self.members[table].base) == self.shard.rank

    def weight_pieces(self, table: str) -> Iterator[Tensor]:
        """The weights of a table, some rows at a time, in order: copies."""
        weight = self.columns(table)["weight"]
        for start in range(0, weight.shape[0], _PIECE):
            yield weight[start : start + _PIECE].clone()

    def _refuse_part(self, table: str) -> None:
        if self.shard.world > 1:
            raise HotbedError(
                f"the rows of table {table!r} are spread over {self.shard.world} ranks; tables.rows({table!r}) gives the "
                "ids and rows of this one"
            )

    def refuse_load(self, table: str) -> None:
        """Raise where `load` of a table cannot be."""
        self._refuse_part(table)

    def load(self, table: str, columns: Mapping[str, Tensor]) -> None:
        """Take over columns of one table: part of a load."""
        if self.touched is not None:
            member = self.members[table]
            self.touched[member.base : member.base + member.rows] = 1
        for name, view in self.columns(table).items():
            if name in columns:
                view.copy_(columns[name])

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow `nn.Module.to`."""
        if self.layout.precision != "fp32" and fn(self.records[:0]).dtype != torch.float32:
            raise ConfigError(f"rows of precision={self.layout.precision!r} cannot change their type; leave it out")
        self.records = fn(self.records)
        if self.touched is not None:
            self.touched = self.touched.to(self.records.device)
        self.digests = {span: digests.to(self.records.device) for span, digests in self.digests.items()}

    def take_back(self) -> None:
        """Forget what dynamic ids taught that were not trained; here there are none."""

    def placed(self, lookups: Lookups, learns: bool = True) -> Lookups:
        """The same look-ups with the slots their rows are in now; here a row's slot is its key, for good."""
        return lookups

    def addresses(self, tables: tuple[str, ...]) -> Addresses:
        """How ids become keys, one table name per span."""
        return self._way_of(tables).addresses

    def ordered(self, lookups: Lookups) -> Lookups:
        """The same look-ups with what the update would otherwise work out itself."""
        if lookups.slots.device.type != "cuda":
            return lookups
        sorted_keys, order = torch.sort(lookups.slots, stable=True)
        return lookups._replace(sorted_keys=sorted_keys, order=order)

    def _slots_of(self, member: Member) -> tuple[int, int]:
        """(first, number) of the slots a table's rows may be in."""
        return member.base, member.rows

    def _cut(self, records: Tensor) -> dict[str, Tensor]:
        layout = self.layout
        return {"weight": layout.weights(records)} | {s: records[:, layout.columns(s)] for s in layout.states}

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Any]:
        """Keys [L] of ids [L], one table name per span; the first position with a bad id; the sense of dynamic ids."""
        return *make_keys(ids, spans, self._way_of(tables).addresses), None

    def refuse(self, table: str, feature: str, sample: int, value: int) -> IdError:
        """The error for an id outside its table."""
        rows = self.members[table].rows
        return IdError(
            f"id {value} of feature {feature!r} in sample {sample} is outside table {table!r}, which has {rows:,} rows "
            f"(ids 0 to {rows - 1:,}). Give the table more rows, or hashing=True to take ids modulo its rows."
        )

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""
        return lookup(self.numbers, lookups, self.layout.dim)

    def rows_of(self, lookups: Lookups) -> Tensor:
        """The weights [L, D] that the look-ups read; zero for padding."""
        return rows_of(self.numbers, lookups, self.layout.dim)

    @property
    def weight_type(self) -> torch.dtype:
        """Of the weights."""
        return self.layout.weights(self.records[:0]).dtype

    @property
    def numbers(self) -> Tensor:
        """The records in the type of their weights, which are its first D columns."""
        return self.layout.numbers(self.records)

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, step: UpdateStep) -> None:
        """One row-optimizer step from the gradient of the pooled vectors, part of a change; `tables`: one for each span."""
        self._update(lookups, self._way_of(tables).rows, grad, step)

    def update_rows(self, lookups: Lookups, grad: Tensor, step: UpdateStep) -> None:
        """As `update`, for look-ups of one span that stands for all tables."""
        self._update(lookups, (TableRows(0, self.records.shape[0], 0, 1),), grad, step)

    def _update(self, lookups: Lookups, rows: tuple[TableRows, ...], grad: Tensor, step: UpdateStep) -> None:
        lr, number = step.taken()
        salt = 0 if self.layout.precision == "fp32" else salt_of(self._rounding, number)
        settings = settings_of(self.optimizer, lr, rows, salt)
        if self.touched is not None:
            self.touch(lookups.slots.clamp(min=0).to(torch.int64))
        update(self.records, self.layout, grad, lookups, settings)

    def _way_of(self, tables: tuple[str, ...]) -> _Way:
        """Where the spans lead; computed once, because every batch asks the same."""
        if tables not in self._ways:
            members = [self.members[table] for table in tables]
            addresses = Addresses(
                base=np.array([m.base for m in members], dtype=np.int64),
                rows=np.array([m.rows for m in members], dtype=np.int64),
                hashing=np.array([m.hashing for m in members], dtype=np.bool_),
                has_padding=np.array([m.padding_id is not None for m in members], dtype=np.bool_),
                padding=np.array([m.padding_id or 0 for m in members], dtype=np.int64),
            )
            rows = []
            for name, member in self.members.items():
                spans = [p for p, table in enumerate(tables) if table == name]
                first, stop = (spans[0], spans[-1] + 1) if spans else (0, 0)
                if spans or self.optimizer.decay_scope == "table":
                    rows.append(TableRows(*self._slots_of(member), first, stop))
            self._ways[tables] = _Way(addresses, tuple(rows))
        return self._ways[tables]
