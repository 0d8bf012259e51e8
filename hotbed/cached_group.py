"""A group behind a cache: the device holds some rows in slots, host memory the rest, and every row is there when needed.

Before a batch is looked up its rows are brought in and the rows that make place for them are written back, each with its
optimizer state. The ops see slots instead of keys and nothing else changes, so results are those of a TableGroup to the bit.

The steps of one window, as small methods: `arrive`, `plan`, then of the Fetch it gives `read`, `pack`, `unpack`, `write`.
`placed` is the plain way, one after the other for a batch that is needed now; the pipeline calls the same steps ahead of
time from its threads. One of the two at a time: see EmbeddingTables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.cache import Arrival, Cache, CacheCounts, CachePlan, make_policy
from hotbed.errors import BudgetError, ConfigError
from hotbed.group import Member, TableGroup
from hotbed.memory import in_words
from hotbed.ops.host import Later
from hotbed.ops.lookups import Lookups, Ticket
from hotbed.ops.move import FirstRows, first_records, pack, unpack
from hotbed.ops.records import Precision
from hotbed.optim import RowOptimizer
from hotbed.staging import Staging
from hotbed.store import MemoryStore

_LOAD_CHUNK = 1 << 18


class Ahead(NamedTuple):
    """A batch that has arrived."""

    lookups: Lookups
    arrival: Arrival


class Fetch:
    """The rows of one window on their way, in and out."""

    def __init__(self, plan: CachePlan, missed: Tensor, num_lookups: int) -> None:
        self.plan = plan
        self.num_lookups = num_lookups
        # one small copy tells the host all it must know
        self._lists = Later(torch.cat([plan.miss_keys, plan.victim_keys, plan.counts, missed]))
        self.source: Tensor | None = None
        self.staged: Tensor | None = None
        self.leaving: Later | None = None

    @property
    def miss_keys(self) -> Tensor:
        return self._lists.get()[: self.plan.num_misses]

    @property
    def victim_keys(self) -> Tensor:
        first = self.plan.num_misses
        return self._lists.get()[first : first + self.num_victims]

    @property
    def num_victims(self) -> int:
        return int(self._lists.get()[-4])

    @property
    def num_evictions(self) -> int:
        return int(self._lists.get()[-3])

    @property
    def num_missed_lookups(self) -> int:
        return int(self._lists.get()[-1])


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
        precision: Precision = "fp32",
    ) -> None:
        super().__init__(members, dim, optimizer, device, num_slots, precision)
        self._policy = make_policy(policy)
        self.store = MemoryStore(self.num_rows, self.layout, lambda keys: first_records(keys, self._first))
        self.cache = Cache(num_slots, self._policy, device)
        self._staging = Staging(self.layout.width, device)
        self._counts = CacheCounts()
        self._counting = threading.Lock()
        self._first: FirstRows = self.first_rows()
        self._ticket: Ticket | None = None  # of the batch placed last

    @property
    def num_slots(self) -> int:
        return int(self.records.shape[0])

    @property
    def counts(self) -> CacheCounts:
        """What the cache did so far."""
        return self._counts

    def initialise(self, seed: int) -> None:
        """Rows get their first values when they are first used."""
        self._seed = seed
        self._first = self.first_rows()

    def arrive(self, lookups: Lookups, *, at_once: bool = False) -> Ahead:
        """Make a batch known; `lookups` name keys. Sorting them here serves the index and the update."""
        keys = lookups.slots
        lookups = self.ordered(lookups._replace(keys=keys))
        sorted_keys = keys if lookups.sorted_keys is None else lookups.sorted_keys
        arrive = self.cache.arrive_at_once if at_once else self.cache.arrive
        return Ahead(lookups, arrive(sorted_keys, lookups.order))

    def plan(self, window: Sequence[Ahead], pinned: int, ticket: Ticket) -> tuple[Fetch, list[Lookups]]:
        """Decide what comes and goes; the look-ups with their slots, which hold as long as the ticket does."""
        try:
            plan = self.cache.plan([ahead.arrival for ahead in window], pinned, ticket.learns)
        except BudgetError as error:
            raise self._explain(error) from None
        missed = torch.zeros(1, dtype=torch.int64, device=self.records.device)
        placed = [a.lookups._replace(slots=self.cache.slots_of(a.arrival, missed), ticket=ticket) for a in window]
        num_lookups = sum(ahead.arrival.num_lookups for ahead in window)
        self._count(
            CacheCounts(
                windows=1,
                batches=len(window),
                keys=plan.num_keys,
                hits=plan.num_hits,
                misses=plan.num_misses,
                lookups=num_lookups,
            )
        )
        return Fetch(plan, missed, num_lookups), placed

    def read(self, fetch: Fetch) -> None:
        """Host: rows that exist below go to the staging area and on to the device (on the current stream)."""
        rows, source = self._staging.inward(fetch.plan.num_misses)
        num_rows = self.store.fetch(fetch.miss_keys, rows, source)
        device = self.records.device
        fetch.source = source.to(device, non_blocking=True)
        fetch.staged = rows[:num_rows].to(device, non_blocking=True)
        self._staging.sent()
        self._count(
            CacheCounts(
                created=fetch.plan.num_misses - num_rows,
                evictions=fetch.num_evictions,
                written_back=fetch.num_victims,
                missed_lookups=fetch.num_missed_lookups,
                bytes_in=num_rows * self.layout.width * 4,
                bytes_out=fetch.num_victims * self.layout.width * 4,
            )
        )

    def pack(self, fetch: Fetch) -> None:
        """Device: victims go to the staging area (on the current stream)."""
        if fetch.num_victims:
            fetch.leaving = Later(self._packed(fetch.plan.victim_slots[: fetch.num_victims]))

    def unpack(self, fetch: Fetch) -> None:
        """Device: misses take their slots, rows never written before are created (on the current stream)."""
        if fetch.plan.num_misses and fetch.staged is not None and fetch.source is not None:
            plan = fetch.plan
            unpack(self.records, plan.miss_slots, fetch.source, fetch.staged, plan.miss_keys, self._first)

    def write(self, fetch: Fetch) -> None:
        """Host: victims reach the store."""
        if fetch.leaving is not None:
            self.store.write(fetch.victim_keys, fetch.leaving.get())

    def placed(self, lookups: Lookups, learns: bool = True) -> Lookups:
        """Bring the rows in and name their slots, now. A call whose rows were moved since is placed again."""
        if lookups.ticket is not None and lookups.ticket.valid:
            return lookups
        if lookups.check is not None:
            lookups.check()
        self.let_go()
        if lookups.keys is not None:
            lookups = lookups._replace(slots=lookups.keys)
        ahead = self.arrive(lookups, at_once=True)
        self._ticket = Ticket(learns)
        fetch, (placed,) = self.plan([ahead], self.cache.clock + 1, self._ticket)
        self.read(fetch)
        self.pack(fetch)
        self.unpack(fetch)
        self.write(fetch)
        return placed

    def let_go(self) -> None:
        """The batch placed last no longer holds its rows."""
        if self._ticket is not None:
            self._ticket.valid = False

    def update(self, lookups: Lookups, tables: tuple[str, ...], grad: Tensor, lr: float, number: int) -> None:
        if lookups.ticket is not None and not lookups.ticket.learns:
            self.cache.mark_dirty(lookups.slots)  # planned for evaluation, and then trained after all
        super().update(lookups, tables, grad, lr, number)

    def flush(self) -> None:
        """Write every row that has changed back; the rows stay."""
        keys, slots = self.cache.dirty()
        for start in range(0, keys.shape[0], _LOAD_CHUNK):
            part = slice(start, start + _LOAD_CHUNK)
            self.store.write(keys[part].cpu(), self._packed(slots[part]).cpu())
        self.cache.mark_clean()

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

    def warm(self, keys: Tensor) -> None:
        """Let the policy keep these keys (distinct, ascending; at most as many as there are slots) and bring them in."""
        self.cache.keep(keys)
        spans, device = (), self.records.device
        self.placed(Lookups(keys.to(device), spans, 0), learns=False)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        if fn(self.records[:0]).dtype != torch.float32:
            raise ConfigError("rows behind a cache are float32; leave out cache= to train in another type")
        self.flush()
        self.records = fn(self.records)
        self._staging = Staging(self.layout.width, self.records.device)
        self._forget()

    def stalled(self, seconds: float) -> None:
        """Training waited this long for a window."""
        self._count(CacheCounts(stall_seconds=seconds))

    def _slots_of(self, member: Member) -> tuple[int, int]:
        return 0, self.records.shape[0]

    def _read(self, keys: Tensor) -> Tensor:
        records = torch.empty(keys.shape[0], self.layout.width)
        self.store.read(keys, records)
        return records

    def _packed(self, slots: Tensor) -> Tensor:
        out = torch.empty(slots.shape[0], self.layout.width, device=self.records.device)
        pack(self.records, slots, out)
        return out

    def _count(self, more: CacheCounts) -> None:
        with self._counting:
            self._counts = self._counts.plus(more)

    def _explain(self, error: BudgetError) -> BudgetError:
        needed = error.num_slots
        per_slot = (self.records.nbytes + self.cache.num_bytes) / self.num_slots
        return BudgetError(
            f"{error} In device memory that is cache={needed / self.num_rows:.4g} of the {self.num_rows:,} rows, "
            f"or hbm={in_words(needed * per_slot * 1.05)!r}, for tables of dim {self.layout.dim}.",
            needed,
        )

    def _forget(self) -> None:
        self.let_go()
        self.cache = Cache(self.num_slots, self._policy, self.records.device)
