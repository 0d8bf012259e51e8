"""The rows of one window on their way between the slots of a cache and the store below: `read`, then `exchange`, then `write`.

    read       host: rows that exist below go to the staging area and on to the device; a thread may do it ahead of time
    exchange   device: victims leave their slots, misses take them, between two windows
    write      host: victims reach the store; a thread may do it afterwards

Where slots and store are arrays of the same memory nothing is staged, and `exchange` does everything (DirectFetch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotbed.cache.plans import WindowPlan
from hotbed.host.devices import pinned_empty
from hotbed.ops.move import RowExchange, exchange, unpack
from hotbed.ops.streams import after, mark

if TYPE_CHECKING:
    from hotbed.tables.group.cached import CachedRows


class StagedFetch:
    """Rows that pass through staging buffers, to and from any store."""

    def __init__(self, rows: CachedRows, plan: WindowPlan, num_batches: int, num_lookups: int) -> None:
        self.plan = plan
        self._rows = rows
        self._num_batches = num_batches
        self._num_lookups = num_lookups
        self.late: Tensor | None = None  # positions of misses that leave with an earlier window and are not written yet
        self.source: Tensor | None = None
        self.staged: Tensor | None = None
        self.leaving: Tensor | None = None  # victims, packed on the device
        self._packed: Any = None  # the mark at which they are

    @property
    def num_late(self) -> int:
        return 0 if self.late is None else int(self.late.shape[0])

    def read(self) -> None:
        """Read the missed rows and send them to the device (on the current stream), except those that come late."""
        plan, rows = self.plan, self._rows
        staged, source = rows.staging.inward(plan.num_misses)
        if rows.store.tiered is not None:
            rows.store.tiered.advance(self._num_batches)
        rows.store.expect(plan.victim_keys)
        num_found, num_rows, self.late = rows.keyspace.fetch(rows.store, plan.miss_keys, staged, source)
        num_moved, device = num_rows + self.num_late, rows.records.device
        self.staged = torch.empty(num_moved, rows.layout.width, device=device, dtype=torch.float32)
        self.staged[:num_rows].copy_(staged[:num_rows], non_blocking=True)
        self.source = torch.empty_like(source, device=device).copy_(source, non_blocking=True)
        rows.staging.sent()
        num_created = plan.num_misses - num_found - self.num_late
        rows.count_window(plan, self._num_batches, self._num_lookups, num_moved=num_moved, num_created=num_created)

    def read_late(self) -> None:
        """Read rows that left with an earlier window and have been written by now (on the current stream)."""
        if self.late is None or self.source is None or self.staged is None or not self.late.shape[0]:
            return
        late, device = self.late, self._rows.records.device
        found = pinned_empty((late.shape[0], self._rows.layout.width), torch.float32, pins=device.type == "cuda")
        self._rows.store.read(self.plan.miss_keys[late], found)
        first = self.staged.shape[0] - late.shape[0]
        self.staged[first:] = found.to(device, non_blocking=True)
        places = torch.arange(first, self.staged.shape[0], dtype=torch.int32, device="cpu")
        self.source[late.to(device)] = places.to(device)
        self.late = None

    def exchange(self) -> None:
        """Move victims out of their slots and misses into them; create rows never written before (current stream)."""
        plan, rows = self.plan, self._rows
        if plan.num_victims:
            self.leaving = rows.packed(plan.victim_slots)
            self._packed = mark(rows.records.device)
        if plan.num_misses and self.staged is not None and self.source is not None:
            staged = (plan.miss_slots, self.source, self.staged, plan.miss_keys_on_device)
            unpack(rows.records, *staged, rows.keyspace.initial)

    def write(self) -> None:
        """Write the victims to the store (copied on the current stream)."""
        if self.leaving is not None:
            if self._packed is not None:
                after(self._rows.records.device, self._packed)
            self._rows.store.write(self.plan.victim_keys, self._rows.staging.outward(self.leaving))


class DirectFetch:
    """Rows that go from array to array on a CPU."""

    num_late = 0

    def __init__(self, rows: CachedRows, plan: WindowPlan, num_batches: int, num_lookups: int) -> None:
        self.plan = plan
        self._rows = rows
        self._num_batches = num_batches
        self._num_lookups = num_lookups

    def read(self) -> None:
        """Nothing waits in between."""

    read_late = write = read

    def exchange(self) -> None:
        """Move victims from their slots to the store, and misses from the store to their slots."""
        plan, rows, num_found = self.plan, self._rows, 0
        store = rows.store.array
        assert store is not None, "rows are in an array"
        if plan.num_misses:  # a victim leaves its slot to one
            moves = RowExchange(plan.miss_slots, plan.miss_keys, plan.victim_slots, plan.victim_keys)
            store.keep(moves.victim_keys)
            num_found = exchange(rows.records, *store.parts(), moves, rows.keyspace.initial)
        num_created = plan.num_misses - num_found
        rows.count_window(plan, self._num_batches, self._num_lookups, num_moved=num_found, num_created=num_created)


Fetch = StagedFetch | DirectFetch
