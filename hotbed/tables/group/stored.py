"""A group whose rows are in a store: keys in, whole records out; the device holds some of them for a while (CachedGroup).

Whatever reads or writes whole tables is here: it goes to the store, after what changed on the device was written back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed.cache.policies import LFU
from hotbed.errors import HotbedError
from hotbed.ops.keys import FirstBad
from hotbed.ops.lookups import Span
from hotbed.ops.move import FirstRows, first_records, first_rows
from hotbed.ops.records import Precision
from hotbed.ops.shard import WHOLE, Shard
from hotbed.optim import RowOptimizer
from hotbed.sizing.budget import Room
from hotbed.tables.group.dynamic import DynamicIds
from hotbed.tables.group.group import Member, TableGroup

CHUNK = 1 << 18  # rows read or written at once


class _Firsts:
    """What rows start from, on the host, for a store: it knows no group, so that groups are freed with their tables."""

    def __init__(self, first: FirstRows, ids: DynamicIds | None) -> None:
        self.rows, self.ids = first, ids

    def __call__(self, keys: Tensor) -> Tensor:
        return first_records(keys, self.rows) if self.ids is None else self.ids.first(keys)


class StoredGroup(TableGroup):
    """Records of several tables, below the device."""

    def __init__(
        self,
        members: Sequence[Member],
        dim: int,
        optimizer: RowOptimizer,
        device: torch.device,
        room: Room,
        precision: Precision = "fp32",
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__(members, dim, optimizer, device, room.num_slots or 1, precision, shard)
        self.ids: DynamicIds | None = None
        if room.ids is not None:
            self.num_rows = room.ids.rows
            self.ids = DynamicIds(members, lambda table: first_rows(dim, optimizer, [table], precision), room.ids)
        self._firsts = _Firsts(self.first_rows(), self.ids)
        self.store = room.place.open(self.num_rows, self.layout, self._firsts, LFU)

    @property
    def _first(self) -> FirstRows:
        return self._firsts.rows

    @property
    def num_slots(self) -> int:
        return int(self.records.shape[0])

    @abstractmethod
    def flush(self) -> None:
        """Write every row that has changed back."""

    @abstractmethod
    def _forget(self) -> None:
        """Nothing on the device is a row any more."""

    def initialise(self, seed: int) -> None:
        """Rows get their first values when they are first used."""
        self._seed = seed
        self._firsts.rows = self.first_rows()
        if self.ids is not None:
            self.ids.initialise(seed)

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Any]:
        """As of every group; dynamic ids have none that is bad."""
        if self.ids is None:
            return super().keys(ids, spans, tables, learns)
        keys, sense = self.ids.keys(ids, spans, tables, learns)  # part of a change: the ids may be new
        return keys, FirstBad(None), sense

    def owns(self, table: str, ids: Tensor) -> Tensor:
        if self.ids is None:
            return super().owns(table, ids)
        number = torch.tensor(self.ids.names.index(table), device="cpu")
        return self.shard.owner_of_ids(number, ids) == self.shard.rank

    def columns(self, table: str) -> dict[str, Tensor]:
        """`weight` and every optimizer state of one table: a copy on the host, so writing to it changes nothing."""
        self._refuse_dynamic(table)
        self._refuse_part(table)
        self.flush()
        member = self.members[table]
        return self._cut(self._read(torch.arange(member.base, member.base + member.rows, device="cpu")))

    def lend(self, table: str) -> dict[str, Tensor]:
        """`columns`: they are copies."""
        return self.columns(table)

    def weight_pieces(self, table: str) -> Iterator[Tensor]:
        if self.ids is None:
            self._refuse_part(table)
        for keys in self._keys_of(table):
            self.flush()
            yield self._cut(self._read(keys))["weight"]

    def rows(self, table: str) -> tuple[Tensor, dict[str, Tensor]]:
        self.flush()
        if self.ids is None:
            here = self.ids_of(table)
            return here, self._cut(self._read(self.local_keys(table, here)))
        ids, keys = self.ids.rows_of(table)
        return torch.from_numpy(ids), self._cut(self._read(torch.from_numpy(keys)))

    def ids_of(self, table: str) -> Tensor:
        return super().ids_of(table) if self.ids is None else torch.from_numpy(self.ids.rows_of(table)[0])

    def shared_row(self, table: str) -> dict[str, Tensor] | None:
        """The columns [1, ...] of the row that ids without one of their own share; None where none does."""
        key = -1 if self.ids is None else self.ids.translator.shared_key(self.ids.names.index(table))
        if key < 0:
            return None
        self.flush()
        return self._cut(self._read(torch.tensor([key], device="cpu")))

    def refuse_load(self, table: str) -> None:
        self._refuse_dynamic(table)
        self._refuse_part(table)

    def load(self, table: str, columns: Mapping[str, Tensor]) -> None:
        self.refuse_load(table)
        self.flush()
        for keys in self._keys_of(table):
            records, first = self._read(keys), int(keys[0]) - self.members[table].base
            for name, view in self._cut(records).items():
                if name in columns:
                    view.copy_(columns[name][first : first + view.shape[0]])
            with self.changes.changing("loading rows"):
                self.store.write(keys, records)
        with self.changes.changing("loading rows"):
            self._forget()

    def clear(self) -> None:
        """All rows have their first values again, and no dynamic id has one."""
        with self.changes.changing("clearing rows"):
            if self.ids is not None:
                self.ids.initialise(self._seed)
            self.store.clear()
            self._forget()

    def _refuse_dynamic(self, table: str) -> None:
        if self.ids is not None:
            raise HotbedError(
                f"table {table!r} has dynamic ids, and no rows 0, 1, ... to give or take. tables.rows({table!r}) gives its "
                "ids and their rows; hotbed.checkpoint saves and loads them."
            )

    def _keys_of(self, table: str) -> Iterator[Tensor]:
        """All keys of a table, some at a time: it may be larger than memory. Of dynamic ids, ids ascending."""
        if self.ids is not None:
            found = torch.from_numpy(self.ids.rows_of(table)[1])
            yield from (found[start : start + CHUNK] for start in range(0, found.shape[0], CHUNK))
            return
        member = self.members[table]
        stop = member.base + member.rows
        for start in range(member.base, stop, CHUNK):
            yield torch.arange(start, min(start + CHUNK, stop), device="cpu")

    def _read(self, keys: Tensor) -> Tensor:
        records = torch.empty(keys.shape[0], self.layout.width, dtype=torch.float32, device="cpu")
        with self.changes.changing("reading rows"):  # which may bring them nearer
            self.store.read(keys, records)
        return records
