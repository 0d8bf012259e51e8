"""Which dynamic id has which row at the end of a chain of checkpoints: for readers that use ids instead of row numbers.

A row number may have had several owners along a chain, and records of an earlier owner are still in its file. The last owner
has the row; rows that the last checkpoint lists as free or in quarantine have none. Takes 32 to 48 bytes per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.read import rows_of, tensors_of
from hotbed.checkpoint.write import REST
from hotbed.ops.records import saved_layout
from hotbed.ops.shard import Shard
from hotbed.store.ssd import frozen_items
from hotbed.types import RowPart, TableShape

Ints = NDArray[np.int64]
Thaw = Callable[[str, Path, Mapping[str, TableShape], Shard], Iterator[RowPart]]


class _OwnedRows(NamedTuple):
    """The rows of one group that have an owner, ascending; [N] each."""

    rows: Ints
    tables: Ints  # numbers in the manifest
    ids: Ints
    shared: Ints
    uses: Ints  # [N, K]: the further numbers of a row, such as its last use, in the order of its shape


class Owners:
    """The owners of rows in the last checkpoint of a chain."""

    def __init__(self, chain: Sequence[Entry]) -> None:
        self.shapes = chain[-1].manifest.tables
        self._names = list(self.shapes)
        self._last = {group: entry for entry in chain for group in entry.frozen}
        found: dict[str, list[_OwnedRows]] = {}
        if any(shape.rows is None for shape in self.shapes.values()):
            for part in (part for entry in chain for part in rows_of(entry)):
                if "row" in part.columns and part.table in self.shapes:
                    found.setdefault(self._group(part.table), []).append(self._owned(part))
        rest = tensors_of(chain[-1], REST) if found else {}
        self._owned_of = {group: _latest(parts, group, rest) for group, parts in found.items()}

    def owned(self, part: RowPart) -> Tensor:
        """Which rows of a part still belong to their ids, bool [N]; all of them in preset tables."""
        if "row" not in part.columns or part.table not in self.shapes:
            return torch.ones(part.ids.shape[0], dtype=torch.bool, device="cpu")
        known, rows = self._owned_of[self._group(part.table)], part.columns["row"].numpy()
        at = np.minimum(np.searchsorted(known.rows, rows), max(0, known.rows.shape[0] - 1))
        is_table = known.tables[at] == self._names.index(part.table)
        same = [known.rows[at] == rows, is_table, known.ids[at] == part.ids.numpy()]
        return torch.from_numpy(
            np.logical_and.reduce(same) if known.rows.shape[0] else np.zeros_like(at, dtype=np.bool_)
        )

    def thaw(self, entry: Entry, shard: Shard, preset: Thaw, *, numbered: bool = False) -> Iterator[RowPart]:
        """The rows in the ssd segments of a checkpoint of the chain: of preset tables by `preset`, of dynamic ids by id.

        The segments of a checkpoint hold all rows of their group, so those of the last one that has any are read. Rows of
        dynamic ids are under numbers that ids may have lost since; where `numbered`, they come with their `row`.
        """
        for group, folder in entry.frozen.items():
            if self._last[group] is not entry:
                continue
            if group in self._owned_of:
                yield from self._thawed(group, folder, numbered)
            else:
                yield from preset(group, folder, entry.manifest.tables, shard)

    def _thawed(self, group: str, folder: Path, numbered: bool) -> Iterator[RowPart]:
        """The rows in ssd files, by their ids, with `shared` and uses as saved parts have them."""
        known = self._owned_of[group]
        shape = next(one for name, one in self.shapes.items() if self._group(name) == group)
        layout, uses = saved_layout(shape), _uses_of(shape)
        for keys, records in frozen_items(folder):
            at = np.searchsorted(known.rows, keys.numpy())
            here = np.flatnonzero(known.rows[np.minimum(at, known.rows.shape[0] - 1)] == keys.numpy())
            at = at[here]
            for table in np.unique(known.tables[at]):
                mine = np.flatnonzero(known.tables[at] == table)
                some = records[torch.from_numpy(here[mine])]
                columns = {"weight": layout.weights(some)} | {s: some[:, layout.columns(s)] for s in layout.states}
                columns["shared"] = torch.from_numpy(known.shared[at[mine]])
                if numbered:
                    columns["row"] = torch.from_numpy(known.rows[at[mine]])
                columns |= {name: torch.from_numpy(known.uses[at[mine], place]) for place, name in enumerate(uses)}
                yield RowPart(self._names[table], torch.from_numpy(known.ids[at[mine]]), columns)

    def _group(self, table: str) -> str:
        return self.shapes[table].group_name

    def _owned(self, part: RowPart) -> _OwnedRows:
        numbers = np.full(part.ids.shape[0], self._names.index(part.table), dtype=np.int64)
        columns = [part.columns["row"], part.ids, part.columns["shared"]]
        rows, ids, shared = (column.numpy().copy() for column in columns)
        uses = [part.columns[name].numpy() for name in _uses_of(self.shapes[part.table])]
        return _OwnedRows(
            rows, numbers, ids, shared, np.stack(uses, 1) if uses else np.empty((rows.shape[0], 0), np.int64)
        )


def _uses_of(shape: TableShape) -> list[str]:
    return [name for name in shape.numbers if name not in ("row", "shared")]


def _latest(parts: list[_OwnedRows], group: str, rest: dict[str, Tensor]) -> _OwnedRows:
    """The last owner of every row that is not free or in quarantine."""
    merged = _OwnedRows(*(np.concatenate(columns) for columns in zip(*parts)))
    rows, last = np.unique(merged.rows[::-1], return_index=True)
    idle = [rest[f"ids.{group}.{name}"].numpy() for name in ("free_rows", "quarantined_rows")]
    last = merged.rows.shape[0] - 1 - last[~np.isin(rows, np.concatenate(idle))]
    return _OwnedRows(*(column[last] for column in merged))
