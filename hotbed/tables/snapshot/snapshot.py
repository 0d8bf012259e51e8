"""Rows for checkpoints: all rows of one moment out of the tables, and saved rows back into them (checkpoint/types.py).

Tables whose rows are all on the device copy those that changed at once. Behind a cache the changed rows are written back first;
a store in memory then gives them in another thread while training goes on, a store on an ssd gives files to be linked.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.owners import saved_layout
from hotbed.checkpoint.row_file import as_numpy
from hotbed.checkpoint.types import Frozen, RowPart, TableShape, group_name
from hotbed.errors import RunError
from hotbed.ops.move import first_records, scatter_rows
from hotbed.ops.records import Layout
from hotbed.ops.shard import WHOLE, Shard
from hotbed.optim import RowOptimizer
from hotbed.store import MemoryStore, SsdStore, TieredStore
from hotbed.store.held import HeldRows
from hotbed.store.ssd import frozen_items
from hotbed.tables.group.cached import CachedGroup
from hotbed.tables.group.dynamic import DynamicIds
from hotbed.tables.group.group import Member, TableGroup
from hotbed.tables.snapshot.cache import bring_in, tensors_of
from hotbed.tables.snapshot.ids import IdsSink, IdsSnapshot, joined_rest, numbers_of
from hotbed.tables.snapshot.rows import CopiedRows, Records
from hotbed.tables.transaction import Changes

P = ParamSpec("P")


def shapes_of(tables: Tables) -> dict[str, TableShape]:
    """The tables as a manifest tells them."""
    return {name: _shape(tables, tables._group_of(name), name) for name in tables.tables}


class Tables(Protocol):
    """EmbeddingTables, as far as this needs them."""

    tables: dict[str, Any]
    groups: list[TableGroup]
    optimizer: RowOptimizer
    num_updates: int
    lr_factor: float
    changes: Changes

    def _claim(self) -> None: ...

    def _group_of(self, table: str) -> TableGroup: ...


class _FrozenGroup(NamedTuple):
    """The files of one group on its ssd."""

    name: str
    files: Any  # store.ssd.Frozen

    def link_into(self, folder: Path) -> None:
        self.files.link_into(folder)


class TablesSnapshot:
    """Between two steps; a context, to be left in any thread. Whatever stops on the way, rows count as not saved."""

    def __init__(self, tables: Tables, touched: bool) -> None:
        tables._claim()
        self.tables = shapes_of(tables)
        self._rest = {
            "num_updates": torch.tensor(tables.num_updates, device="cpu"),
            "lr_factor": torch.tensor(tables.lr_factor, dtype=torch.float64, device="cpu"),
        }
        self._sources: list[Callable[[], Iterator[RowPart]]] = []
        self._ids: list[IdsSnapshot] = []
        self._touched = touched
        self._frozen: list[_FrozenGroup] = []
        self._held: list[HeldRows | CopiedRows] = []
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
        for source in self._sources:
            yield from source()

    def gone(self) -> Iterator[tuple[str, Tensor]]:
        """Ids that have expired."""
        for ids in self._ids if self._touched else ():
            yield from ids.gone()

    def rest(self) -> dict[str, Tensor]:
        """Counts that learning rates depend on, the state of dynamic ids, and what caches hold."""
        return self._rest

    @property
    def frozen(self) -> Sequence[Frozen]:
        """One folder for each group on an ssd."""
        return self._frozen

    def commit(self) -> None:
        """The checkpoint is safely on disk."""
        for held in self._held:
            held.commit()

    def _take(self, group: TableGroup, touched: bool) -> None:
        if not isinstance(group, CachedGroup):
            copied = CopiedRows(group)
            self._hold(copied, touched)
            self._sources.append(_by_table(group, copied.items))
            return
        group.flush()
        store, ids = group.store, group.ids
        if isinstance(store, MemoryStore):
            held = store.holder()
            self._hold(held, touched)
            if ids is None:
                self._sources.append(_by_table(group, held.items))
            else:
                self._sources.append(_by_id(group, self._ids_of(group, ids, held.keys), held.items))
        elif isinstance(store, (SsdStore, TieredStore)):
            frozen = self._undo.enter_context(store.freeze())
            self._frozen.append(_FrozenGroup(_name_of(group), frozen))
            if ids is not None:
                with ids.as_trained():
                    live = np.concatenate([np.empty(0, dtype=np.int64), *ids.translator.live_keys()])
                known = self._ids_of(group, ids, live)
                self._sources.append(lambda: known.all_parts(group.layout))
        self._rest |= tensors_of(group, _name_of(group))

    def _hold(self, held: HeldRows | CopiedRows, touched: bool) -> None:
        self._undo.callback(held.give_back)
        held.take(touched)
        self._held.append(held)

    def _ids_of(self, group: CachedGroup, ids: DynamicIds, keys: NDArray[np.int64]) -> IdsSnapshot:
        found = IdsSnapshot(ids, keys)
        self._ids.append(found)
        self._rest |= found.rest(_name_of(group))
        return found


def _by_table(group: TableGroup, records: Callable[[], Iterator[Records]]) -> Callable[[], Iterator[RowPart]]:
    members, shard = list(group.members.values()), group.shard
    return lambda: (
        part for keys, rows in records() for part in parts_of(group.layout, members, shard.keys_of(keys), rows)
    )


def _by_id(
    group: CachedGroup, ids: IdsSnapshot, records: Callable[[], Iterator[Records]]
) -> Callable[[], Iterator[RowPart]]:
    untrained = torch.from_numpy(ids.untrained)
    first = torch.empty(untrained.shape[0], group.layout.width, dtype=torch.float32, device="cpu")
    group.store.read(untrained, first)

    def parts() -> Iterator[RowPart]:
        for keys, rows in (pair for pairs in ([(untrained, first)], records()) for pair in pairs):
            yield from ids.parts(group.layout, keys, rows)

    return parts


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
        self._ids: dict[str, IdsSink] = {}
        self._rooms: dict[str, Tensor] = {}  # for records on their way

    @_in_load
    def begin(self) -> None:
        """All rows back to their first values. Until `end` the tables refuse everything else, whatever stops on the way."""
        self._tables.changes.begin_load(self._tables._claim, self.tables, whole=True, anew=True)
        self._rest = {
            "num_updates": torch.tensor(0, device="cpu"),
            "lr_factor": torch.tensor(1.0, dtype=torch.float64, device="cpu"),
        }
        for group in self._tables.groups:
            if isinstance(group, CachedGroup):
                group.clear()
            else:
                group.initialise(group._seed)
        self._begin_ids()

    def replace(self, parts: Iterable[RowPart]) -> None:
        """These are the rows of dynamic ids from now on; other tables stay as they are."""
        names = [name for name, shape in self.tables.items() if shape.rows is None]
        with self._tables.changes.loading(self._tables._claim, names, whole=True):
            self._replace(parts)

    def _replace(self, parts: Iterable[RowPart]) -> None:
        for group in self._tables.groups:
            if isinstance(group, CachedGroup) and group.ids is not None:
                group.clear()
        self._begin_ids()
        for part in parts:
            first = self.first(part.table, part.ids, part.columns["weight"])
            self.add(part._replace(columns={**part.columns, **first}))
        self._end_ids()

    def first(self, table: str, ids: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
        """The columns of these rows at their first values, or as if they had begun with these weights."""
        group = self._tables._group_of(table)
        if isinstance(group, CachedGroup) and group.ids is not None:
            records = group.ids.first_of_ids(table, ids)
        else:
            records = first_records(group.local_keys(table, ids), group.first_rows()).to(group.records.dtype)
        columns = group._cut(records)
        if weight is not None:
            columns["weight"].copy_(weight)
            for name, state in self._tables.optimizer.first_state(columns["weight"].float()).items():
                columns[name].copy_(state)
        return columns

    @_in_load
    def adopt(self, name: str, folder: Path) -> None:
        """The rows of a group's files, as files where the group is on an ssd."""
        for group in self._tables.groups:
            if _name_of(group) == name:
                store = group.store if isinstance(group, CachedGroup) else None
                if isinstance(store, (SsdStore, TieredStore)):
                    store.adopt(folder)
                else:
                    for keys, records in frozen_items(folder):
                        inside = keys < group.num_rows  # of dynamic ids; whose row is outside, `add` refuses
                        _write(group, keys[inside], records[inside])
                return
        raise RunError(f"{folder} holds rows of no table here.")

    def thaw(
        self, name: str, folder: Path, tables: Mapping[str, TableShape], shard: Shard = WHOLE
    ) -> Iterator[RowPart]:
        """The rows of files that tables of other shapes wrote, or of another rank."""
        return thawed(name, folder, tables, shard)

    @_in_load
    def gone(self, table: str, ids: Tensor) -> None:
        """These rows have their first values again; of dynamic ids, the rest says which."""
        if self.tables[table].rows is None:
            return
        self.add(RowPart(table, ids, self.first(table, ids)))

    @_in_load
    def add(self, part: RowPart) -> None:
        """Write these rows; of tables spread over ranks, those that are this rank's."""
        group = self._tables._group_of(part.table)
        dynamic = self._ids.get(_name_of(group))
        if group.shard.world > 1:
            mine = group.owns(part.table, part.ids)
            if "shared" in part.columns:  # of which every rank has a replica
                mine |= part.columns["shared"] != 0
            part = _only(part, mine)
        # numpy works in this thread alone; torch's threads would take turns with those that read: 0.8 instead of 0.15 s a GB
        keys = (
            group.shard.local_of(torch.from_numpy(part.ids.numpy() + group.members[part.table].base))
            if dynamic is None
            else dynamic.add(part)
        )
        if "weight" not in part.columns:
            return  # it came with the files of its group
        records = self._room_for(group, part.ids.shape[0])
        for name, column in group._cut(records).items():
            given = part.columns[name].view(column.shape).to(column.dtype)
            np.copyto(as_numpy(column), as_numpy(given))
        if dynamic is not None:
            known = keys >= 0
            keys, records = keys[known], records[known]
        _write(group, keys, records)

    def _room_for(self, group: TableGroup, count: int) -> Tensor:
        """Memory for records [count, W], the same for one part after the other; what no column fills is zero."""
        name = _name_of(group)
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
            if isinstance(group, CachedGroup) and group.ids is not None:
                self._rest |= joined_rest(group.ids, _name_of(group), rests, group.shard)

    @_in_load
    def end(self) -> None:
        """From here on rows count as untouched; what the caches held is in them again."""
        left_out: list[str] = []
        self._tables.num_updates = int(self._rest["num_updates"])
        self._tables.lr_factor = float(self._rest["lr_factor"])
        self._end_ids()
        for group in self._tables.groups:
            if not isinstance(group, CachedGroup):
                group.count_as_saved()
                continue
            if isinstance(group.store, MemoryStore):
                group.store.count_as_saved()
            left_out += bring_in(group, _name_of(group), self._rest)
        if left_out:
            self.notes.append(f"starting with an empty cache: {'; '.join(left_out)}")
        self._tables.changes.end_load(self.tables, whole=True)

    def _begin_ids(self) -> None:
        for group in self._tables.groups:
            if isinstance(group, CachedGroup) and group.ids is not None:
                self._ids[_name_of(group)] = IdsSink(group.ids)

    def _end_ids(self) -> None:
        """Give rows to their ids."""
        for group in self._tables.groups:
            if isinstance(group, CachedGroup) and (dynamic := self._ids.get(_name_of(group))) is not None:
                idle = dynamic.end(_name_of(group), self._rest)
                group.store.forget(torch.from_numpy(idle))


