"""Rows of dynamic ids that come without a row number: ids of another run, of other ranks or of a model folder in, new rows out.

Each (table, id) gets the next free row of an empty group; what expiry depends on comes with it, or starts as if the id was used
now. Nobody waits to be admitted, unless the rest says so. A table's shared row stays its shared row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import BudgetError
from hotbed.ids import IdIndex
from hotbed.ids.index import Ints
from hotbed.types import RowPart

if TYPE_CHECKING:
    from hotbed.tables.group.dynamic import DynamicIds

Arrays = dict[str, NDArray[Any]]
_USES = ("last_use", "score")


class RestoredIds:
    """Restores the ids of one group whose translator has seen no batch."""

    def __init__(self, ids: DynamicIds) -> None:
        self._ids = ids
        self._index: IdIndex | None = None  # made for the first part: its pages are many
        tables = range(len(ids.names))
        self._shared = np.array([ids.translator.shared_key(table) for table in tables], dtype=np.int64)
        self._next = ids.translator.end
        self._uses: dict[str, list[tuple[Ints, Ints]]] = {name: [] for name in _USES}  # (rows, values) as they came

    def add(self, part: RowPart) -> Tensor:
        """The keys of rows of one table; -1 for a shared row where the table has none. Earlier ids keep their keys."""
        if self._index is None:
            self._index = IdIndex(self._ids.room.rows)
        number = self._ids.names.index(part.table)
        shared = np.zeros(part.ids.shape[0], dtype=np.bool_)
        if "shared" in part.columns:
            shared = part.columns["shared"].numpy() != 0
        ids = part.ids.numpy()[~shared]
        tables = np.full(ids.shape[0], number, dtype=np.uint16)
        rows = self._index.find(tables, ids)
        new = np.flatnonzero(rows < 0)
        if self._next + new.shape[0] > self._ids.room.rows:
            raise no_room(self._next + new.shape[0], self._ids.room.rows)
        rows[new] = np.arange(self._next, self._next + new.shape[0])
        self._index.insert(tables[new], ids[new], rows[new])
        self._next += new.shape[0]
        for name in _USES:
            if name in part.columns:
                self._uses[name].append((rows, part.columns[name].numpy()[~shared]))
        keys = np.full(part.ids.shape[0], self._shared[number], dtype=np.int64)
        keys[~shared] = rows
        return torch.from_numpy(keys)

    def remove(self, table: str, ids: Tensor) -> None:
        """These have no row after all."""
        if self._index is not None:
            gone = ids.numpy()
            tables = np.full(gone.shape[0], self._ids.names.index(table), dtype=np.uint16)
            known = self._index.find(tables, gone) >= 0
            self._index.remove(tables[known], gone[known])

    def state(self) -> tuple[list[Arrays], Arrays]:
        """Rows and rest, as Translator.load_state takes them."""
        num_tables, none = len(self._ids.names), np.empty(0, dtype=np.int64)
        rest: Arrays = {name: np.array([0], dtype=np.int64) for name in ("batch", "first_row")}
        rest |= {"next_row": np.array([self._next], dtype=np.int64), "shared_rows": self._shared.copy()}
        rest |= {"expire_kinds": np.zeros(num_tables, np.uint8), "counters": np.zeros((num_tables, 4), np.int64)}
        rest |= dict.fromkeys(("quarantined_rows", "quarantined_at", "waiting_ids", "waiting_counts"), none)
        rest["waiting_tables"] = np.empty(0, dtype=np.uint16)
        with_one = np.flatnonzero(self._shared >= 0)
        parts = [_columns(with_one.astype(np.uint16), np.zeros_like(with_one), self._shared[with_one], shared=1)]
        uses = {name: self._last(values) for name, values in self._uses.items() if values}
        if self._index is not None:
            for entries in self._index.items():
                columns = _columns(*entries, shared=0)
                parts.append(columns | {name: values[columns["row"]] for name, values in uses.items()})
        return parts, rest

    def _last(self, given: list[tuple[Ints, Ints]]) -> Ints:
        """What each row was given last."""
        values = np.zeros(self._next, dtype=np.int64)
        for rows, some in given:
            values[rows] = some
        return values


def _columns(tables: NDArray[np.uint16], ids: Ints, rows: Ints, shared: int) -> Arrays:
    marks = np.full(rows.shape[0], shared, dtype=np.uint8)
    return {"row": rows, "table": tables, "id": ids, "shared": marks}


def no_room(rows: int, most: int) -> BudgetError:
    """For more saved rows than a group may have."""
    return BudgetError(
        f"there are {rows:,} rows of dynamic ids to load, and memory= has room for {most:,} with their index. Give more "
        "memory=."
    )
