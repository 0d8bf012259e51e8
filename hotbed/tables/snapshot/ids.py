"""Dynamic ids for checkpoints: which id has which row, of one moment, and back.

A checkpoint holds, next to each saved row, its number and what its expiry depends on (`DynamicIds.columns`); which rows are
free, and all that is no row's, are in the rest. A chain of checkpoints is read oldest first: of two owners of a row the later
one has it, and what is free at the end has none. Files of an ssd may hold records that no id has: they are dropped. Rows that
come without a number (of another run, of a model folder) get new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.ids.index import Ints
from hotbed.ops.records import Layout
from hotbed.ops.shard import Shard
from hotbed.tables.snapshot.restored_ids import RestoredIds, no_room
from hotbed.types import RowPart

if TYPE_CHECKING:
    from hotbed.store.held import Holder
    from hotbed.tables.group.dynamic import DynamicIds

Arrays = dict[str, NDArray[Any]]
_CHUNK = 1 << 18
_FREE, _SKETCH = "free_rows", "sketch_"
_WAITING = ("waiting_tables", "waiting_ids", "waiting_counts")


class IdsSnapshot:
    """A snapshot of one group, as trained: the rows that are held, or in files, without those that no id has by then.

    `read` gives the records of shared rows that were never written.
    """

    def __init__(
        self, ids: DynamicIds, layout: Layout, held: Holder, group: str, read: Callable[[Tensor], Tensor]
    ) -> None:
        self._names, self._layout, self._held, self._group = ids.names, layout, held, group
        self._in_files = held.in_files(ids.live_keys)
        translator = ids.translator
        with ids.as_trained():
            shared = np.array([translator.shared_key(table) for table in range(len(ids.names))], dtype=np.int64)
            shared = shared[shared >= 0]
            if held.files:
                self._in_files = np.union1d(self._in_files, shared)
            keys = np.union1d(held.keys, self._in_files)
            untrained = np.setdiff1d(shared, keys)  # shared rows that were never written
            keys = np.union1d(keys, untrained)
            self._columns = translator.rows_state(keys[translator.is_live(keys)])
            self._rest = {**translator.rest_state(), _FREE: translator.free_rows()}
            idle = np.concatenate([self._rest[_FREE], self._rest["quarantined_rows"]])
            tables, gone = translator.id_of(idle)
            back = translator.has_row(tables, gone)
            self._gone = tables[~back], gone[~back]
        self._untrained = torch.from_numpy(untrained)
        self._first = read(self._untrained) if untrained.size else None

    def parts(self) -> Iterator[RowPart]:
        """Rows by table; of rows in files, their numbers alone."""
        yield from self._parts(self._untrained, self._first)
        for keys, records in self._held.items():
            yield from self._parts(keys, records)
        for start in range(0, self._in_files.shape[0], _CHUNK):
            yield from self._parts(torch.from_numpy(self._in_files[start : start + _CHUNK]), None)

    def _parts(self, keys: Tensor, records: Tensor | None) -> Iterator[RowPart]:
        """Some of the rows, by table; without records, their numbers alone."""
        rows = self._columns["row"]
        at = np.minimum(np.searchsorted(rows, keys.numpy()), max(0, rows.shape[0] - 1))
        known = np.flatnonzero(rows[at] == keys.numpy()) if rows.shape[0] else at[:0]
        at = at[known]
        tables = self._columns["table"][at]
        for number in np.unique(tables):
            mine = np.flatnonzero(tables == number)
            columns: dict[str, Tensor] = {}
            if records is not None:
                columns = self._layout.cut(records[torch.from_numpy(known[mine])])
            for name, values in self._columns.items():
                if name not in ("table", "id"):
                    columns[name] = torch.from_numpy(values[at[mine]].astype(np.int64))
            yield RowPart(self._names[number], torch.from_numpy(self._columns["id"][at[mine]]), columns)

    def gone(self) -> Iterator[tuple[str, Tensor]]:
        """Ids whose rows are free or rest, and that have no other row by now."""
        tables, ids = self._gone
        for number, name in enumerate(self._names):
            mine = np.unique(ids[tables == number])
            if mine.shape[0]:
                yield name, torch.from_numpy(mine)

    def rest(self) -> dict[str, Tensor]:
        """Everything that does not belong to a row."""
        return {f"ids.{self._group}.{name}": _as_tensor(name, values) for name, values in self._rest.items()}


class IdsSink:
    """The owners of rows, as parts give them, oldest first."""

    def __init__(self, ids: DynamicIds) -> None:
        self._ids = ids
        self._parts: list[Arrays] = []
        self.newcomers = RestoredIds(ids)

    def add(self, part: RowPart) -> Tensor:
        """Take note of a part; the keys of its rows, -1 for what has none here."""
        if "row" not in part.columns:
            return self.newcomers.add(part)
        columns = {name: part.columns[name].numpy().copy() for name in self._ids.columns}
        number, most = self._ids.names.index(part.table), self._ids.room.rows
        if columns["row"].shape[0] and columns["row"].max() >= most:
            raise no_room(int(columns["row"].max()) + 1, most)
        tables = np.full(part.ids.shape[0], number, dtype=np.uint16)
        self._parts.append({**columns, "table": tables, "id": part.ids.numpy().copy()})
        return torch.from_numpy(columns["row"])

    def join(self, group: str, rests: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What several ranks saved beyond rows, as one rank of another number needs it."""
        return _joined_rest(self._ids, group, rests, self._ids.shard)

    def end(self, group: str, tensors: Mapping[str, Tensor], written: Callable[[], Iterator[Ints]]) -> Ints:
        """Give rows to their owners; which of the keys that have a record no id has."""
        self._give_rows(group, tensors)
        lost = [keys[~self._ids.translator.is_live(keys)] for keys in written()]
        return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *lost]))

    def _give_rows(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        prefix = f"ids.{group}."
        rest = {name.removeprefix(prefix): t.numpy() for name, t in tensors.items() if name.startswith(prefix)}
        if rest:
            rest["waiting_tables"] = rest["waiting_tables"].astype(np.uint16)
        for number, dtype in self._ids.translator.sketch_types().items():
            if f"{_SKETCH}{number}" in rest:
                rest[f"{_SKETCH}{number}"] = rest[f"{_SKETCH}{number}"].view(dtype)
        if "next_row" not in rest:
            given, numbered = self.newcomers.state()
            self._ids.translator.load_state(given, numbered | rest)
            return
        idle = np.concatenate([rest.pop(_FREE), rest["quarantined_rows"]])
        parts = []
        if self._parts:
            merged = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
            rows, last = np.unique(merged["row"][::-1], return_index=True)
            last = merged["row"].shape[0] - 1 - last[~np.isin(rows, idle)]
            parts.append({name: values[last] for name, values in merged.items()})
        self._ids.translator.load_state(parts, rest)


def _joined_rest(ids: DynamicIds, group: str, rests: Sequence[Mapping[str, Tensor]], shard: Shard) -> dict[str, Tensor]:
    """What several ranks saved beyond rows, for one rank of another number: its own pending ids, and all counts for the first.

    Rows get new numbers, so what says which are free or rest is left out. A sketch cannot be taken apart by ids: every rank has
    the sum of all, in which no count is too low.
    """
    prefix = f"ids.{group}."
    named = [{name.removeprefix(prefix): t for name, t in rest.items() if name.startswith(prefix)} for rest in rests]
    found = {name: named[0][name] for name in ("batch", "expire_kinds")}
    counters = torch.stack([rest["counters"] for rest in named]).sum(0)
    found["counters"] = counters if shard.rank == 0 else torch.zeros_like(counters)
    waiting = {name: torch.cat([rest[name] for rest in named]) for name in _WAITING}
    mine = shard.owner_of_ids(waiting["waiting_tables"], waiting["waiting_ids"]) == shard.rank
    found |= {name: column[mine] for name, column in waiting.items()}
    for number, dtype in ids.translator.sketch_types().items():
        name = f"{_SKETCH}{number}"
        total = np.stack([rest[name].numpy().view(dtype) for rest in named]).sum(0, dtype=np.uint64)
        found[name] = _as_tensor(name, np.minimum(total, np.iinfo(dtype).max).astype(dtype))
    return {f"{prefix}{name}": tensor for name, tensor in found.items()}


def _as_tensor(name: str, values: NDArray[Any]) -> Tensor:
    """In types that every torch has; sketches as bytes."""
    if name.startswith(_SKETCH):
        return torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).copy())
    return torch.from_numpy(values.astype(np.int64) if values.dtype == np.uint16 else values.copy())
