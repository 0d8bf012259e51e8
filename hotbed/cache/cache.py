"""The cache: slots, the keys in them, the batches ahead, and the plan of a window.

    arrive(keys)         a batch is known: its distinct keys have cells, and the policy knows they will be used
    plan(arrivals)       its turn: what is missing gets slots, what must leave is named
    slots_of(arrival)    where its look-ups go

In: keys. Out: a CachePlan: the misses to bring in and the victims to write back first. The cache moves no rows and knows no
store; what it decides depends on the keys alone, never on timing or on the device, so a simulator runs this very code.
Everything but one small number per window stays on the device, and the size of everything follows the cache and the batches
ahead, never the table.

Shapes: L look-ups of a batch, U distinct keys of it, M misses of a window, V victims, S slots, T cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.errors import BudgetError
from hotbed.ops.host import Later
from hotbed.ops.index import (
    AHEAD_BITS,
    EMPTY,
    FREE,
    HOT_BIT,
    SYNC_BIT,
    Arrived,
    Scoring,
    new_cells,
    new_slots,
    ops_for,
)

_CELLS_PER_SLOT = 2
_FULL = 0.7  # of the cells; above it the table grows
_RESPILL = 64  # windows between two cleanings


class Arrival:
    """A batch that is known and not yet planned."""

    def __init__(self, arrived: Arrived, bit: int, sorted_keys: Tensor, order: Tensor | None) -> None:
        self.arrived = arrived
        self.bit = bit
        self.sorted_keys = sorted_keys  # [L]; in the order of the batch on the CPU, where nothing is sorted
        self.order = order  # [L], the positions of sorted_keys in the batch
        self._counts = Later(arrived.counts)

    @property
    def num_lookups(self) -> int:
        return int(self.sorted_keys.shape[0])

    @property
    def num_keys(self) -> int:
        """U; waits for the device if it has not come so far."""
        return int(self._counts.get()[0])

    @property
    def num_new(self) -> int:
        return int(self._counts.get()[1])


class CachePlan(NamedTuple):
    """One window, decided."""

    num_hits: int
    num_misses: int
    miss_keys: Tensor  # int64 [M], ascending
    miss_slots: Tensor  # int64 [M]
    victim_keys: Tensor  # int64 [M], of which the first V are meant: rows to write back before their slots are filled
    victim_slots: Tensor  # int64 [M]
    counts: Tensor  # int64 [3]: V, evictions, cells freed

    @property
    def num_keys(self) -> int:
        return self.num_hits + self.num_misses


class Cache:
    """S slots under a policy."""

    def __init__(self, num_slots: int, policy: Scoring, device: torch.device) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.device = device
        self.clock = 0  # batches planned
        self._slots = new_slots(num_slots, device)
        self._cells = new_cells(_CELLS_PER_SLOT * num_slots, device)
        self._ops = ops_for(self._cells.key)
        self._live = 0  # cells in use, as far as it is known
        self._waiting: list[Arrival] = []  # arrived, not planned, in order
        self._unknown: list[Arrival] = []  # whose counts are not in _live yet
        self._freed: list[Later] = []
        self._next_bit = 0
        self._windows = 0

    @property
    def num_ahead(self) -> int:
        """Batches that have arrived and are not planned."""
        return len(self._waiting)

    @property
    def can_arrive(self) -> bool:
        return len(self._waiting) < AHEAD_BITS

    def arrive(self, sorted_keys: Tensor, order: Tensor | None) -> Arrival:
        """A batch ahead: its keys [L] (-1 for none), sorted where there is an order."""
        assert self.can_arrive, f"{len(self._waiting)} batches are ahead, {AHEAD_BITS} at most"
        arrival = self._arrive(sorted_keys, order, self._next_bit)
        self._next_bit = (self._next_bit + 1) % AHEAD_BITS
        self._waiting.append(arrival)
        return arrival

    def arrive_at_once(self, sorted_keys: Tensor, order: Tensor | None) -> Arrival:
        """A batch that is planned before anything else happens."""
        return self._arrive(sorted_keys, order, SYNC_BIT)

    def drop_ahead(self) -> None:
        """Forget every batch that has arrived and is not planned."""
        for arrival in self._waiting:
            freed = self._ops.drop(self._cells, arrival.arrived, arrival.bit)
            self._freed.append(Later(freed))
        self._waiting, self._next_bit = [], 0

    def plan(self, window: Sequence[Arrival], pinned: int, train: bool) -> CachePlan:
        """Decide and take note: rows of this window come in; rows used at clock `pinned` or later stay.

        Raises BudgetError, with nothing changed, when the window's rows do not fit beside those that stay.
        """
        most = sum(arrival.num_keys for arrival in window)
        if most > self.num_slots:
            self._refuse(most, len(window))
        since = self.clock + 1
        misses = torch.empty(most, dtype=torch.int32, device=self.device)
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        for arrival in window:
            self.clock += 1
            self._ops.collect(
                self._cells, self._slots, arrival.arrived, arrival.bit, self.clock, since, self.policy.half_life,
                train, misses, counts,
            )  # fmt: skip
        if window[0].bit != SYNC_BIT:
            assert self._waiting[: len(window)] == list(window), (
                "batches are planned in the order in which they arrived"
            )
            del self._waiting[: len(window)]
        num_hits, num_misses = Later(counts).get().tolist()
        turn = self._waiting[0].bit if self._waiting else self._next_bit
        pinned = min(pinned, since)
        chosen = self._ops.select(self._cells, self._slots, self.policy, turn, self.clock, pinned, num_misses)
        assigned = self._ops.assign(self._cells, self._slots, misses[:num_misses], chosen, self.clock, train)
        self._freed.append(Later(assigned.counts[2:]))
        self._windows += 1
        if self._windows % _RESPILL == 0:
            self._ops.respill(self._cells)
        return CachePlan(num_hits, num_misses, assigned.miss_keys, chosen, *assigned[1:])

    def slots_of(self, arrival: Arrival, missed: Tensor) -> Tensor:
        """The slot [L] of every look-up of a planned batch; `missed` [1] grows by those of rows that just came in."""
        slots: Tensor = self._ops.place(
            self._cells, self._slots, arrival.arrived, arrival.sorted_keys, arrival.order, missed
        )
        return slots

    def keep(self, keys: Tensor) -> None:
        """Tell the policy that these keys (distinct, ascending, at most S) are hot."""
        assert keys.shape[0] <= self.num_slots, f"{keys.shape[0]} hot rows for {self.num_slots} slots"
        arrived = self._arrive(keys.to(self.device), None if self.device.type == "cpu" else keys, HOT_BIT)
        del arrived

    def mark_dirty(self, slots: Tensor) -> None:
        """These slots' rows are about to change."""
        self._slots.dirty[slots[slots >= 0].to(torch.int64)] = 1

    def dirty(self) -> tuple[Tensor, Tensor]:
        """(keys, slots) of all rows that may differ from those below."""
        slots = (self._slots.dirty != 0).nonzero().squeeze(1)
        return self._cells.key[self._slots.cell[slots].to(torch.int64)], slots

    def mark_clean(self) -> None:
        """All rows have been written back."""
        self._slots.dirty.zero_()

    def resident(self) -> tuple[Tensor, Tensor]:
        """(keys, their slots) of all rows in the cache, ascending by slot."""
        slots = (self._slots.cell != FREE).nonzero().squeeze(1)
        return self._cells.key[self._slots.cell[slots].to(torch.int64)], slots

    @property
    def num_bytes(self) -> int:
        """Device memory of index and slot states."""
        return sum(part.nbytes for part in (*self._cells, *self._slots))

    def check_integrity(self) -> None:
        """Cells and slots tell the same story: every key in one cell and at most one slot, and each points at the other."""
        key, slot, cell = self._cells.key, self._cells.slot, self._slots.cell.to(torch.int64)
        used = (cell != FREE).nonzero().squeeze(1)
        keys = key[key != EMPTY]
        assert torch.unique(keys).shape[0] == keys.shape[0], "a key has two cells"
        assert torch.unique(cell[used]).shape[0] == used.shape[0], "two slots hold one cell"
        assert torch.equal(slot[cell[used]].to(torch.int64), used), "a slot's cell points at another slot"
        pointing = int((slot >= 0).sum())
        assert pointing == used.shape[0], f"{pointing} cells point at {used.shape[0]} slots in use"
        assert bool((key[cell[used]] != EMPTY).all()), "a slot holds an empty cell"
        empty = key == EMPTY
        assert bool((self._cells.future[empty] == 0).all()), "an empty cell has a future"
        known = self._count_live()
        assert known == keys.shape[0], f"{known} cells counted, {keys.shape[0]} in use"

    def _arrive(self, sorted_keys: Tensor, order: Tensor | None, bit: int) -> Arrival:
        self._make_room(int(sorted_keys.shape[0]))
        arrival = Arrival(self._ops.arrive(self._cells, sorted_keys, bit), bit, sorted_keys, order)
        self._unknown.append(arrival)
        return arrival

    def _refuse(self, needed: int, num_batches: int) -> None:
        what = "one batch needs" if num_batches == 1 else f"a window of {num_batches} batches needs"
        raise BudgetError(
            f"{what} {needed:,} rows at once, but the cache has {self.num_slots:,} slots. "
            f"Give the cache {needed:,} slots or more, or take smaller batches.",
            needed,
        )

    def _count_live(self) -> int:
        self._live += sum(arrival.num_new for arrival in self._unknown)
        self._live -= sum(int(freed.get()[0]) for freed in self._freed)
        self._unknown, self._freed = [], []
        return self._live

    def _make_room(self, num_lookups: int) -> None:
        """Let no bucket search run long: the table grows before it is full."""
        limit = _FULL * self._cells.key.shape[0]
        pending = sum(arrival.num_lookups for arrival in self._unknown)
        if self._live + pending + num_lookups > limit and self._count_live() + num_lookups > limit:
            self._grow(int((self._live + num_lookups) / _FULL * 1.25))

    def _grow(self, num_cells: int) -> None:
        """A larger table; cells move, so everything that remembers one is told."""
        old = self._cells
        used = (old.key != EMPTY).nonzero().squeeze(1)
        keys, by_key = torch.sort(old.key[used])
        from_cells = used[by_key]
        self._cells = new_cells(num_cells, self.device)
        arrived: Arrived = self._ops.arrive(self._cells, keys, 0)
        to_cells = arrived.cells.to(torch.int64)
        to_cells = to_cells[torch.sort(self._cells.key[to_cells]).indices]
        self._cells.slot[to_cells] = old.slot[from_cells]
        self._cells.future[to_cells] = old.future[from_cells]
        new_cell = torch.full((old.key.shape[0] + 1,), FREE, dtype=torch.int32, device=self.device)  # [-1] stays -1
        new_cell[from_cells] = to_cells.to(torch.int32)
        self._slots.cell.copy_(new_cell[self._slots.cell.to(torch.int64)])
        for arrival in self._waiting:
            cells = arrival.arrived.cells[: arrival.num_keys]
            cells.copy_(new_cell[cells.to(torch.int64)])
            if arrival.arrived.cell_of_lookup is not None:
                cell_of = arrival.arrived.cell_of_lookup
                cell_of.copy_(new_cell[cell_of.to(torch.int64)])
