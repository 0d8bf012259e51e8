"""Rows that are all on the device, in one tensor: the slot of a row is its key.

This is the exact reference for everything that keeps rows elsewhere (cached.py). For checkpoints it marks what training
changes: snapshot/rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hotbed.cache import CacheCounts
from hotbed.errors import ConfigError
from hotbed.ids.index import Ints
from hotbed.ops.lookups import Lookups
from hotbed.ops.move import initial_records, scatter_rows
from hotbed.ops.records import Layout, empty_records
from hotbed.ops.shard import Shard
from hotbed.optim import RowOptimizer
from hotbed.store.counts import Tiers
from hotbed.store.ssd import frozen_items
from hotbed.tables.group.keyspace import Keyspace, Member
from hotbed.tables.snapshot.rows import CopiedRows
from hotbed.tables.transaction import Changes

_INIT_CHUNK = 1 << 20


class ResidentRows:
    """Records [R, W] of all keys."""

    num_slots = 0  # of a cache
    index_bytes = 0
    caches = ()  # none

    def __init__(
        self,
        members: Sequence[Member],
        layout: Layout,
        optimizer: RowOptimizer,
        keyspace: Keyspace,
        device: torch.device,
        shard: Shard,
    ) -> None:
        self.layout, self.keyspace = layout, keyspace
        self.records = empty_records(keyspace.num_rows, layout, torch.float32, device)
        self.changes = Changes()
        self.touched: Tensor | None = None  # uint8 [R]: rows that have changed; None: no checkpoint was made yet
        self.digests: dict[tuple[int, int], Tensor] = {}  # (first row, end) -> int64: records as they were saved last
        self.held_by: object | None = None  # the snapshot that is open
        self._members, self._shard = members, shard
        self._decays_all = optimizer.decay_scope == "table"
        self._writable: set[str] = set()  # tables with a view that can be written to

    def initialise(self) -> None:
        """Write the initial record of every row."""
        num_rows, device = self.keyspace.num_rows, self.records.device
        for start in range(0, num_rows, _INIT_CHUNK):
            stop = min(start + _INIT_CHUNK, num_rows)
            self.records[start:stop] = initial_records(torch.arange(start, stop, device=device), self.keyspace.initial)

    def clear(self) -> None:
        """All rows have their initial values again."""
        self.initialise()

    def ensure(self, lookups: Lookups, learns: bool, claim: Callable[[], None]) -> Lookups:
        """Every row is in its slot; keys that were recorded may have to be worked out again."""
        return lookups if lookups.renew is None else lookups.renew()

    def placed(self, lookups: Lookups, learns: bool = True) -> Lookups:
        """Every row is in its slot."""
        return lookups

    def slots_of(self, member: Member) -> tuple[int, int]:
        """(first, number) of the slots a table's rows are in."""
        return member.base, member.rows

    def whole(self, member: Member) -> Tensor:
        """The records of a table: a view."""
        return self.records[member.base : member.base + member.rows]

    def writable(self, member: Member) -> Tensor:
        """`whole` for a caller who may write to it, now or later: checkpoints compare this table from now on."""
        self._writable.add(member.name)
        return self.whole(member)

    def writable_rows(self, member: Member, keys: Tensor) -> Tensor:
        """The records of all keys of a table that are here: as `writable`, or, with other ranks, a copy."""
        return self.writable(member) if self._shard.world == 1 else self.copy_rows(keys)

    def copy_rows(self, keys: Tensor) -> Tensor:
        """Records of keys."""
        return self.records[keys.to(self.records.device)]

    def write_rows(self, keys: Tensor, records: Tensor) -> None:
        """Put records from the host in the place of those of `keys`, distinct."""
        device = self.records.device
        self.touch(keys.to(device))
        if device.type == "cpu":
            scatter_rows(self.records.detach(), keys.contiguous(), records.contiguous())
        else:
            self.records[keys.to(device)] = records.to(device)

    def drop_rows(self, keys: Tensor) -> None:
        """These rows have their initial values again."""
        if keys.shape[0]:
            self.write_rows(keys, self.keyspace.first(keys).to(self.records.dtype))

    def written_keys(self) -> Iterator[Ints]:
        """None: there is no cache."""
        return iter(())

    def flush(self) -> None:
        """Nothing is on its way."""

    def forget(self) -> None:
        """There is nothing but the rows themselves."""

    def take_back(self) -> None:
        """There is nothing but the rows themselves."""

    def warm(self, keys: Tensor, uses: Tensor | None) -> None:
        """All rows are here."""

    def load(self, member: Member, columns: Mapping[str, Tensor]) -> None:
        """Take over columns of one table: part of a load."""
        if self.touched is not None:
            self.touched[member.base : member.base + member.rows] = 1
        for name, view in self.layout.cut(self.whole(member)).items():
            if name in columns:
                view.copy_(columns[name])

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow `nn.Module.to`."""
        if self.layout.precision != "fp32" and fn(self.records[:0]).dtype != torch.float32:
            raise ConfigError(f"rows of precision={self.layout.precision!r} cannot change their type; leave it out")
        self.records = fn(self.records)
        if self.touched is not None:
            self.touched = self.touched.to(self.records.device)
        self.digests = {span: digests.to(self.records.device) for span, digests in self.digests.items()}

    def counters(self) -> CacheCounts:
        """No cache."""
        return CacheCounts()

    def tiers(self) -> Tiers | None:
        """No ssd."""
        return None

    def touch(self, slots: Tensor) -> None:
        """These rows [N] are about to change; negative is padding."""
        if self.touched is not None:
            self.touched.index_fill_(0, slots.clamp(min=0).to(torch.int64), 1)

    def count_as_saved(self) -> None:
        """All rows are as a checkpoint has them."""
        self.touched = torch.zeros(self.keyspace.num_rows, dtype=torch.uint8, device=self.records.device)
        self.digests = {}

    @property
    def compared(self) -> list[tuple[int, int]]:
        """(first row, end) of what may change without a mark."""
        if self._decays_all:
            return [(0, self.keyspace.num_rows)]
        return [(m.base, m.base + m.rows) for m in self._members if m.name in self._writable]

    def holder(self) -> CopiedRows:
        """Copies rows for a checkpoint."""
        return CopiedRows(self)

    def adopt(self, folder: Path) -> None:
        """Write the rows of a folder that a checkpoint's files were linked into."""
        for keys, records in frozen_items(folder):
            inside = keys < self.keyspace.num_rows
            self.write_rows(keys[inside], records[inside])

    def policy_state(self, group: str) -> dict[str, Tensor]:
        """No policy."""
        return {}

    def load_policy_state(self, group: str, tensors: Mapping[str, Tensor]) -> list[str]:
        """No policy."""
        return []
