"""Snapshots and sinks over tables that can only hand over everything at once: `state_dict` in, RowParts out, and back.

It copies every row, and finds the touched ones by comparing with the copy of the last checkpoint. Tables that keep track
themselves need nothing of this.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hotbed.checkpoint.types import Frozen, RowPart, Rows, Sink, Snapshot, TableShape
from hotbed.errors import RunError
from hotbed.ops.move import first_records

Columns = dict[str, dict[str, Tensor]]  # table -> "weight" and every state, all rows
_PART = 1 << 16
_KNOWN: weakref.WeakKeyDictionary[Any, WholeTables] = weakref.WeakKeyDictionary()


def rows_of_tables(tables: Any) -> Rows:
    """The tables themselves where they hold snapshots, else a stand-in that does."""
    if hasattr(tables, "snapshot"):
        return cast(Rows, tables)
    if tables not in _KNOWN:
        _KNOWN[tables] = WholeTables(tables)
    return _KNOWN[tables]


class WholeTables:
    """An EmbeddingTables, and its columns as of the last checkpoint."""

    def __init__(self, tables: Any) -> None:
        self._tables = weakref.ref(tables)
        self.last: Columns = {}

    @property
    def tables(self) -> Any:
        return self._tables()

    def snapshot(self, touched: bool = False) -> AbstractContextManager[Snapshot]:
        return nullcontext(_Snapshot(self, touched))

    def restore(self) -> Sink:
        return _Sink(self)

    def shapes(self) -> dict[str, TableShape]:
        shapes = {}
        for group in self.tables.groups:
            layout = group.layout
            for name in group.members:
                table = self.tables.tables[name]
                shapes[name] = TableShape(
                    dim=table.dim,
                    rows=table.rows,
                    precision="fp64" if group.records.dtype == torch.float64 else layout.precision,
                    optimizer=type(self.tables.optimizer).__name__,
                    states={s: layout.dim if s in layout.element_states else 1 for s in layout.states},
                    hashing=table.hashing,
                    init=str(table.init),
                    seed=group._seed,
                )
        return shapes

    def first(self, table: str, ids: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
        group = self.tables._group_of(table)
        records = first_records(ids + group.members[table].base, group.first_rows())
        columns = cast("dict[str, Tensor]", group._cut(records.to(group.records.dtype)))
        if weight is not None:
            columns["weight"].copy_(weight)
            for name, state in self.tables.optimizer.first_state(columns["weight"].float()).items():
                columns[name].copy_(state)
        return columns

    def first_columns(self) -> Columns:
        return {name: self.first(name, torch.arange(shape.rows or 0)) for name, shape in self.shapes().items()}

    def columns(self) -> Columns:
        state, columns = self.tables.state_dict(), {}
        for name, shape in self.shapes().items():
            names = ("weight", *shape.states)
            columns[name] = {one: state[f"{name}.{one}"].detach().to("cpu", copy=True).contiguous() for one in names}
        return columns


class _Snapshot:
    def __init__(self, whole: WholeTables, touched: bool) -> None:
        self._whole = whole
        self.tables = whole.shapes()
        self._columns = whole.columns()
        self._before = whole.last if touched else whole.first_columns()
        tables = whole.tables
        self._rest = {
            "num_updates": torch.tensor(tables.num_updates),
            "lr_factor": torch.tensor(tables.lr_factor, dtype=torch.float64),
        }

    def parts(self) -> Iterator[RowPart]:
        for table, columns in self._columns.items():
            changed = torch.zeros(columns["weight"].shape[0], dtype=torch.bool)
            for name, column in columns.items():
                before = self._before[table][name].contiguous().view(torch.uint8)
                changed |= (column.view(torch.uint8) != before).any(1)
            for ids in torch.split(torch.nonzero(changed).view(-1), _PART):
                yield RowPart(table, ids, {name: column[ids] for name, column in columns.items()})

    def gone(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def rest(self) -> dict[str, Tensor]:
        return self._rest

    @property
    def frozen(self) -> Sequence[Frozen]:
        return ()

    def commit(self) -> None:
        self._whole.last = self._columns


class _Sink:
    def __init__(self, whole: WholeTables) -> None:
        self._whole = whole
        self.tables = whole.shapes()
        self.begin()

    def begin(self) -> None:
        self._columns = self._whole.first_columns()
        self._rest = {"num_updates": torch.tensor(0), "lr_factor": torch.tensor(1.0)}

    def first(self, table: str, ids: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
        return self._whole.first(table, ids, weight)

    def thaw(self, name: str, folder: Path, tables: Mapping[str, TableShape]) -> Iterator[RowPart]:
        raise RunError(f"{folder} holds ssd segments, but these tables have no ssd to read them.")

    def adopt(self, name: str, folder: Path) -> None:
        raise RunError(f"{folder} holds ssd segments, but these tables have no ssd to take them.")

    def gone(self, table: str, ids: Tensor) -> None:
        for name, column in self.first(table, ids).items():
            self._columns[table][name][ids] = column

    def add(self, part: RowPart) -> None:
        for name, column in part.columns.items():
            self._columns[part.table][name][part.ids] = column

    def rest(self, tensors: dict[str, Tensor]) -> None:
        self._rest |= tensors

    def end(self) -> None:
        state = {f"{table}.{name}": one for table, columns in self._columns.items() for name, one in columns.items()}
        self._whole.tables.load_state_dict({**state, **self._rest})
        self._whole.last = self._columns
