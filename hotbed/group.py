"""A group: tables with the same record width, stored and looked up together.

In: keys of one batch. Out: pooled vectors; and, with their gradient, updated rows. Every row is in one tensor here (slot =
key), which is the exact reference for everything that keeps rows elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.errors import ConfigError, IdError
from hotbed.ops.init_rows import Init, init_rows, stream_of
from hotbed.ops.keys import Addresses, make_keys
from hotbed.ops.lookup import lookup
from hotbed.ops.lookups import Lookups, Span
from hotbed.ops.records import Layout, empty_records, layout_of
from hotbed.ops.update import TableRows, settings_of, update
from hotbed.optim import RowOptimizer

_MAX_ROWS = 1 << 32  # of one table: the update sorts rows as 32-bit numbers
_INIT_CHUNK = 1 << 20


class Member(NamedTuple):
    """One table as its group sees it."""

    name: str
    rows: int
    base: int  # its first slot
    init: Init
    hashing: bool
    padding_id: int | None


class _Way(NamedTuple):
    """What a sequence of spans, named by their tables, means inside the group."""

    addresses: Addresses
    rows: tuple[TableRows, ...]


class TableGroup:
    """Records of several tables and the ops over them."""

    def __init__(self, members: Sequence[Member], dim: int, optimizer: RowOptimizer, device: torch.device) -> None:
        too_large = [f"{m.name} ({m.rows:,})" for m in members if m.rows >= _MAX_ROWS]
        if too_large:
            raise ConfigError(f"tables with 2^32 rows or more: {', '.join(too_large)}. Hash their ids into fewer rows.")
        self.members = {member.name: member for member in members}
        self.layout: Layout = layout_of(dim, optimizer)
        self.optimizer = optimizer
        self._ways: dict[tuple[str, ...], _Way] = {}
        num_rows = sum(member.rows for member in members)
        self.records = empty_records(num_rows, self.layout, torch.float32, device)

    def initialise(self, seed: int) -> None:
        """Write the first value and state of every row."""
        dim, device = self.layout.dim, self.records.device
        for member in self.members.values():
            stream = stream_of(seed, member.name)
            for start in range(0, member.rows, _INIT_CHUNK):
                stop = min(start + _INIT_CHUNK, member.rows)
                part = self.records[member.base + start : member.base + stop]
                weights = torch.empty(stop - start, dim, dtype=part.dtype, device=device)
                init_rows(weights, torch.arange(start, stop, device=device), stream, member.init)
                if member.padding_id is not None and start <= member.padding_id < stop:
                    weights[member.padding_id - start] = 0
                part.zero_()
                part[:, :dim] = weights
                for state, value in self.optimizer.first_state(weights).items():
                    part[:, self.layout.columns(state)] = value

    def weight(self, table: str) -> Tensor:
        """The weights [rows, D] of one table; a view, so writing to it changes the table."""
        member = self.members[table]
        return self.records[member.base : member.base + member.rows, : self.layout.dim]

    def states(self, table: str) -> dict[str, Tensor]:
        """The optimizer state of one table, by name, [rows, D] or [rows, 1]; views."""
        member = self.members[table]
        part = self.records[member.base : member.base + member.rows]
        return {state: part[:, self.layout.columns(state)] for state in self.layout.states}

    def keys(self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...]) -> tuple[Tensor, int]:
        """Keys [L] of ids [L], one table name per span; and the first position with a bad id, or -1."""
        return make_keys(ids, spans, self._way_of(tables).addresses)

    def refuse(self, table: str, feature: str, sample: int, value: int) -> IdError:
        """The error for an id outside its table."""
        rows = self.members[table].rows
        return IdError(
            f"id {value} of feature {feature!r} in sample {sample} is outside table {table!r}, which has {rows:,} rows "
            f"(ids 0 to {rows - 1:,}). Give the table more rows, or hashing=True to take ids modulo its rows."
        )

    def lookup(self, lookups: Lookups) -> Tensor:
        """Pooled vectors [O, D]."""
        return lookup(self.records, lookups, self.layout.dim)

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, lr: float) -> None:
        """One row-optimizer step from the gradient of the pooled vectors; `tables` names the table of every span."""
        settings = settings_of(self.optimizer, lr, self._way_of(tables).rows)
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
                    rows.append(TableRows(member.base, member.rows, first, stop))
            self._ways[tables] = _Way(addresses, tuple(rows))
        return self._ways[tables]