def _only(part: RowPart, which: Tensor) -> RowPart:
    return RowPart(part.table, part.ids[which], {name: column[which] for name, column in part.columns.items()})


def parts_of(layout: Layout, members: Sequence[Member], keys: Tensor, records: Tensor) -> Iterator[RowPart]:
    """Rows of a group, by table."""
    bases = torch.tensor([member.base for member in members], device="cpu")
    number = torch.bucketize(keys, bases, right=True) - 1
    for m, member in enumerate(members):
        which = (number == m).nonzero().squeeze(1)
        if which.shape[0]:
            rows = records if which.shape[0] == keys.shape[0] else records[which]
            ids = keys[which] - member.base
            columns = {"weight": layout.weights(rows)} | {s: rows[:, layout.columns(s)] for s in layout.states}
            yield RowPart(member.name, ids, columns)


def _shape(tables: Tables, group: TableGroup, name: str) -> TableShape:
    layout, table = group.layout, tables.tables[name]
    return TableShape(
        dim=table.dim,
        rows=table.rows,
        precision="fp64" if group.records.dtype == torch.float64 else layout.precision,
        optimizer=type(tables.optimizer).__name__,
        states={state: layout.dim if state in layout.element_states else 1 for state in layout.states},
        numbers=numbers_of(group.ids) if isinstance(group, CachedGroup) and group.ids is not None else (),
        hashing=table.hashing,
        init=str(table.init),
        seed=group._seed,
    )


def _name_of(group: TableGroup) -> str:
    return group_name(group.layout.dim, isinstance(group, CachedGroup) and group.ids is not None)


def _write(group: TableGroup, keys: Tensor, records: Tensor) -> None:
    if isinstance(group, CachedGroup):
        group.store.write(keys.contiguous(), records.contiguous())
    elif group.records.device.type == "cpu":
        scatter_rows(group.records.detach(), keys.contiguous(), records.contiguous())
    else:
        group.records[keys.to(group.records.device)] = records.to(group.records.device)


def thawed(name: str, folder: Path, tables: Mapping[str, TableShape], shard: Shard = WHOLE) -> Iterator[RowPart]:
    """The rows of a frozen folder of a group, as tables of these shapes saved them; each part is good until the next."""
    members, base = [], 0
    shapes = {table: one for table, one in tables.items() if group_name(one.dim, one.rows is None) == name}
    for table, shape in shapes.items():
        members.append(Member(table, shape.rows or 0, base, cast(Any, None), False, None))
        base += shape.rows or 0
    layout = saved_layout(next(iter(shapes.values())))
    for keys, records in frozen_items(folder):
        yield from parts_of(layout, members, shard.keys_of(keys), records)
