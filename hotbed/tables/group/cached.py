"""Rows behind a cache: the device holds some in slots, a store the rest, and every row is there when needed.

Before a batch is looked up its rows are brought in and the rows that make place for them are written back, each with its
optimizer state. The ops see slots instead of keys and nothing else changes, so results are those of ResidentRows to the bit.
Whatever reads or writes whole tables goes to the store, after what changed on the device was written back.

The steps of one window, as small methods: `arrive`, `begin`, `finish`, then `read`, `exchange` and `write` of the Fetch that it
gives (fetch.py).
`placed` is the plain way, one after the other for a batch that is needed now; the pipeline calls the same steps ahead of
time, `read` and `write` from a thread of its own. One of the two at a time: see Ownership.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hotbed.cache import Arrival, Cache, CacheCounts, Decision, make_policy
from hotbed.cache.contents import hot_keys
from hotbed.cache.plans import WindowPlan
from hotbed.cache.policies import LFU
from hotbed.errors import BudgetError, ConfigError
from hotbed.host.memory import in_words, typed
from hotbed.ids.index import Ints
from hotbed.ops.lookups import Lookups, SortedKeys, Ticket
from hotbed.ops.move import pack, unpack
from hotbed.ops.records import Layout, empty_records
from hotbed.ops.shard import Shard
from hotbed.ops.streams import mark
from hotbed.store.counts import Tiers
from hotbed.store.held import Holder
from hotbed.store.tier_windows import TierWindows
from hotbed.tables.group.fetch import DirectFetch, Fetch, StagedFetch
from hotbed.tables.group.keyspace import CHUNK, Keyspace, Member
from hotbed.tables.group.staging import Staging, sent
from hotbed.tables.sizing.budget import Room, staged_row_bytes
from hotbed.tables.sizing.enough import enough_for, with_some_to_spare
from hotbed.tables.snapshot.cache import load_state, state_of
from hotbed.tables.transaction import Changes

if TYPE_CHECKING:  # recorded caches need Triton, which may be missing
    from hotbed.cache.recorded_planner import RecordedCache, RecordedPlan
    from hotbed.ops.inputs import Capacity, InputLayout
    from hotbed.ops.inputs.triton import Descriptions
    from hotbed.ops.move.compiled_transfer import CompiledTransfer


_TIER_SLOTS = 2  # of memory over an ssd for each on the device: a window's misses and victims are there together


def ordered(lookups: Lookups) -> Lookups:
    """The same lookups with what the update would otherwise work out itself."""
    if lookups.slots.device.type != "cuda":
        return lookups
    return lookups._replace(sorted=SortedKeys(*torch.sort(lookups.slots, stable=True)))


class ArrivedBatch(NamedTuple):
    """A batch that has arrived."""

    lookups: Lookups
    arrival: Arrival


class CachedRows:
    """Records [S, W] of the keys that are in the S slots of a cache, over a store that has them all."""

    def __init__(
        self,
        members: Sequence[Member],
        layout: Layout,
        keyspace: Keyspace,
        device: torch.device,
        room: Room,
        policy: str,
        shard: Shard,
    ) -> None:
        self.layout, self.keyspace = layout, keyspace
        self.records = empty_records(room.num_slots or 1, layout, torch.float32, device)
        self.store = room.place.open(keyspace.num_rows, layout, keyspace.first, LFU)
        self.changes = Changes()
        self._members, self._shard = members, shard
        self._policy = make_policy(policy)
        self._bounded, self.rounds_below = room.bounded, room.place.int8
        self.part_of_budget = room.cache_part
        self._staged_rows, self._staging_part = room.staged_rows, room.staging_part
        self.cache = self._new_cache(device)
        self.staging = Staging(self.layout.width, device, room.staged_rows)
        self._counts = CacheCounts()
        self._counting = threading.Lock()
        self._ticket: Ticket | None = None  # of the batch placed last

    @property
    def caches(self) -> tuple[CachedRows]:
        """This one."""
        return (self,)

    @property
    def num_slots(self) -> int:
        """Rows that the device holds."""
        return int(self.records.shape[0])

    @property
    def index_bytes(self) -> int:
        """Device memory that finds the rows in their slots."""
        return self.cache.num_bytes

    @property
    def is_over_ssd(self) -> bool:
        """Whether no memory is between the slots and an ssd."""
        tiers = self.store.tiers(0)
        return tiers is not None and not tiers.sizes.memory_slots

    def counters(self) -> CacheCounts:
        """What the cache did so far."""
        return self._counts

    def tiers(self) -> Tiers | None:
        """What the tiers below the device did and hold; memory as the budget counts it (tables/sizing/budget.py)."""
        found = self.store.tiers(self.keyspace.num_used)
        if found is None:
            return None
        memory = found.sizes.memory_bytes + self.keyspace.index_bytes
        if not found.sizes.memory_slots:  # memory is the cache
            memory += self.records.nbytes + self.cache.num_bytes
        return found._replace(sizes=found.sizes._replace(memory_bytes=memory))

    def initialise(self) -> None:
        """Rows get their initial values when they are first used."""

    def make_pages(self, most: int) -> None:
        """Have the memory of all rows below now, if they are in an array that takes no more than `most` bytes."""
        if self.store.array is not None and self.store.num_bytes <= most:
            self.store.array.make_pages()

    def clear(self) -> None:
        """All rows have their initial values again: part of a change."""
        self.store.clear()
        self.forget()

    def slots_of(self, member: Member) -> tuple[int, int]:
        """(first, number) of the slots a table's rows may be in."""
        return 0, self.num_slots

    def touch(self, slots: Tensor) -> None:
        """The cache knows which rows change: those of batches that learn."""

    def whole(self, member: Member) -> Tensor:
        """The records of a table: a copy on the host, so writing to it changes nothing."""
        return self.copy_rows(torch.arange(member.base, member.base + member.rows, device="cpu"))

    def writable(self, member: Member) -> Tensor:
        """`whole`: it is a copy."""
        return self.whole(member)

    def writable_rows(self, member: Member, keys: Tensor) -> Tensor:
        """Copies."""
        return self.copy_rows(keys)

    def copy_rows(self, keys: Tensor) -> Tensor:
        """Records of keys on the host, as of the last `flush`."""
        records = torch.empty(keys.shape[0], self.layout.width, dtype=torch.float32, device="cpu")
        with self.changes.changing("reading rows"):  # which may bring them nearer
            self.store.read(keys, records)
        return records

    def write_rows(self, keys: Tensor, records: Tensor) -> None:
        """Put records from the host in the place of those of `keys`, distinct: part of a load, which ends with `forget`."""
        self.store.write(keys.contiguous(), records.contiguous())

    def drop_rows(self, keys: Tensor) -> None:
        """These rows have their initial values again: part of a load, as `write_rows`."""
        self.store.forget(keys)

    def written_keys(self) -> Iterator[Ints]:
        """Keys that have a record in the store."""
        return self.store.keys()

    def load(self, member: Member, columns: Mapping[str, Tensor]) -> None:
        """Take over columns of one table: part of a load."""
        self.flush()
        for keys in self.keyspace.chunks_of(member.name):
            records, first = self.copy_rows(keys), int(keys[0]) - member.base
            for name, view in self.layout.cut(records).items():
                if name in columns:
                    view.copy_(columns[name][first : first + view.shape[0]])
            with self.changes.changing("loading rows"):
                self.store.write(keys, records)
        with self.changes.changing("loading rows"):
            self.forget()

    def holder(self) -> Holder:
        """Holds rows for a checkpoint, as of the last `flush`."""
        return self.store.holder()

    def count_as_saved(self) -> None:
        """All rows are as a checkpoint has them."""
        self.store.count_as_saved()

    def adopt(self, folder: Path) -> None:
        """Take over the rows of a folder that a checkpoint's files were linked into."""
        self.store.adopt(folder)

    def policy_state(self, group: str) -> dict[str, Tensor]:
        """What the cache and the tiers hold, for a checkpoint."""
        return state_of(self, group)

    def load_policy_state(self, group: str, tensors: Mapping[str, Tensor]) -> list[str]:
        """Bring in what a checkpoint's caches held; what was left out, and why."""
        return load_state(self, group, tensors)

    def take_back(self) -> None:
        """Forget what ids taught that were not trained. Nothing may be on its way; part of a change."""
        self._forget_rows(torch.from_numpy(self.keyspace.roll_back()))

    def forget_released(self) -> None:
        """Forget the rows of expired ids that others may take from now on. Nothing may be on its way; part of a change."""
        if self.keyspace.has_released:
            self._forget_rows(torch.from_numpy(self.keyspace.take_released()))

    def arrive(self, lookups: Lookups, *, at_once: bool = False) -> ArrivedBatch:
        """Make a batch known; `lookups` name keys. Sorting them here serves the index and the update."""
        keys = lookups.slots
        lookups = ordered(lookups._replace(keys=keys))
        arrive = self.cache.arrive_at_once if at_once else self.cache.arrive
        return ArrivedBatch(lookups, arrive(*(lookups.sorted or (keys, None))))

    def begin(self, window: Sequence[ArrivedBatch], learns: bool) -> Decision:
        """Look for the rows of the next batches."""
        try:
            return self.cache.begin([ahead.arrival for ahead in window], learns)
        except BudgetError as error:
            raise self._explain(error) from None

    def finish(self, window: Sequence[ArrivedBatch], decision: Decision, ticket: Ticket) -> tuple[Fetch, list[Lookups]]:
        """Decide what comes and goes; the lookups with their slots, which hold as long as the ticket does."""
        plan = self.cache.finish(decision)
        placed = [a.lookups._replace(slots=self.cache.slots_of(a.arrival, plan), ticket=ticket) for a in window]
        self.cache.counters.publish()
        return self.fetch(plan, len(window), sum(ahead.arrival.num_lookups for ahead in window)), placed

    def fetch(self, plan: WindowPlan, num_batches: int, num_lookups: int) -> Fetch:
        """What moves the rows of a window; its batches and lookups are counted with them."""
        kind = DirectFetch if self.is_direct else StagedFetch
        return kind(self, plan, num_batches, num_lookups)

    @property
    def is_direct(self) -> bool:
        """Whether slots and store are arrays in the same memory, so that nothing is staged."""
        in_memory = self.records.device.type == "cpu"
        return (
            in_memory
            and self.store.array is not None
            and not self.keyspace.is_dynamic
            and self.keyspace.num_rows < 1 << 31
        )

    @property
    def most_staged(self) -> int | None:
        """Rows of one window that may be on their way; None: as many as it has."""
        return None if self.is_direct else self._staged_rows

    def check_staging(self, num_keys: int) -> None:
        """A BudgetError for a batch whose rows, if none is in the cache, are more than may be on their way."""
        most, kind = self.most_staged, self.records.device.type
        if most is None or num_keys <= most:
            return
        least = staged_row_bytes(self.layout.width * 4, kind)
        enough = typed(math.ceil(with_some_to_spare(num_keys) * least / self._staging_part))
        raise BudgetError(
            f"a batch needs {num_keys:,} rows of tables of dim {self.layout.dim} at once, and staging= has room for {most:,} "
            f"on their way to the cache ({in_words(least)} each). Give staging={enough!r} (--set tables.staging={enough}) or "
            "more, or smaller batches."
        )

    def new_recorded_cache(
        self, layout: InputLayout, capacity: Capacity, window: int
    ) -> tuple[RecordedCache, Descriptions]:
        """A recorded cache for batches of this layout and capacity, on CUDA; and where they are described."""
        from hotbed.cache.recorded_planner import RecordedCache
        from hotbed.ops.inputs.triton import Descriptions

        inputs = Descriptions(layout, self.records.device)
        return RecordedCache(self.cache, inputs, capacity, window), inputs

    def new_transfer(self, recorded: RecordedCache) -> tuple[CompiledTransfer, TierWindows | None]:
        """What moves the rows of a recorded cache's windows, and what finds their slots in memory over an ssd."""
        from hotbed.ops.move.compiled_transfer import CompiledTransfer

        device, tiered = self.records.device, self.store.tiered
        if tiered is not None:
            windows = TierWindows(tiered, recorded.host_lists)
            parts = tiered.tier.records, tiered.tier.state
            transfer = CompiledTransfer(*parts, windows.lists, device, self._staged_rows)
            windows.written = transfer.num_written
            return transfer, windows
        assert self.store.array is not None, "a compiled transfer moves rows of an array"
        return CompiledTransfer(*self.store.array.parts(), recorded.host_lists, device, self._staged_rows), None

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code can move the rows: they are in an array of the host, all of them or those of any window.

        Temporary rows are not.
        """
        tiered = self.store.tiered
        return self.store.array is not None or (tiered is not None and tiered.num_slots >= _TIER_SLOTS * self.num_slots)

    def exchange_with(
        self, transfer: CompiledTransfer, number: int, plan: RecordedPlan, num_batches: int, num_lookups: int
    ) -> None:
        """Device: as `exchange` of a fetch, for a window whose rows a compiled transfer moves."""
        slot, num_rows = transfer.staged(number)
        num_misses, num_victims = plan.num_misses, plan.num_victims
        miss_keys, miss_slots, victim_slots = plan.device_lists
        if self.records.device.type == "cuda":
            from hotbed.ops.move import triton

            triton.pack(self.records, victim_slots, slot.packed, num_victims)
            triton.unpack(
                self.records,
                miss_slots,
                slot.device_source,
                slot.device_rows,
                miss_keys,
                self.keyspace.initial,
                num_misses,
            )
        else:
            pack(self.records, victim_slots[:num_victims], slot.packed[:num_victims])
            parts = (miss_slots[:num_misses], slot.device_source[:num_misses], slot.device_rows, miss_keys[:num_misses])
            unpack(self.records, *parts, self.keyspace.initial)
        if num_rows < num_misses and self.keyspace.is_dynamic:
            self._create(plan, slot.source[:num_misses], miss_slots)
        store = self.store.array
        if store is not None:  # else a snapshot holds files, which never change
            store.reach(self.keyspace.num_used)
            if store.is_held:
                store.keep(plan.victim_keys)
        transfer.exchanged(number, mark(self.records.device))
        self.count_window(plan, num_batches, num_lookups, num_moved=num_rows, num_created=num_misses - num_rows)

    def _create(self, plan: RecordedPlan, source: Tensor, miss_slots: Tensor) -> None:
        """Put initial records that no kernel can make into the slots of misses without a source."""
        places = (source < 0).nonzero().squeeze(1)
        created = self.keyspace.created(plan.miss_keys[places])
        if created is not None:
            places, created = (sent(part, self.records.device) for part in (places, created))
            self.records.index_copy_(0, miss_slots[places].to(torch.int64), created)

    def ensure(self, lookups: Lookups, learns: bool, claim: Callable[[], None]) -> Lookups:
        """Lookups whose rows are in their slots; they are brought in now, once `claim` has taken ownership."""
        claim()
        if lookups.origin is not None:
            self.keyspace.refuse_old(lookups.origin)
        with self.changes.changing("bringing rows in"):
            return self.placed(lookups, learns)

    def placed(self, lookups: Lookups, learns: bool = True) -> Lookups:
        """Bring the rows in and name their slots, now: part of a change. A call whose rows were moved is placed again."""
        if lookups.ticket is not None and lookups.ticket.holds(learns):
            return lookups
        lookups.check_ids()
        if lookups.origin is not None:
            self.forget_released()
        self.revoke_lease()
        if lookups.renew is not None:
            lookups = lookups.renew()
        elif lookups.keys is not None:
            lookups = lookups._replace(slots=lookups.keys)
        window = [self.arrive(lookups, at_once=True)]
        self._ticket = Ticket(learns)
        try:
            if self.most_staged is not None:
                self.check_staging(window[0].arrival.num_keys)
            decision = self.begin(window, learns)
        except BudgetError:
            self.cache.drop_sync()
            raise
        fetch, (placed,) = self.finish(window, decision, self._ticket)
        fetch.read()
        fetch.exchange()
        fetch.write()
        return placed

    def revoke_lease(self) -> None:
        """The batch placed last no longer holds its rows."""
        if self._ticket is not None:
            self._ticket.valid = False

    def flush(self) -> None:
        """Write every row that has changed back; the rows stay. A batch that is still to be updated marks its own again."""
        with self.changes.changing("writing rows back"):
            self.revoke_lease()
            keys, slots = self.cache.dirty()
            for start in range(0, keys.shape[0], CHUNK):
                part = slice(start, start + CHUNK)
                self.store.write(keys[part].cpu(), self.packed(slots[part]).cpu())
            self.cache.mark_clean()

    def warm(self, keys: Tensor, uses: Tensor | None) -> None:
        """Bring in these keys (distinct, ascending; no more than slots) and let the policy know them, with their uses.

        A cache that knows them already stays as it is: it was loaded from a checkpoint.
        """
        if torch.equal(hot_keys(self.cache).cpu(), keys.cpu()):
            return
        with self.changes.changing("bringing hot rows in"):
            self.cache.keep(keys)
            spans, device = (), self.records.device
            for part in torch.split(keys, self.most_staged or max(1, keys.shape[0])):
                self.placed(Lookups(part.to(device), spans, 0), learns=False)
            if uses is not None:
                self.cache.count_uses(keys, uses)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow `nn.Module.to`."""
        if fn(self.records[:0]).dtype != torch.float32:
            raise ConfigError("rows behind a cache are float32; leave out cache= to train in another type")
        self.flush()
        with self.changes.changing("moving the cache to another device"):
            self.records = fn(self.records)
            self.staging = Staging(self.layout.width, self.records.device, self._staged_rows)
            self.forget()

    def refuse_batch(self, num_keys: int) -> None:
        """Raise: one batch needs more rows than there are slots."""
        try:
            self.cache.refuse(num_keys, 1)
        except BudgetError as error:
            raise self._explain(error) from None

    def stalled(self, seconds: float) -> None:
        """Training waited this long for a window."""
        self._count(CacheCounts(stall_seconds=seconds))

    def _forget_rows(self, keys: Tensor) -> None:
        if keys.shape[0]:
            self.revoke_lease()
            self.cache.forget(keys.to(self.records.device))
            self.store.forget(keys)

    def packed(self, slots: Tensor) -> Tensor:
        """The records in these slots, side by side (current stream)."""
        out = torch.empty(slots.shape[0], self.layout.width, device=self.records.device, dtype=torch.float32)
        pack(self.records, slots, out)
        return out

    def count_window(
        self, plan: WindowPlan, num_batches: int, num_lookups: int, *, num_moved: int, num_created: int
    ) -> None:
        """A window's rows are here: that many were moved from below, and that many created."""
        record = self.layout.width * 4
        counts = plan.cache_counts(
            num_batches, num_lookups, num_moved=num_moved, num_created=num_created, record_bytes=record
        )
        self._count(counts)

    def _count(self, more: CacheCounts) -> None:
        with self._counting:
            self._counts = self._counts.plus(more)

    def _explain(self, error: BudgetError) -> BudgetError:
        rows, record = self.keyspace.preset_rows, self.layout.width * 4
        enough, least = (
            enough_for(
                error.num_slots, rows, record, on_ssd=self.is_over_ssd, to_spare=to_spare, part=self.part_of_budget
            )
            for to_spare in (True, False)
        )
        spare = f", which leaves some to spare ({least} holds this batch)" if least != enough else ""
        share = f"cache={enough.share} (--cache {enough.share}) or " if enough.share else ""
        return BudgetError(
            f"{error} For tables of dim {self.layout.dim} that is {share}{enough.option}={enough.amount!r} "
            f"(--{enough.option} {enough.amount}){spare}.",
            error.num_slots,
        )

    def forget(self) -> None:
        """Forget all rows on the device: part of a change."""
        self.revoke_lease()
        self.cache = self._new_cache(self.records.device)

    def _new_cache(self, device: torch.device) -> Cache:
        name = f"the cache of {', '.join(member.name for member in self._members)}"
        in_order, ahead = self.store.array is None, self.store.tiered is not None
        return Cache(
            self.num_slots, self._policy, device, bounded=self._bounded, in_order=in_order, lists_new=ahead, name=name
        )


def __getattr__(name: str) -> Any:
    if name != "CachedGroup":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("CachedGroup is now called CachedRows.", DeprecationWarning, stacklevel=2)
    return CachedRows
