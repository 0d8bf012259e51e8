"""Tables that are dicts: the plainest thing that gives snapshots and takes rows back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hotbed.checkpoint import RowPart, State, TableShape

Row = tuple[torch.Tensor, torch.Tensor, int]  # weight [D], sum [D], last used


class DictTables:
    """Every table is {id: row}; a row never written is zero."""

    def __init__(self, dims=(("user", 3), ("ad", 1)), precision="fp32", rows=None, part=4):
        self.dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
        self.tables = {
            name: TableShape(dim, rows, precision, "Adagrad", {"sum": dim, "count": 1}, ("last_used",))
            for name, dim in dims
        }
        self.rows: dict[str, dict[int, Row]] = {name: {} for name in self.tables}
        self.touched: set[tuple[str, int]] = set()
        self.forgotten: set[tuple[str, int]] = set()
        self.num_updates = 0
        self.part = part
        self.num_begun = 0

    def write(self, table: str, *ids: int, value: float | None = None) -> None:
        dim = self.tables[table].dim
        for one in ids:
            weight = torch.randn(dim) if value is None else torch.full((dim,), value)
            self.rows[table][one] = (weight.to(self.dtype), torch.rand(dim), self.num_updates)
            self.touched.add((table, one))
            self.forgotten.discard((table, one))
        self.num_updates += 1

    def forget(self, table: str, *ids: int) -> None:
        for one in ids:
            del self.rows[table][one]
            self.touched.discard((table, one))
            self.forgotten.add((table, one))

    def same_as(self, other: DictTables) -> bool:
        return self.num_updates == other.num_updates and all(
            self.rows[table].keys() == other.rows[table].keys()
            and all(
                torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2]
                for a, b in ((self.rows[table][one], other.rows[table][one]) for one in self.rows[table])
            )
            for table in self.tables
        )

    @contextmanager
    def snapshot(self, touched=False):
        snapshot = _Snapshot(self, touched)
        try:
            yield snapshot
        finally:
            if not snapshot.committed:
                self.touched |= snapshot.touched
                self.forgotten |= snapshot.forgotten

    def restore(self):
        return _Sink(self)


class _Snapshot:
    frozen = ()

    def __init__(self, tables: DictTables, only_touched: bool):
        self.tables = tables.tables
        self.part = tables.part
        self.touched, self.forgotten = tables.touched, tables.forgotten
        tables.touched, tables.forgotten = set(), set()
        wanted = self.touched if only_touched else {(t, one) for t, rows in tables.rows.items() for one in rows}
        self.rows = {key: tables.rows[key[0]][key[1]] for key in sorted(wanted)}
        self.only_touched, self.committed, self.updates = only_touched, False, tables.num_updates

    def parts(self) -> Iterator[RowPart]:
        for table in self.tables:
            ids = [one for name, one in self.rows if name == table]
            for start in range(0, len(ids), self.part):
                some = ids[start : start + self.part]
                rows = [self.rows[table, one] for one in some]
                columns = {
                    "weight": torch.stack([row[0] for row in rows]),
                    "sum": torch.stack([row[1] for row in rows]),
                    "count": torch.tensor([[float(row[2])] for row in rows]),
                    "last_used": torch.tensor([row[2] for row in rows]),
                }
                yield RowPart(table, torch.tensor(some), columns)

    def gone(self):
        if self.only_touched:
            for table in self.tables:
                ids = sorted(one for name, one in self.forgotten if name == table)
                if ids:
                    yield table, torch.tensor(ids)

    def rest(self):
        return {"num_updates": torch.tensor(self.updates)}

    def commit(self):
        self.committed = True


class _Sink:
    def __init__(self, owner: DictTables):
        self.owner, self.tables, self.notes = owner, owner.tables, []

    def begin(self):
        self.owner.num_begun += 1
        for rows in self.owner.rows.values():
            rows.clear()

    def first(self, table, ids, weight=None):
        shape = self.tables[table]
        weight = torch.zeros(len(ids), shape.dim, dtype=self.owner.dtype) if weight is None else weight
        return {"weight": weight, "sum": torch.full((len(ids), shape.dim), 0.1), "count": torch.zeros(len(ids), 1)}

    def adopt(self, name, folder):
        raise NotImplementedError

    def thaw(self, name, folder, tables):
        raise NotImplementedError

    def gone(self, table, ids):
        for one in ids.tolist():
            self.owner.rows[table].pop(one, None)

    def add(self, part):
        for place, one in enumerate(part.ids.tolist()):
            used = int(part.columns["last_used"][place])
            row = (part.columns["weight"][place].clone(), part.columns["sum"][place].clone(), used)
            self.owner.rows[part.table][one] = row

    def rest(self, tensors):
        self.owner.num_updates = int(tensors["num_updates"])

    def end(self):
        self.owner.touched, self.owner.forgotten = set(), set()


def state(step: int, **document) -> State:
    return State(step, {"dense": {"w": torch.arange(4.0)}}, document)
