"""Rows for checkpoints: all rows of one moment out of the tables, and saved rows back into them (checkpoint/types.py).

Tables whose rows are all on the device copy those that changed at once. Behind a cache the changed rows are written back first;
a store in memory then gives them in another thread while training continues, a store on an ssd gives files to be linked.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from hotbed.errors import RunError
from hotbed.ops.records import as_numpy, saved_layout
from hotbed.ops.shard import SPREAD, WHOLE, Shard
from hotbed.optim import RowOptimizer
from hotbed.store.held import FrozenFiles, Holder
from hotbed.store.ssd import frozen_items
from hotbed.tables.group.group import TableGroup
from hotbed.tables.group.keyspace import Member
from hotbed.tables.snapshot.parts import KeysSink, KeysSnapshot, parts_of
from hotbed.tables.transaction import Changes
from hotbed.types import FrozenFolder, RowPart, TableShape

P = ParamSpec("P")


def shapes_of(tables: Tables) -> dict[str, TableShape]:
    """The tables as a manifest lists them."""
    return {name: _shape(tables, tables.group_of(name), name) for name in tables.tables}


class Tables(Protocol):
    """EmbeddingTables, as far as this needs them."""

    tables: dict[str, Any]
    groups: list[TableGroup]
    optimizer: RowOptimizer
    num_updates: int
    lr_factor: float
    changes: Changes

    def claim(self) -> None:
        """Before anything reads or writes all rows."""

    def group_of(self, table: str) -> TableGroup:
        """The group of a table."""


class _FrozenGroup(NamedTuple):
    """The files of one group on its ssd."""

    name: str
    files: FrozenFiles

    def link_into(self, folder: Path) -> None:
        self.files.link_into(folder)


class TablesSnapshot:
    """Between two steps; a context, to be left in any thread. Whatever stops on the way, rows count as not saved."""

    def __init__(self, tables: Tables, touched: bool) -> None:
        tables.claim()
        self.tables = shapes_of(tables)
        self._rest = {
            "num_updates": torch.tensor(tables.num_updates, device="cpu"),
            "lr_factor": torch.tensor(tables.lr_factor, dtype=torch.float64, device="cpu"),
        }
        self._keys: list[KeysSnapshot] = []
        self._touched = touched
        self._frozen: list[_FrozenGroup] = []
        self._held: list[Holder] = []
        self._undo = ExitStack()
        weakref.finalize(self, self._undo.close).atexit = False  # one that is dropped and was never entered
        try:
            for group in tables.groups:
                self._take(group, touched)
        except BaseException:
            self._undo.close()
            raise

    def __enter__(self) -> TablesSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def parts(self) -> Iterator[RowPart]:
        """Rows by table."""
        for keys in self._keys:
            yield from keys.parts()

    def gone(self) -> Iterator[tuple[str, Tensor]]:
        """Ids that have expired."""
        for keys in self._keys if self._touched else ():
            yield from keys.gone()

    def rest(self) -> dict[str, Tensor]:
        """Counts that learning rates depend on, the state of dynamic ids, and what caches hold."""
        return self._rest

    @property
    def frozen(self) -> Sequence[FrozenFolder]:
        """One folder for each group on an ssd."""
        return self._frozen

    def commit(self) -> None:
        """The checkpoint is safely on disk."""
        for held in self._held:
            held.commit()

    def _take(self, group: TableGroup, touched: bool) -> None:
        held = group.holder()
        self._undo.callback(held.give_back)
        held.take(touched)
        self._held.append(held)
        self._frozen += [_FrozenGroup(group.name, files) for files in held.files]
        keys = group.snapshot(held)
        self._keys.append(keys)
        self._rest |= keys.rest() | group.policy_state()


def _in_load(method: Callable[Concatenate[TablesSink, P], None]) -> Callable[Concatenate[TablesSink, P], None]:
    """A part of a load."""

    @functools.wraps(method)
    def in_turn(sink: TablesSink, /, *args: P.args, **kwargs: P.kwargs) -> None:
        with sink._tables.changes.load_turn():
            method(sink, *args, **kwargs)

    return in_turn


class TablesSink:
    """Takes saved rows back."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.tables = shapes_of(tables)
        self.notes: list[str] = []
        self._rest: dict[str, Tensor] = {}
        self._sinks: dict[str, KeysSink] = {}
        self._rooms: dict[str, Tensor] = {}  # for records on their way

    @_in_load
    def begin(self) -> None:
        """All rows back to their initial values. Until `end` the tables refuse everything else, whatever stops on the way."""
        self._tables.changes.begin_load(self._tables.claim, self.tables, whole=True, anew=True)
        self._rest = {
            "num_updates": torch.tensor(0, device="cpu"),
            "lr_factor": torch.tensor(1.0, dtype=torch.float64, device="cpu"),
        }
        for group in self._tables.groups:
            group.clear()
            self._sinks[group.name] = group.keyspace.sink()

    def replace(self, parts: Iterable[RowPart]) -> None:
        """These are the rows of dynamic ids from now on; other tables stay as they are."""
        names = [name for name, shape in self.tables.items() if shape.rows is None]
        with self._tables.changes.loading(self._tables.claim, names, whole=True):
            self._replace(parts, [group for group in self._tables.groups if group.members.keys() & set(names)])

    def _replace(self, parts: Iterable[RowPart], groups: Iterable[TableGroup]) -> None:
        for group in groups:
            group.clear()
            self._sinks[group.name] = group.keyspace.sink()
        for part in parts:
            first = self.first(part.table, part.ids, part.columns["weight"])
            self.add(part._replace(columns={**part.columns, **first}))
        self._end_keys()

    def first(self, table: str, ids: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
        """The columns of these rows at their initial values, or as if they had begun with these weights."""
        columns = self._tables.group_of(table).first(table, ids)
        if weight is not None:
            columns["weight"].copy_(weight)
            for name, state in self._tables.group_of(table).optimizer.first_state(columns["weight"].float()).items():
                columns[name].copy_(state)
        return columns

    @_in_load
    def adopt(self, name: str, folder: Path) -> None:
        """The rows of a group's files, as files where the group is on an ssd."""
        for group in self._tables.groups:
            if group.name == name:
                group.residency.adopt(folder)
                return
        raise RunError(f"{folder} holds rows of no table here.")

    def thaw(
        self, name: str, folder: Path, tables: Mapping[str, TableShape], shard: Shard = WHOLE
    ) -> Iterator[RowPart]:
        """The rows of files that tables of other shapes wrote, or of another rank."""
        return thawed(name, folder, tables, shard)

    @_in_load
    def gone(self, table: str, ids: Tensor) -> None:
        """These rows have their initial values again; of dynamic ids, the rest says which."""
        if self.tables[table].rows is None:
            return
        self.add(RowPart(table, ids, self.first(table, ids), self.tables[table].span[0]))

    @_in_load
    def add(self, part: RowPart) -> None:
        """Write these rows; of tables spread over ranks, those that are this rank's."""
        group = self._tables.group_of(part.table)
        if group.shard.world > 1:
            mine = group.owns(part.table, part.ids)
            if "shared" in part.columns:  # of which every rank has a replica
                mine |= part.columns["shared"] != 0
            part = _only(part, mine)
        if "weight" in part.columns:
            part = self._sliced(part)
        if group.name not in self._sinks:
            self._sinks[group.name] = group.keyspace.sink()
        keys = self._sinks[group.name].add(part)
        if "weight" not in part.columns:
            return  # it came with the files of its group
        records = self._room_for(group, part.ids.shape[0])
        # numpy works in this thread alone; torch's threads would compete with those that read: 0.8 instead of 0.15 s a GB
        for name, column in group.layout.cut(records).items():
            given = part.columns[name].view(column.shape).to(column.dtype)
            np.copyto(as_numpy(column), as_numpy(given))
        known = keys.numpy() >= 0
        if not known.all():
            keys, records = keys[torch.from_numpy(known)], records[torch.from_numpy(known)]
        group.write_rows(keys, records)

    def current(self, table: str, ids: Tensor) -> dict[str, Tensor]:
        """The columns of these rows as they are now; initial values of those that other ranks have."""
        group, columns = self._tables.group_of(table), self.first(table, ids)
        mine = group.owns(table, ids)
        keys = group.keyspace.sink().add(RowPart(table, ids[mine], {}))
        for name, column in group.layout.cut(group.read_rows(keys)).items():
            columns[name][mine] = column
        return columns

    def _sliced(self, part: RowPart) -> RowPart:
        """Rows of which a part has other columns than this rank: with its own, where the part has none."""
        (first, end), start = self.tables[part.table].span, part.first_column
        stop = start + part.columns["weight"].shape[1]
        if (first, end) == (start, stop):
            return part
        columns = (
            self.current(part.table, part.ids) if first < start or stop < end else self.first(part.table, part.ids)
        )
        elements = self._tables.group_of(part.table).layout.element_states
        begin, finish = max(first, start), max(first, start, min(end, stop))
        for name, column in columns.items():
            given = part.columns[name]
            if name == "weight" or name in elements:
                column[:, begin - first : finish - first] = given[:, begin - start : finish - start]
            else:
                column.copy_(given.view(column.shape))
        return part._replace(columns={**part.columns, **columns}, first_column=first)

    def _room_for(self, group: TableGroup, count: int) -> Tensor:
        """Memory for records [count, W], the same for one part after the other; what no column fills is zero."""
        name = group.name
        room = self._rooms.get(name)
        if room is None or room.shape[0] < count:
            room = self._rooms[name] = torch.zeros(count, group.layout.width, dtype=group.records.dtype, device="cpu")
        return room[:count]

    def rest(self, tensors: dict[str, Tensor]) -> None:
        """Counts that learning rates depend on."""
        self._rest |= tensors

    def rest_of_ranks(self, rests: Sequence[Mapping[str, Tensor]]) -> None:
        """Instead of `rest`: what each of another number of ranks gave. What their caches held is left out."""
        self._rest |= {name: rests[0][name] for name in ("num_updates", "lr_factor")}
        for group in self._tables.groups:
            self._rest |= group.keyspace.sink().join(group.name, rests)

    @_in_load
    def end(self) -> None:
        """From here on rows count as untouched; what the caches held is in them again."""
        left_out: list[str] = []
        self._tables.num_updates = int(self._rest["num_updates"])
        self._tables.lr_factor = float(self._rest["lr_factor"])
        self._end_keys()
        for group in self._tables.groups:
            group.residency.count_as_saved()
            left_out += group.residency.load_policy_state(group.name, self._rest)
        if left_out:
            self.notes.append(f"starting with an empty cache: {'; '.join(left_out)}")
        self._tables.changes.end_load(self.tables, whole=True)

    def _end_keys(self) -> None:
        """Give rows to their ids."""
        for group in self._tables.groups:
            if group.name in self._sinks:
                lost = self._sinks[group.name].end(group.name, self._rest, group.residency.written_keys)
                if lost.size:
                    group.drop_rows(torch.from_numpy(lost))


def _only(part: RowPart, which: Tensor) -> RowPart:
    columns = {name: column[which] for name, column in part.columns.items()}
    return part._replace(ids=part.ids[which], columns=columns)


def _shape(tables: Tables, group: TableGroup, name: str) -> TableShape:
    layout, table, shard = group.layout, tables.tables[name], group.shard
    owner = shard.tables[list(group.members).index(name)][1] if shard.tables else SPREAD
    return TableShape(
        dim=table.dim,
        rows=table.rows,
        precision="fp64" if group.records.dtype == torch.float64 else layout.precision,
        optimizer=type(group.optimizer).__name__,
        states={state: table.dim if state in layout.element_states else 1 for state in layout.states},
        numbers=group.keyspace.columns,
        hashing=table.hashing,
        init=str(table.init),
        seed=group.seed,
        group=group.own,
        owner=None if owner == SPREAD else owner,
        columns=shard.columns_of(table.dim) if shard.by_column else None,
    )


def saved_shard(shapes: Mapping[str, TableShape], shard: Shard) -> Shard:
    """What a rank has of one group, whose tables have these shapes in its checkpoint."""
    if any(shape.columns is not None for shape in shapes.values()):
        return shard._replace(by_column=True)
    return shard.of_tables(
        tuple((one.rows or 0, SPREAD if one.owner is None else one.owner) for one in shapes.values())
    )


def thawed(
    name: str, folder: Path, tables: Mapping[str, TableShape], shard: Shard = WHOLE, known: Collection[str] = ()
) -> Iterator[RowPart]:
    """The rows of a frozen folder of a group, as tables of these shapes saved them; each part is good until the next.

    `known` segments are left out (`frozen_items`).
    """
    members, base = [], 0
    shapes = {table: one for table, one in tables.items() if one.group_name == name}
    for table, shape in shapes.items():
        members.append(Member(table, shape.rows or 0, base, cast(Any, None), False, None))
        base += shape.rows or 0
    one, shard = next(iter(shapes.values())), saved_shard(shapes, shard)
    for keys, records in frozen_items(folder, known):
        for part in parts_of(saved_layout(one), members, shard.keys_of(keys), records):
            yield part._replace(first_column=one.span[0])
