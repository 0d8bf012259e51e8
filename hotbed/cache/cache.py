"""The cache: slots, the keys in them, the batches ahead, and the plan of a window.

    arrive(keys)                     a batch is known: its distinct keys have cells, and the policy knows they will be used
    begin(arrivals), then finish     it is planned: misses get slots, victims are listed
    slots_of(arrival)                where its lookups go

In: keys. Out: a CachePlan: the misses to bring in and the victims to write back first. The cache moves no rows and knows no
store; what it decides depends on the keys alone, never on timing or on the device, so forecast/replay.py can predict it.
A plan says how slots are once the windows before it have been trained: rows are moved between two windows.

`begin` and `finish` are separate because the number of misses comes from the device first; callers that can wait use `plan`.
The size of everything follows the cache and the batches ahead, never the table (index.py).

Shapes: L lookups of a batch, U distinct keys of it, M misses of a window, V victims, S slots, T cells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hotbed.cache.device_counters import DeviceCounters
from hotbed.cache.index import CELLS_PER_SLOT, CacheIndex, bounded_cells
from hotbed.cache.plans import Arrival, CachePlan, Decision
from hotbed.cache.window import look_ahead_for, most_ahead
from hotbed.errors import BudgetError, HotbedError
from hotbed.host.devices import mapped_empty
from hotbed.ops.index import (
    AHEAD_BITS,
    EMPTY,
    FREE,
    FREED,
    HOT_BIT,
    MISSES,
    MOST_USES,
    SYNC_BIT,
    Cells,
    Lists,
    ScoreFunction,
    SlotState,
    WindowClock,
    bits_of,
    new_cells,
    new_slots,
    ops_for,
)
from hotbed.ops.index.victims import Victims

HOST_LISTS = 6  # plans whose lists the host can read at a time


class Cache:
    """S slots under a policy; `bounded`: index and slot states take BYTES_PER_SLOT a slot and no more.

    `in_order`: victims are listed as they rank; on the CPU that takes longer. `lists_new`: an arrival lists the keys that were
    neither here nor ahead (on the CPU, and by recorded planners). Errors call it by `name`.
    """

    def __init__(
        self,
        num_slots: int,
        policy: ScoreFunction,
        device: torch.device,
        *,
        bounded: bool = False,
        in_order: bool = True,
        lists_new: bool = False,
        name: str = "a cache",
    ) -> None:
        self.name = name
        self.num_slots = num_slots
        self.lists_new = lists_new
        self.policy = policy
        self.device = device
        self.clock = 0  # batches planned
        self.counters = DeviceCounters(device)
        self._slots = new_slots(num_slots, device)
        cells = new_cells(bounded_cells(num_slots, device.type) if bounded else CELLS_PER_SLOT * num_slots, device)
        self._ops = ops_for(cells.key)
        self.index = CacheIndex(cells, self._ops, self.counters, bounded=bounded)
        self._victims = Victims(num_slots, policy, in_order)
        self._host_lists: list[tuple[Tensor, ...]] = [_host_lists(0, device)] * HOST_LISTS
        self._windows = 0
        self._ahead: deque[Arrival] = deque()  # arrived, not planned, in order
        self._unswept: deque[Arrival] = deque()  # planned, but others that share their bit are not
        self.num_arrived = self.num_planned = 0  # batches, since none was ahead
        self._stride = 1

    @property
    def stride(self) -> int:
        """Batches that share one bit of `future`."""
        return self._stride

    @stride.setter
    def stride(self, stride: int) -> None:
        if stride != self._stride:
            self._victims.reset()
        self._stride = stride

    def look_ahead(self, num_keys: int, given: int | None) -> int:
        """How many batches to know before a window is planned; called when the first one has `num_keys` distinct keys."""
        self.stride, far = look_ahead_for(num_keys, self.num_slots, given, self.index.bounded)
        return far

    def arrive(self, sorted_keys: Tensor, order: Tensor | None) -> Arrival:
        """A batch ahead: its keys [L] (-1 for none), sorted where there is an order."""
        bit = self.note_arrival()
        arrival = self._arrive(sorted_keys, order, bit, self.num_arrived - 1)
        self._ahead.append(arrival)
        return arrival

    def note_arrival(self) -> int:
        """Number the next batch ahead; its bit."""
        ahead = self.num_arrived - self.num_planned
        assert ahead < most_ahead(self.stride), f"{ahead} batches are ahead, {most_ahead(self.stride)} at most"
        self.num_arrived += 1
        return ((self.num_arrived - 1) // self.stride) % AHEAD_BITS

    def arrive_at_once(self, sorted_keys: Tensor, order: Tensor | None) -> Arrival:
        """A batch that is planned before anything else happens."""
        return self._arrive(sorted_keys, order, SYNC_BIT, None)

    def drop_ahead(self) -> None:
        """Forget every batch that has arrived and is not planned."""
        self._drop((1 << AHEAD_BITS) - 1)
        self._victims.reset()
        self._ahead.clear()
        self._unswept.clear()
        self.num_arrived = self.num_planned = 0

    def drop_sync(self) -> None:
        """Forget a batch that was to be planned at once and is refused."""
        self._drop(bits_of(SYNC_BIT))

    def _drop(self, bits: int) -> None:
        self.index.count_live(wait=True)
        row = self.counters.take()
        self._ops.sweep(self.index.cells, bits, row.counts)
        self.index.count(-row.read()[FREED])
        self.index.recount()

    def plan(self, window: Sequence[Arrival], train: bool) -> CachePlan:
        """Decide at once."""
        return self.finish(self.begin(window, train))

    def begin(self, window: Sequence[Arrival], train: bool) -> Decision:
        """Look for the rows of the next batches, in the order in which they arrived.

        Raises BudgetError, with nothing changed, when they do not fit together.
        """
        most = sum(arrival.num_keys for arrival in window)
        self.check_placed(sum(arrival.num_unplaced for arrival in window))
        if most > self.num_slots:
            self.refuse(most, len(window))
        row = self.counters.take()
        since = self.clock + 1
        misses = torch.empty(most, dtype=torch.int32, device=self.device)
        bits = self._take_from_ahead(window)
        for arrival in window:
            self.clock += 1
            self._ops.collect(
                self.index.cells, self._slots, arrival.arrived, arrival.sorted_keys, self.clock, since, self.policy.half_life,
                train, bits, misses, row.counts,
            )  # fmt: skip
        if bits:
            past = [arrival.arrived for arrival in self._pop_past()]
            self._ops.sweep(self.index.cells, bits, row.counts, past)
            self._ops.note(self.index.cells, self._victims, past)
        moment = WindowClock(self.next_bit, self.num_planned // self.stride, self.clock, since, most)
        return Decision(window, row, misses, moment, train)

    def _take_from_ahead(self, window: Sequence[Arrival]) -> int:
        """The batches of a window are no longer ahead; returns the bits that no batch ahead uses from now on."""
        if window[0].number is None:
            return bits_of(SYNC_BIT)
        for arrival in window:
            first = self._ahead.popleft()
            assert first is arrival, f"batch {arrival.number} is planned before batch {first.number}"
        bits = self.note_planned(len(window))
        stop = self.num_planned // self.stride * self.stride
        self._unswept.extend(arrival for arrival in window if (arrival.number or 0) >= stop)
        return bits

    def _pop_past(self) -> Iterator[Arrival]:
        """Earlier batches whose bit others shared, which are planned now."""
        stop = self.num_planned // self.stride * self.stride
        while self._unswept and (self._unswept[0].number or 0) < stop:
            yield self._unswept.popleft()

    def note_planned(self, num_batches: int) -> int:
        """The next batches ahead are planned; returns the bits that no batch ahead uses from now on."""
        past = range(self.num_planned // self.stride, (self.num_planned + num_batches) // self.stride)
        self.num_planned += num_batches
        bits = 0
        for step in past:
            bits |= 1 << (step % AHEAD_BITS)
        return bits

    @property
    def next_bit(self) -> int:
        """The bit of the next batch ahead."""
        return (self.num_planned // self.stride) % AHEAD_BITS

    def finish(self, decision: Decision) -> CachePlan:
        """Choose slots and take note; windows are finished in the order in which they were begun."""
        row = decision.row
        numbers = row.read()
        num_misses = numbers[MISSES]
        lists = self._lists(num_misses)
        if num_misses:
            order = self._ops.rank(self.index.cells, self._slots, self._victims, decision.moment, num_misses)
            self._ops.assign(
                self.index.cells, self._slots, decision.misses[:num_misses], order, decision.moment.clock, decision.train,
                lists, row.counts,
            )  # fmt: skip
        self._ops.note(self.index.cells, self._victims, (arrival.arrived for arrival in decision.window))
        row.again()
        plan = CachePlan(num_misses, lists, row)
        self.index.note(plan)
        self.note_window()
        return plan

    def note_window(self) -> None:
        """A window has been decided."""
        self._windows += 1
        self.index.tidy_if_due(self._slots)

    def slots_of(self, arrival: Arrival, plan: CachePlan) -> Tensor:
        """The slot [L] of every lookup of a batch that was just planned."""
        slots: Tensor = self._ops.place(
            self.index.cells, self._slots, arrival.arrived, arrival.sorted_keys, arrival.order, plan.row.counts
        )
        return slots

    def keep(self, keys: Tensor) -> None:
        """Let the policy know that these keys (distinct, ascending, at most S) are hot."""
        assert keys.shape[0] <= self.num_slots, f"{keys.shape[0]} hot rows for {self.num_slots} slots"
        self.check_placed(self._arrive(keys.to(self.device), None, HOT_BIT, None).num_unplaced)
        self._victims.reset()

    def count_uses(self, keys: Tensor, uses: Tensor) -> None:
        """Let the policy count these uses of rows that are here (keys ascending)."""
        resident, slots = self.resident()
        here = torch.isin(resident, keys.to(self.device))
        places = torch.searchsorted(keys.to(self.device), resident[here])
        self._slots.uses[slots[here]] = uses.clamp(max=MOST_USES).to(self.device, torch.int32)[places]
        self._victims.reset()

    def dirty(self) -> tuple[Tensor, Tensor]:
        """(keys, slots) of all rows that may differ from those below."""
        slots = (self._slots.dirty != 0).nonzero().squeeze(1)
        return self.index.cells.key[self._slots.cell[slots].to(torch.int64)], slots

    def forget(self, keys: Tensor) -> None:
        """These keys (distinct, on the cache's device) are gone: their slots are free, and nothing is written back.

        No window may be half decided.
        """
        self.index.count_live(wait=True)
        self._victims.reset()
        resident, slots = self.resident()
        slots = slots[torch.isin(resident, keys)]
        cells = self._slots.cell[slots].to(torch.int64)
        self._slots.cell[slots] = FREE
        self._slots.dirty[slots] = 0
        self.index.cells.slot[cells] = FREE
        unused = cells[self.index.cells.future[cells] == 0]
        self.index.cells.key[unused] = EMPTY
        self.index.count(-int(unused.shape[0]))

    def parts(self) -> tuple[Cells, SlotState]:
        """For a recorded planner, which runs the same steps on its own."""
        return self.index.cells, self._slots

    def mark_clean(self) -> None:
        """All rows have been written back."""
        self._slots.dirty.zero_()

    def resident(self) -> tuple[Tensor, Tensor]:
        """(keys, their slots) of all rows in the cache, ascending by slot."""
        slots = (self._slots.cell != FREE).nonzero().squeeze(1)
        return self.index.cells.key[self._slots.cell[slots].to(torch.int64)], slots

    @property
    def num_bytes(self) -> int:
        """Device memory of index and slot states."""
        return sum(part.nbytes for part in (*self.index.cells, *self._slots)) + self._victims.num_bytes

    def check_integrity(self) -> None:
        """Cells and slots agree: every key in one cell and at most one slot, and each points at the other."""
        key, slot, cell = self.index.cells.key, self.index.cells.slot, self._slots.cell.to(torch.int64)
        used = (cell != FREE).nonzero().squeeze(1)
        keys = key[key != EMPTY]
        assert torch.unique(keys).shape[0] == keys.shape[0], "a key has two cells"
        assert torch.unique(cell[used]).shape[0] == used.shape[0], "two slots hold one cell"
        assert torch.equal(slot[cell[used]].to(torch.int64), used), "a slot's cell points at another slot"
        pointing = int((slot >= 0).sum())
        assert pointing == used.shape[0], f"{pointing} cells point at {used.shape[0]} slots in use"
        assert bool((key[cell[used]] != EMPTY).all()), "a slot holds an empty cell"
        empty = key == EMPTY
        assert bool((self.index.cells.future[empty] == 0).all()), "an empty cell has a future"
        known = self.index.count_live(wait=True)
        assert known == keys.shape[0], f"{known} cells counted, {keys.shape[0]} in use"

    def _arrive(self, sorted_keys: Tensor, order: Tensor | None, bit: int, number: int | None) -> Arrival:
        self._follow(self.index.make_room_for(sorted_keys))
        row = self.counters.take()
        lists_new = self.lists_new and number is not None
        arrived = self._ops.arrive(self.index.cells, sorted_keys, bits_of(bit), row.counts, lists_new)
        arrival = Arrival(arrived, number, sorted_keys, order, row)
        self.index.note(arrival)
        return arrival

    def _lists(self, num_misses: int) -> Lists:
        place = self._windows % HOST_LISTS
        if self._host_lists[place][0].shape[0] < num_misses:
            self._host_lists[place] = _host_lists(num_misses + num_misses // 4, self.device)
        host_lists = self._host_lists[place]
        if self.device.type == "cpu":  # lists are of the host, all of them
            miss_keys, victim_keys, miss_slots, victim_slots = host_lists
            return Lists(miss_keys, miss_slots, victim_slots, miss_keys, victim_keys)
        on_device = (torch.empty(num_misses, dtype=torch.int64, device=self.device) for _ in range(3))
        miss_keys, miss_slots, victim_slots = on_device
        return Lists(miss_keys, miss_slots, victim_slots, *host_lists)

    def refuse(self, needed: int, num_batches: int) -> None:
        """Raise: that many rows do not fit."""
        what = "one batch needs" if num_batches == 1 else f"a window of {num_batches} batches needs"
        raise BudgetError(
            f"{what} {needed:,} rows at once, but the cache has {self.num_slots:,} slots. "
            f"Give the cache {needed:,} slots or more, or take smaller batches.",
            needed,
        )

    def check_placed(self, num_unplaced: int) -> None:
        """Raise if keys that arrived found no cell: room is made before, so this is the last line of defence."""
        if num_unplaced:
            raise HotbedError(
                f"the index of {self.name} is full: {num_unplaced:,} keys found no place among its "
                f"{self.index.num_cells:,} cells. The index should have grown before, so please report this; "
                "until then look fewer batches ahead (look_ahead=), take smaller batches or give the cache more slots."
            )

    def make_room(self, num_lookups: int) -> None:
        """Have cells for so many lookups."""
        self._follow(self.index.make_room(num_lookups))

    def reserve(self, num_cells: int) -> None:
        """Make the index this large at once."""
        self._follow(self.index.reserve(num_cells))

    def _follow(self, new_cell: Tensor | None) -> None:
        """Cells have moved, if any: update everything that remembers one."""
        if new_cell is None:
            return
        self._slots.cell.copy_(new_cell[self._slots.cell.to(torch.int64)])
        for arrival in (*self._unswept, *self._ahead):
            cells = arrival.arrived.cells
            if cells is not None:
                cells.copy_(new_cell[cells.to(torch.int64)])


def _host_lists(length: int, device: torch.device) -> tuple[Tensor, ...]:
    """Two arrays that kernels on the device can write and the host can read; four where the device is the host."""
    return tuple(mapped_empty((length,), device) for _ in range(2 if device.type == "cuda" else 4))
