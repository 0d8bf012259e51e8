"""A group behind a cache: the device holds some rows in slots, host memory the rest, and every row is there when needed.

Before a batch is looked up its rows are brought in and the rows that make place for them are written back, each with its
optimizer state. The ops see slots instead of keys and nothing else changes, so results are those of a TableGroup to the bit.
This is the plain way: it waits for every copy, and serves one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hotbed.cache import Cache, make_policy
from hotbed.errors import ConfigError
from hotbed.group import Member, TableGroup
from hotbed.ops.lookups import Lookups
from hotbed.optim import RowOptimizer
from hotbed.store import MemoryStore


class CachedGroup(TableGroup):
    """Records of several tables, `num_slots` of them on the device."""

    def __init__(
        self,
        members: Sequence[Member],
        dim: int,
        optimizer: RowOptimizer,
        device: torch.device,
        num_slots: int,
        policy: str,
    ) -> None:
        super().__init__(members, dim, optimizer, device, num_slots)
        self._policy = policy
        self.store = MemoryStore(self.num_rows, self.layout, self.first_records)
        self.cache = Cache(num_slots, make_policy(policy, num_slots, device), device)

    def initialise(self, seed: int) -> None:
        """Rows get their first values when they are first read."""
        self._seed = seed

    def placed(self, lookups: Lookups) -> Lookups:
        """Bring the rows in and name their slots. A call whose rows were moved since is placed again."""
        if lookups.keys is not None and lookups.window == self.cache.counts.windows:
            return lookups
        keys = lookups.slots if lookups.keys is None else lookups.keys
        wanted = keys >= 0
        distinct, counts = torch.unique(keys[wanted], return_counts=True)
        if distinct.shape[0] == 0:
            return lookups._replace(slots=torch.full_like(keys, -1), keys=keys)
        plan = self.cache.plan(distinct, counts)
        if plan.victim_keys.shape[0]:
            self.store.write(plan.victim_keys.cpu(), self.records[plan.victim_slots].cpu())
        if plan.miss_keys.shape[0]:
            self.records[plan.miss_slots] = self._read(plan.miss_keys).to(self.records.device)
        self.cache.commit(plan)
        slots = plan.slots[torch.searchsorted(distinct, keys.clamp(min=0)).clamp(max=distinct.shape[0] - 1)]
        return lookups._replace(slots=torch.where(wanted, slots, -1), keys=keys, window=self.cache.counts.windows)

    def flush(self) -> None:
        """Write every row of the cache back; the rows stay."""
        keys, slots = self.cache.resident()
        if keys.shape[0]:
            self.store.write(keys.cpu(), self.records[slots].cpu())

    def columns(self, table: str) -> dict[str, Tensor]:
        """`weight` and every optimizer state of one table: a copy on the host, so writing to it changes nothing."""
        self.flush()
        member = self.members[table]
        return self._cut(self._read(torch.arange(member.base, member.base + member.rows)))

    def load(self, table: str, columns: Mapping[str, Tensor]) -> None:
        self.flush()
        member = self.members[table]
        keys = torch.arange(member.base, member.base + member.rows)
        records = self._read(keys)
        for name, view in self._cut(records).items():
            if name in columns:
                view.copy_(columns[name])
        self.store.write(keys, records)
        self._forget()

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        if fn(self.records[:0]).dtype != torch.float32:
            raise ConfigError("rows behind a cache are float32; leave out cache= to train in another type")
        self.flush()
        self.records = fn(self.records)
        self._forget()

    def _slots_of(self, member: Member) -> tuple[int, int]:
        return 0, self.records.shape[0]

    def _read(self, keys: Tensor) -> Tensor:
        records = torch.empty(keys.shape[0], self.layout.width)
        self.store.read(keys.cpu(), records)
        return records

    def _forget(self) -> None:
        num_slots, device = self.records.shape[0], self.records.device
        self.cache = Cache(num_slots, make_policy(self._policy, num_slots, device), device)
