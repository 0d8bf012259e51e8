"""The rows of checkpoints in, a draft of the next version out: by row number, or for dynamic ids by the number of the id.

Two ways lead here. `add` takes the rows of a whole model, each with its last owner: at the start, and when all rows of a
checkpoint are compared. `add_since` takes what incremental checkpoints have changed: rows that were trained, ids that have
come, gone or moved to other rows of training, and of rows on an ssd the records in files that the version before did not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.read import gone_of, tensors_of
from hotbed.checkpoint.write import REST
from hotbed.ops.records import saved_layout
from hotbed.ops.shard import Shard
from hotbed.scorer.checkpoints import RANK_BITS, weights_of
from hotbed.scorer.owners import RowOwners
from hotbed.scorer.rows import FileRows
from hotbed.scorer.source import TableSource
from hotbed.scorer.versions import RowDraft
from hotbed.store.ssd import frozen_items, segments_of
from hotbed.tables.snapshot.snapshot import thawed
from hotbed.types import RowPart, TableShape

Ints = NDArray[np.int64]
# (table, rank) -> the vector [D] that ids without a row read; None: the row of no single id was never written
Shared = dict[tuple[str, int], NDArray[np.float32] | None]


class ReadAnewError(Exception):
    """The changes of a checkpoint cannot be applied, and why; the caller reads all of it."""


class Ids(Protocol):
    """The numbers of dynamic ids."""

    def add(self, ids: Ints) -> Ints:
        """The numbers of ids [n], distinct; unknown ones get new numbers."""

    def find(self, ids: Ints) -> Ints:
        """The numbers of ids [n]; -1 for unknown ones."""


class RowIntake:
    """Takes rows into a draft."""

    def __init__(
        self,
        tables: Mapping[str, TableSource],
        rows: FileRows,
        draft: RowDraft,
        ids: Mapping[str, Ids],
        owners: RowOwners | None,
    ) -> None:
        """`ids`: those of dynamic tables. `owners` is None if no changes will follow, or no ids are dynamic."""
        self._tables, self._rows, self.draft, self._ids, self.owners = tables, rows, draft, ids, owners
        self._numbers = {name: number for number, name in enumerate(tables)}
        self.shared: Shared = {}
        self._lost: list[tuple[str, Ints]] = []  # (group, keys) whose rows of training others have got
        self._awaited: list[Ints] = []  # keys that have a row in a file of an ssd from now on

    def add(self, part: RowPart, *, compare: bool = False) -> None:
        """Rows with their last owners, of a part of a whole model; a part without columns is gone."""
        table = self._tables[part.table]
        if not part.columns:
            if table.rows is not None:  # an id that is gone has no owner, so it is not here
                self.draft.drop(self._numbers[part.table], part.ids.numpy())
            return
        part = self._without_shared(part)
        if "weight" not in part.columns:
            return  # the files of an ssd have had its rows before
        numbers = np.ascontiguousarray(part.ids.numpy())
        if table.rows is None:
            numbers = self._ids[part.table].add(numbers)
            if self.owners is not None and "row" in part.columns:
                self.owners.set(table.group, part.columns["row"].numpy(), self._keys(part.table, numbers))
        self._put(part, numbers, compare=compare)

    def add_since(self, entries: Sequence[Entry], before: Entry, shard: Shard) -> None:
        """What one rank has changed in these checkpoints, oldest first; `before` is the one that was applied last."""
        last = {group: entry for entry in entries for group in entry.frozen}
        known = {group: segments_of(folder) for group, folder in before.frozen.items()}
        for entry in entries:
            shapes = entry.manifest.tables
            frozen = {group: folder for group, folder in entry.frozen.items() if last[group] is entry}
            dynamic = {shape.group_name: shape for shape in shapes.values() if shape.rows is None}
            for group in frozen.keys() - dynamic.keys():
                for part in thawed(group, frozen[group], shapes, shard, known.get(group, ())):
                    self.add(part)
            for table, ids in gone_of(entry):
                if shapes[table].rows is not None:
                    self.draft.drop(self._numbers[table], ids.numpy())
            for part in weights_of(entry, all_owners=True):
                self._change(part, shapes[part.table], shard)
            if dynamic:
                self._free(entry, dynamic, shard)
            for group in frozen.keys() & dynamic.keys():
                self._thaw(group, dynamic[group], frozen_items(frozen[group], known.get(group, ())), shard)
            self._drop_lost()

    def _change(self, part: RowPart, shape: TableShape, shard: Shard) -> None:
        """Rows that were trained, some with new owners."""
        if shape.rows is not None:
            self.add(part)
            return
        assert self.owners is not None, "changes are applied where owners are known"
        group = shape.group_name
        part.columns["row"] += shard.rank << RANK_BITS
        part = self._without_shared(part)
        numbers = self._ids[part.table].add(np.ascontiguousarray(part.ids.numpy()))
        keys = self._keys(part.table, numbers)
        new, lost = self.owners.move(group, part.columns["row"].numpy(), keys)
        self._lost.append((group, lost))
        if "weight" in part.columns:
            self._put(part, numbers)
        else:
            self._awaited.append(keys[new])

    def _free(self, entry: Entry, groups: Iterable[str], shard: Shard) -> None:
        """Ids whose rows of training are free by now. `gone` is not enough: it names the last owner of such a row alone."""
        assert self.owners is not None, "changes are applied where owners are known"
        rest = tensors_of(entry, REST)
        for group in groups:
            idle = np.concatenate([rest[f"ids.{group}.{name}"].numpy() for name in ("free_rows", "quarantined_rows")])
            self._each_table(self.owners.free(group, np.sort(idle) + (shard.rank << RANK_BITS)), self.draft.drop)

    def _thaw(self, group: str, shape: TableShape, items: Iterable[tuple[Tensor, Tensor]], shard: Shard) -> None:
        """The records of new files of an ssd, by row number."""
        assert self.owners is not None, "changes are applied where owners are known"
        layout, names = saved_layout(shape), list(self._tables)
        for rows, records in items:
            places = rows.numpy() + (shard.rank << RANK_BITS)
            keys, weights = self.owners.owners(group, places), layout.weights(records).float().numpy()
            for at in np.flatnonzero(keys < -1):
                self.shared[names[-2 - keys[at]], shard.rank] = weights[at].copy()
            tables = np.searchsorted(self._rows.files.starts, keys, side="right") - 1
            for table in np.unique(tables[keys >= 0]):
                mine = np.flatnonzero((tables == table) & (keys >= 0))
                self.draft.put(int(table), keys[mine] - self._rows.start_of(int(table)), weights[mine])

    def _drop_lost(self) -> None:
        """After a checkpoint: ids that no longer have a row in training, and rows that were announced and did not come."""
        assert self.owners is not None or not self._lost, "changes are applied where owners are known"
        for group, keys in self._lost:
            if keys.size and self.owners is not None:
                self._each_table(keys[~self.owners.has_place(group, keys)], self.draft.drop)
        self._lost = []

    def check_complete(self) -> None:
        """After all checkpoints: every id with a row in a file of an ssd has got it."""

        def check(table: int, numbers: Ints) -> None:
            if not self.draft.is_live(table, numbers).all():
                raise ReadAnewError("rows of new ids are in older files of the ssd")

        awaited = [keys for keys in self._awaited if keys.size]
        if awaited and self.owners is not None:
            self._each_table(np.concatenate(awaited), check)

    def _each_table(self, keys: Ints, use: Callable[[int, Ints], None]) -> None:
        tables = np.searchsorted(self._rows.files.starts, keys, side="right") - 1
        for table in np.unique(tables):
            use(int(table), keys[tables == table] - self._rows.start_of(int(table)))

    def _put(self, part: RowPart, numbers: Ints, *, compare: bool = False) -> None:
        values = part.columns["weight"].float().numpy()
        self.draft.put(self._numbers[part.table], numbers, values, compare=compare)

    def _keys(self, table: str, numbers: Ints) -> Ints:
        return numbers + self._rows.start_of(self._numbers[table])

    def _without_shared(self, part: RowPart) -> RowPart:
        """The rows of ids; the vector that ids without a row share is noted."""
        if "shared" not in part.columns or not bool((is_shared := part.columns["shared"].view(-1) != 0).any()):
            return part
        number, rank = self._numbers[part.table], 0
        if "row" in part.columns:
            places = part.columns["row"][is_shared].numpy()
            rank = int(places[0]) >> RANK_BITS
            if self.owners is not None:
                self.owners.share(self._tables[part.table].group, places, number)
        if "weight" in part.columns:
            self.shared[part.table, rank] = part.columns["weight"][is_shared][0].float().numpy().copy()
        else:
            self.shared.setdefault((part.table, rank), None)
        return RowPart(part.table, part.ids[~is_shared], {name: one[~is_shared] for name, one in part.columns.items()})
