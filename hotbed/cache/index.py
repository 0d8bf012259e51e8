"""The index of a cache: its cells, how many are in use, and a larger table before it is full.

The index finds the slot of a key. Its size follows the cache and the batches ahead, never the table. That of a cache that is
bounded, because its bytes are a budget, has a fixed number of cells; as many batches are looked at ahead as have room there.

How many cells a batch has taken comes from the device, so the number in use is known late. `count_live` waits for it if asked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotbed.cache.device_counters import DeviceCounters
from hotbed.cache.plans import Arrival, CachePlan
from hotbed.ops.index import EMPTY, FREE, WAYS, Cells, SlotState, new_cells
from hotbed.ops.index.victims import LINE_BYTES

CELLS_PER_SLOT = 2
FULL = 0.7  # of the cells; above it the table grows
GROWTH = 1.25  # cells of a table that has grown, for each that FULL requires
BYTES_PER_SLOT = 80  # of index and slot state, where a budget in bytes bounds them
STATE_BYTES = 13  # of them, slot state
CELL_BYTES, STAMP_BYTES = 16.25, 4  # of a cell with its share of a mark, and of its stamp by a recorded planner on CUDA
_BRIMFUL = 0.95  # of the cells of a bounded index; above it no batch more is looked at ahead


def bounded_cells(num_slots: int, device_type: str) -> int:
    """Cells of an index that takes no more than BYTES_PER_SLOT with the state of the slots: 3.5 a slot, on CUDA 3.3."""
    on_cuda = device_type == "cuda"
    per_cell, state = CELL_BYTES + (STAMP_BYTES if on_cuda else 0), STATE_BYTES + (0 if on_cuda else LINE_BYTES)
    return max(1, int(num_slots * (BYTES_PER_SLOT - state) / per_cell) // WAYS) * WAYS


class CacheIndex:
    """The cells of a cache; `ops`: the kernels of its device. `bounded`: they are as many as a budget allows.

    Where a method says that cells move, it returns the new cell of each old one (and -1 for -1), or None if they stay.
    """

    def __init__(self, cells: Cells, ops: Any, counters: DeviceCounters, *, bounded: bool) -> None:
        self.cells = cells
        self.bounded = bounded
        self.version = 0  # of the table: cells move when it grows
        self._ops = ops
        self._counters = counters
        self._live = 0  # cells in use, as far as it is known
        self._taken = 0  # cells taken since the marks of spilled buckets were worked out
        self._expected = 0  # cells that batches of recorded planners may have taken, which are not in _live yet
        self._uncounted: list[Arrival | CachePlan] = []  # what is not in _live yet
        self._usual = 0  # cells a batch has taken lately
        self._most_keys = 0  # of a batch

    @property
    def num_cells(self) -> int:
        return int(self.cells.key.shape[0])

    @property
    def num_live(self) -> int:
        """Cells in use, as far as it is known."""
        return self._live

    def note(self, each: Arrival | CachePlan) -> None:
        """This has taken cells, or freed some: they are counted when its numbers have come."""
        self._uncounted.append(each)

    def count_live(self, *, wait: bool) -> int:
        """Cells in use; without `wait`, as far as it is known."""
        counted = 0
        for each in self._uncounted:
            if not wait and not each.row.ready():
                break
            if isinstance(each, Arrival):
                self.count(each.num_new)
                self._usual = max(each.num_new, self._usual - self._usual // 8)
                self._most_keys = max(self._most_keys, each.num_keys)
            else:
                self.count(-each.num_freed)
            counted += 1
        del self._uncounted[:counted]
        return self._live

    def count(self, more: int) -> None:
        """Cells have been taken, or freed."""
        self._live += more
        self._taken += max(0, more)

    def recount(self) -> None:
        """An arrival that was broken off took cells that nobody counted."""
        if not self._expected:
            self._live = int((self.cells.key != EMPTY).sum())

    def expect(self, more: int) -> None:
        """A batch of a recorded planner may take this many cells, or has been counted and takes no more."""
        self._expected += more

    def has_room(self, usual: int, most: int) -> bool:
        """Whether a recorded planner may take that many cells, usually and at most, besides batches not counted yet."""
        full = _BRIMFUL if self.bounded else FULL
        live = self.count_live(wait=False) if self._uncounted else self._live
        if self._uncounted:
            most += sum(each.num_lookups for each in self._uncounted if isinstance(each, Arrival))
        return live + usual <= full * self.num_cells and live + self._expected + most <= self.num_cells

    @property
    def is_full(self) -> bool:
        """Whether no batch more should be looked at ahead: a bounded index might not have cells for it."""
        if not self._has_known_room:
            return False
        return self.count_live(wait=True) + self._most_keys > _BRIMFUL * self.num_cells

    @property
    def _has_known_room(self) -> bool:
        """On a CPU counts come at once, so a bounded index knows how full it is."""
        return self.bounded and self.cells.key.device.type == "cpu"

    def make_room_for(self, keys: Tensor) -> Tensor | None:
        """Have cells for a batch with these keys, sorted or not; cells move if the table grows."""
        return self._make_bounded_room(keys) if self._has_known_room else self.make_room(int(keys.shape[0]))

    def make_room(self, num_lookups: int) -> Tensor | None:
        """Let no search run long: the table grows before it is full, and cells move."""
        pending = [each.num_lookups for each in self._uncounted if isinstance(each, Arrival)]
        usual = 2 * self._usual * (len(pending) + 1) if self._usual else sum(pending) + num_lookups
        known, most = self.count_live(wait=False), self._expected + num_lookups
        if known + usual <= FULL * self.num_cells and known + sum(pending) + most <= self.num_cells:
            return None
        live = self.count_live(wait=True)
        if live + num_lookups > FULL * self.num_cells or live + most > self.num_cells:
            return self._grow(int((live + most) / FULL * GROWTH))
        return None

    def _make_bounded_room(self, keys: Tensor) -> Tensor | None:
        """The table grows only for a batch that has more distinct keys than were seen coming, or than there are slots."""
        live = self.count_live(wait=True)
        if live + keys.shape[0] <= _BRIMFUL * self.num_cells:
            return None
        needed = live + int(torch.unique(keys).shape[0])
        return self._grow(needed) if needed > self.num_cells else None

    def reserve(self, num_cells: int) -> Tensor | None:
        """Make the table this large at once; cells move if it was smaller."""
        return self._grow(num_cells) if num_cells > self.num_cells else None

    def tidy_if_due(self, slots: SlotState) -> None:
        """Work out the marks of spilled buckets anew, now and then: marks that are never cleared make every search long.

        Where half of the cells are empty hardly a bucket is ever full, and it is enough when all have been taken once.
        """
        if self._uncounted:
            self.count_live(wait=False)
        if self._taken * (self._ops.TIDY if 2 * self._live > self.num_cells else 1) >= self.num_cells:
            self._ops.tidy(self.cells, slots)
            self._taken = 0

    def _grow(self, num_cells: int) -> Tensor:
        old, device = self.cells, self.cells.key.device
        used = (old.key != EMPTY).nonzero().squeeze(1)
        keys, by_key = torch.sort(old.key[used])
        from_cells = used[by_key]
        self.cells = new_cells(num_cells, device)
        self._ops.arrive(self.cells, keys, 0, self._counters.take().counts)
        to_cells = (self.cells.key != EMPTY).nonzero().squeeze(1)
        to_cells = to_cells[torch.sort(self.cells.key[to_cells]).indices]
        self.cells.slot[to_cells] = old.slot[from_cells]
        self.cells.future[to_cells] = old.future[from_cells]
        new_cell = torch.full((old.key.shape[0] + 1,), FREE, dtype=torch.int32, device=device)  # [-1] stays -1
        new_cell[from_cells] = to_cells.to(torch.int32)
        self.version += 1
        self._taken = 0
        return new_cell
