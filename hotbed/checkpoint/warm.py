"""Starts a model from the checkpoint of another, and lists everything that did not carry over.

Rows are matched by (table, id), dense weights by name and shape. Optimizers, the position in the data and random states start
from scratch. A row that is not carried over has its initial value, as in a new run. Dynamic ids keep their rows and the vector
that ids without a row share. Pending ids and the history of ids are dropped, and last uses are now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotbed.checkpoint.chain import Entry, chain_of
from hotbed.checkpoint.files import DENSE, mean_of
from hotbed.checkpoint.layouts import entries_of
from hotbed.checkpoint.owners import Owners
from hotbed.checkpoint.read import check_sizes, filling, gone_of, rows_of, tensors_of
from hotbed.checkpoint.types import Rows, Sink
from hotbed.ops.shard import Shard
from hotbed.store.history import begin_history
from hotbed.types import RowPart, TableShape

_OLD_NUMBERS = ("row", "last_use", "score")  # of dynamic ids: they get new ones
Translation = Mapping[str, Tensor]  # table -> int64: the new id of each old one, -1 where there is none


@dataclass
class WarmStartReport:
    """What a warm start carried over, and what it did not."""

    source: Path
    rows: dict[str, int] = field(default_factory=dict)  # by table
    dense: int = 0  # tensors
    notes: list[str] = field(default_factory=list)  # everything that did not carry over

    def of_tables(self, what: dict[str, list[str]]) -> None:
        """Add notes on tables: text -> names of the tables it is true for."""
        self.notes += [f"table{'s' * (len(names) > 1)} {', '.join(names)}: {text}" for text, names in what.items()]

    def text(self) -> str:
        """As text."""
        first = f"from {self.source}: {sum(self.rows.values()):,} rows of {len(self.rows)} tables, {self.dense} dense tensors"
        return "\n  - ".join([first + (", and not:" if self.notes else ""), *self.notes])


def warm_start(
    place: str | Path, tables: Rows, *, model: nn.Module | None = None, translation: Translation | None = None
) -> WarmStartReport:
    """Carry over whatever fits these tables and this model from a checkpoint (its folder, or the newest of a run).

    `translation` gives ids of the checkpoint their numbers in these tables, where a vocabulary was numbered again.
    """
    return warm_start_from(entries_of(Path(place)), tables, model=model, translation=translation)


def warm_start_from(
    entries: Sequence[Entry], tables: Rows, *, model: nn.Module | None = None, translation: Translation | None = None
) -> WarmStartReport:
    """As `warm_start`, from a checkpoint of ranks: what each of them saved, in their order."""
    entry, chains = entries[0], [chain_of(one) for one in entries]
    for chain in chains:
        check_sizes(chain)
    weights = mean_of([tensors_of(one, DENSE) for one in entries])
    carried = WarmStartReport(entry.folder if len(entries) == 1 else entry.folder.parent.parent)
    sink = tables.restore()
    plans = _plans(entry.manifest.tables, sink.tables, carried)
    tally = {name: _IdTally((translation or {}).get(name), sink.tables[name].rows) for name in plans}
    try:
        with filling(sink):
            for rank, chain in enumerate(chains):
                for part in _replay(chain, sink, Shard(rank, len(chains)), tally):
                    if part.table in plans:
                        kept = tally[part.table].numbered(part)
                        if len(kept.ids):
                            sink.add(_fitted(kept, plans[part.table], sink))
            carried.rows = {name: one.num_kept for name, one in tally.items()}
            lost = ", ".join(f"{name} {one.num_lost:,}" for name, one in tally.items() if one.num_lost)
            if lost:
                carried.notes.append(f"rows whose ids the tables do not have: {lost}")
            if model is not None:
                _carry_dense(weights, model, carried)
    finally:
        begin_history(tables)
    carried.notes.append(
        "optimizer state of the dense weights, learning-rate schedule and position in the data: they start again"
    )
    return carried


def _plans(
    saved: dict[str, TableShape], wanted: dict[str, TableShape], carried: WarmStartReport
) -> dict[str, TableShape]:
    """The saved shapes of the tables whose rows carry over; a note on everything that does not."""
    plans, said = {}, defaultdict[str, list[str]](list)
    for name in saved:
        if name not in wanted:
            said["not in this model"].append(name)
    for name, shape in wanted.items():
        old = saved.get(name)
        if old is None:
            said["new, begins with initial values"].append(name)
        elif (old.hashing or shape.hashing) and (old.hashing, old.rows) != (shape.hashing, shape.rows):
            said["ids are hashed into a different number of rows, so rows stand for other ids"].append(name)
        elif shape.dim < old.dim:
            said[f"vectors of {old.dim} numbers do not fit in {shape.dim}"].append(name)
        else:
            plans[name] = old
            for change in _changes(old, shape):
                said[change].append(name)
    carried.of_tables(said)
    return plans


def _changes(old: TableShape, new: TableShape) -> Iterator[str]:
    """Parts of the rows that are lost or altered."""
    if new.dim > old.dim:
        yield f"numbers {old.dim} to {new.dim - 1} of every vector begin with initial values"
    if (old.optimizer, set(old.states)) != (new.optimizer, set(new.states)):
        yield f"optimizer state of {old.optimizer or 'none'} is re-initialised for {new.optimizer or 'none'}"
    if old.precision != new.precision:
        yield f"weights in {old.precision} become {new.precision}"
    if (old.seed, old.init) != (new.seed, new.init):
        yield f"rows never trained begin with {new.init} of seed {new.seed}"


def _replay(chain: list[Entry], sink: Sink, shard: Shard, tally: dict[str, _IdTally]) -> Iterator[RowPart]:
    """As for loading, but frozen folders are read row by row, because the new tables have another layout."""
    owners = Owners(chain)
    for entry in chain:
        yield from owners.thaw(entry, shard, sink.thaw)
        for table, ids in gone_of(entry):
            if table in tally:
                sink.gone(table, tally[table].forgotten(ids))
        for part in rows_of(entry):
            if "weight" in part.columns:
                yield _taken(part, owners.owned(part))


def _fitted(part: RowPart, old: TableShape, sink: Sink) -> RowPart:
    """The rows in the columns of the new table; columns that the old one lacks are as in a new row."""
    shape = sink.tables[part.table]
    (first, end), start = shape.span, part.first_column  # of columns: here, and in the part
    stop = min(end, start + part.columns["weight"].shape[1])
    here, there = slice(max(first, start) - first, stop - first), slice(max(first, start) - start, stop - start)
    is_partial = first < start or stop < min(end, old.dim)  # other ranks have more of these rows
    if max(first, start) >= stop:
        here = there = slice(0, 0)
    before = sink.current(part.table, part.ids) if is_partial else sink.first(part.table, part.ids)
    weight = before["weight"].clone()
    weight[:, here] = part.columns["weight"][:, there]
    columns = {"weight": weight}
    columns |= {name: one for name, one in part.columns.items() if name in shape.numbers and name not in _OLD_NUMBERS}
    same_optimizer = (old.optimizer, set(old.states)) == (shape.optimizer, set(shape.states))
    fresh = sink.first(part.table, part.ids, weight)
    for name, width in shape.states.items():
        columns[name] = (before if is_partial and same_optimizer else fresh)[name].clone()
        if same_optimizer and width == shape.dim > 1:
            columns[name][:, here] = part.columns[name][:, there]
        elif same_optimizer:
            columns[name].copy_(part.columns[name].view(columns[name].shape))
    return RowPart(part.table, part.ids, columns, first)


def _carry_dense(weights: dict[str, Tensor], model: nn.Module, carried: WarmStartReport) -> None:
    """Take the weights whose name and shape fit."""
    state = model.state_dict()
    fitting = {name: one for name, one in weights.items() if name in state and one.shape == state[name].shape}
    for name, tensor in state.items():
        if name not in weights:
            carried.notes.append(f"dense {name} is new: it begins as in a new model")
        elif name not in fitting:
            shapes = f"{list(weights[name].shape)}, now {list(tensor.shape)}"
            carried.notes.append(f"dense {name}: its shape was {shapes}; it begins as in a new model")
    carried.notes += [f"dense {name}: the model has none of this name" for name in weights if name not in state]
    model.load_state_dict({**state, **fitting})
    carried.dense = len(fitting)


def _taken(part: RowPart, which: Tensor) -> RowPart:
    return part._replace(ids=part.ids[which], columns={name: one[which] for name, one in part.columns.items()})


class _IdTally:
    """Old ids of one table in, new ids out; counts the distinct ones."""

    def __init__(self, translation: Tensor | None, rows: int | None) -> None:
        self._translation, self._rows = translation, rows
        self._kept: list[NDArray[np.int64]] = []
        self._lost: list[NDArray[np.int64]] = []

    def numbered(self, part: RowPart) -> RowPart:
        """The rows whose ids the new table has, under their new ids. A shared row is of no id."""
        ids, inside = self._new(part.ids)
        shared = part.columns["shared"] != 0 if "shared" in part.columns else torch.zeros_like(inside)
        self._kept.append(part.ids[inside & ~shared].numpy().copy())
        self._lost.append(part.ids[~inside & ~shared].numpy().copy())
        inside = torch.where(shared, self._rows is None, inside)
        return _taken(part._replace(ids=torch.where(shared, 0, ids)), inside)

    def forgotten(self, ids: Tensor) -> Tensor:
        """The new ids of rows that were forgotten."""
        self._kept = [np.setdiff1d(np.concatenate([*self._kept, np.empty(0, np.int64)]), ids.numpy())]
        numbers, inside = self._new(ids)
        return numbers[inside]

    @property
    def num_kept(self) -> int:
        return len(np.unique(np.concatenate(self._kept))) if self._kept else 0

    @property
    def num_lost(self) -> int:
        return len(np.unique(np.concatenate(self._lost))) if self._lost else 0

    def _new(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The new id of every old one, and whether the new table has it."""
        if self._translation is not None:
            last = self._translation.shape[0] - 1
            known = (ids >= 0) & (ids <= last)
            ids = torch.where(known, self._translation[ids.clamp(0, last)], -1)
            if self._rows is None:
                return ids, known & (ids != -1)
        if self._rows is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        return ids, (ids >= 0) & (ids < self._rows)
