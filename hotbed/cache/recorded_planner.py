"""A recorded cache: batches below a capacity, known and planned by replaying recordings.

Knowing a batch is some twenty launches, planning a window some fifty; from Python each takes longer than the kernels run. So
they are recorded once as CUDA graphs and replayed, and everything that changes from batch to batch, the number of its
lookups too, stays on the device. The host reads what it wants from memory the kernels write to. Decisions are those of `Cache`
to the row, and the two may alternate: what it has on the device is brought up to date when the cache was used in between.

Everything runs on the stream that is current, which is the one that trains; a row of slots is written again only after
`batches` further ones, so nothing there is overwritten while it is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotbed.cache.cache import Cache
from hotbed.cache.plans import WindowPlan
from hotbed.ops.index import (
    NEW_CELLS,
    NUM_KEYS,
    UNPLACED,
    Lists,
)
from hotbed.ops.index.recorded import (
    ARRIVALS,
    ARRIVED,
    NEW_LISTS,
    WINDOWS,
    RecordedBuffers,
    new_buffers,
    recorded_arrive,
    recorded_plan,
)
from hotbed.ops.inputs import BATCHES, Capacity, Description
from hotbed.ops.inputs.triton import Descriptions
from hotbed.ops.lookups import BatchSlots, SortedKeys
from hotbed.ops.recording import RecordedSizes, Recordings
from hotbed.ops.streams import mark

_NUMBER = 8  # place of the tag in a row of counts on the host
_VIEWS = 64
_PLANNED = (
    4  # windows whose slots are kept: the one that trains, two that are planned, one that the device may still be at
)


def _row_of(buffers: RecordedBuffers, row: int) -> BatchSlots:
    bags = (None if part is None else part[row] for part in (buffers.starts, buffers.out_row, buffers.scale))
    return BatchSlots(buffers.slots[row], SortedKeys(buffers.sorted_keys[row], buffers.order[row]), *bags)


class RecordedPlan(WindowPlan):
    """One window, decided; numbers and lists are there when its event is reached."""

    def __init__(self, recorded: RecordedCache, number: int, lists: Lists, event: Any) -> None:
        self._recorded = recorded
        self.number = number
        self._all_lists = lists
        self._event = event
        self._row: list[int] | None = None

    def _lists(self) -> Lists:
        return Lists(*(part[self.number % WINDOWS] for part in self._all_lists))

    def _counts(self) -> list[int]:
        if self._row is None:
            if self._event is not None:
                self._event.synchronize()
            row = self._recorded.window_row(self.number)
            assert row[_NUMBER] == self.number + 1, (
                f"the counts of window {self.number} are those of {row[_NUMBER] - 1}"
            )
            self._row = row
        return self._row

    def wait(self) -> None:
        """Until the device has decided it, and the host has its numbers."""
        self._counts()

    @property
    def is_read(self) -> bool:
        """The host has its numbers, wherever they were."""
        return self._row is not None

    @property
    def device_lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """(keys of misses, their slots, slots of victims), longer than meant."""
        return self._recorded.device_lists(self.number)


class RecordedCache:
    """Batches below a capacity for one cache, at most `window` of them planned together."""

    def __init__(self, cache: Cache, inputs: Descriptions, capacity: Capacity, window: int) -> None:
        self.capacity = capacity
        self._cache = cache
        self._inputs = inputs
        room = min(cache.num_slots, capacity.num_lookups * window)
        self._buffers = new_buffers(
            capacity, _PLANNED * window, room, inputs.layout, cache.device, lists_new=cache.lists_new
        )
        self._host_arrivals = self._buffers.host_arrival_counts.numpy()
        self._host_windows = self._buffers.host_window_counts.numpy()
        num_bags = capacity.num_samples * inputs.layout.num_spans
        self._rows = [
            _row_of(self._buffers, row).cut(capacity.num_lookups, num_bags) for row in range(_PLANNED * window)
        ]
        self._views: dict[tuple[int, int, int], BatchSlots] = {}  # of rows that are cut, by what is left
        self._sizes = RecordedSizes(capacity.num_lookups)
        self._counts = [(0, 0)] * BATCHES  # lookups and samples of the batches that have arrived
        self._usual = 0  # cells a batch has taken lately
        lists = self._buffers.lists
        self._device_lists = list(zip(*(part.unbind(0) for part in lists[:3])))
        self._num_windows = 0
        self._left_behind: tuple[int, int, int] | None = None  # what the state on the device says
        self._recordings = Recordings(cache.device)
        self._version = -1  # of the cache, when the recordings were made
        self._stamps = torch.zeros(
            0, dtype=torch.int32, device=cache.device
        )  # batch number + 1 of each cell's last arrival
        self._uncounted: list[RecordedPlan] = []
        self._pending: deque[tuple[int, int]] = deque()  # (number, lookups) of arrivals whose cells are not counted

    def arrive(self, batch: Description) -> int:
        """A batch ahead, whose ids stay where they are until it is planned; its number."""
        self._make_room([batch])
        self._catch_up()
        self._note(batch)
        self._cache.index.expect(batch.num_lookups)
        size = self._sizes.size_for(batch.num_lookups)
        self._recordings.run(("arrive", size, self._cache.stride), lambda: self._arrive(1, size))
        self._remember()
        return self._cache.num_arrived - 1

    def plan(self, count: int, arriving: Sequence[Description] = ()) -> tuple[RecordedPlan, list[BatchSlots]]:
        """Plan the next `count` batches; then as many arrive, or none.

        They arrive in the same recording if there is room for all, else one after the other, and each makes its own.
        """
        assert len(arriving) in (0, count)
        together = arriving if arriving and self._make_room(arriving) else ()
        found = self._plan_window(count, together)
        if not together:
            for batch in arriving:
                self.arrive(batch)
        return found

    def num_lookups(self, number: int) -> int:
        """Lookups of a batch that has arrived."""
        return self._counts[number % BATCHES][0]

    def _plan_window(self, count: int, arriving: Sequence[Description]) -> tuple[RecordedPlan, list[BatchSlots]]:
        self._catch_up()
        first = self._cache.num_planned
        self._cache.note_planned(count)
        for batch in arriving:
            self._note(batch)
        new = [batch.num_lookups for batch in arriving]
        self._cache.index.expect(sum(new))
        size = self._sizes.size_for(max(*new, *(self.num_lookups(first + k) for k in range(count)), 0))
        self._recordings.run(
            ("plan", count, size, bool(arriving), self._cache.stride), lambda: self._plan(count, size, bool(arriving))
        )
        self._cache.clock += count
        self._cache.note_window()
        self._remember()
        plan = RecordedPlan(self, self._num_windows, self._buffers.lists, mark(self._cache.device))
        self._num_windows += 1
        self._uncounted.append(plan)
        return plan, [self._row(first + k) for k in range(count)]

    def _row(self, number: int) -> BatchSlots:
        """What was planned for a batch, without the padding."""
        num_lookups, num_samples = self._counts[number % BATCHES]
        place = number % len(self._rows)
        row = self._rows[place]
        if (num_lookups, num_samples) == self.capacity:  # most batches, and a view takes a microsecond
            return row
        found = self._views.get((place, num_lookups, num_samples))
        if found is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            found = row.cut(num_lookups, num_samples * self._inputs.layout.num_spans)
            self._views[place, num_lookups, num_samples] = found
        return found

    def _note(self, batch: Description) -> None:
        assert self.capacity.holds(batch.need), f"{batch.need} is above the capacity, {self.capacity}"
        number = self._cache.num_arrived
        self._counts[number % BATCHES] = (batch.num_lookups, batch.num_samples)
        self._inputs.note(number, batch)
        self._cache.note_arrival()
        self._pending.append((number, batch.num_lookups))

    def num_keys(self, number: int) -> int:
        """Distinct keys of a batch ahead; waits for the device if it has not come so far."""
        return self._arrival(number)[NUM_KEYS]

    def has_new_keys(self, number: int) -> bool:
        """Whether the device has written those of a batch ahead."""
        return bool(self._host_arrivals[number % ARRIVALS, _NUMBER] >= number + 1)

    def new_keys(self, number: int, wait: Callable[[Any, int], None]) -> Any:
        """int64 [_], of a batch ahead: keys that were neither here nor ahead before, most of them. In any thread.

        `wait`: until a word has a value or more. What comes late belongs to another batch: nothing may depend on it.
        """
        lists = self._buffers.host_new_keys
        assert lists is not None, "new keys are listed where the cache says so"
        row = self._host_arrivals[number % ARRIVALS]
        wait(row[_NUMBER : _NUMBER + 1], number + 1)
        return lists[number % NEW_LISTS, : int(row[NEW_CELLS])].numpy().copy()

    def window_row(self, number: int) -> list[int]:
        """The counts of a window, as they are now."""
        row: list[int] = self._host_windows[number % WINDOWS].tolist()
        return row

    @property
    def host_lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """(counts, keys of misses, keys of victims) by window, in memory the host can read."""
        lists = self._buffers.lists
        return self._buffers.host_window_counts, lists.host_miss_keys, lists.host_victim_keys

    def device_lists(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """The lists of a window: keys of misses, their slots, slots of victims. They have room for as many as there can be."""
        return self._device_lists[number % WINDOWS]

    @property
    def num_windows(self) -> int:
        """Planned so far."""
        return self._num_windows

    def serves(self, cache: Cache) -> bool:
        """Whether it plans for this cache."""
        return self._cache is cache

    def forget(self) -> None:
        """The batches ahead are about to be dropped."""
        self.settle()
        self._cache.index.expect(-sum(num_lookups for _, num_lookups in self._pending))
        self._pending.clear()
        self._host_arrivals[:, _NUMBER] = 0
        self._left_behind = None

    def _arrival(self, number: int) -> list[int]:
        row = self._host_arrivals[number % ARRIVALS]
        if row[_NUMBER] != number + 1:
            torch.cuda.synchronize(self._cache.device)
            assert row[_NUMBER] == number + 1, f"batch {number} has arrived, its counts have not"
        numbers: list[int] = row.tolist()
        if numbers[UNPLACED]:
            self._cache.check_placed(numbers[UNPLACED])
        return numbers

    def _make_room(self, batches: Sequence[Description]) -> bool:
        """Grow the table before it is full; it is known late how many cells a batch took.

        Windows are waited for one by one, the oldest first: the training thread stays ahead of the device if that is enough.
        False if several batches have no room in a bounded table, where one after the other may have.
        """
        cache, count, most = self._cache, len(batches), sum(batch.num_lookups for batch in batches)
        self._count()
        while not cache.index.has_room(
            2 * self._usual * (len(self._pending) + count), most
        ):  # ends: fewer windows each time
            if cache.index.bounded and count > 1:
                return False
            if not self._uncounted:
                self.settle()
                if not cache.index.has_room(2 * self._usual * count, most):
                    cache.reserve(2 * (cache.index.num_live + most))
                break
            self._uncounted[0].wait()
            self._count()
        return True

    def settle(self) -> None:
        """Count all cells that were taken and freed."""
        if self._cache.device.type == "cuda" and (self._pending or self._uncounted):
            torch.cuda.synchronize(self._cache.device)
        self._count()
        self._cache.index.count_live(wait=True)

    def _count(self) -> None:
        """Cells that were taken and freed, as far as it is known."""
        cache, arrivals, windows = self._cache, self._host_arrivals, self._host_windows
        expected = num_cells = 0
        while self._pending and arrivals[self._pending[0][0] % ARRIVALS, _NUMBER] == self._pending[0][0] + 1:
            number, num_lookups = self._pending.popleft()
            taken = int(arrivals[number % ARRIVALS, NEW_CELLS])
            self._usual = max(taken, self._usual - self._usual // 8)
            expected += num_lookups
            num_cells += taken
        cache.index.expect(-expected)
        cache.index.count(num_cells)
        while self._uncounted and (
            self._uncounted[0].is_read
            or windows[self._uncounted[0].number % WINDOWS, _NUMBER] == self._uncounted[0].number + 1
        ):
            cache.index.count(-self._uncounted.pop(0).num_freed)

    def _catch_up(self) -> None:
        """The device knows what the cache did without it."""
        cache = self._cache
        if self._version != cache.index.version:
            self._recordings.clear()
            self._version = cache.index.version
            self._stamps = torch.zeros(cache.parts()[0].key.shape[0], dtype=torch.int32, device=cache.device)
        now = (cache.num_arrived, cache.num_planned, cache.clock)
        if self._left_behind != now:
            self._buffers.state.copy_(torch.tensor([*now, self._num_windows], device="cpu"))
            self._stamps.zero_()  # batches may have been numbered anew
            self._buffers.arrival_counts.zero_()  # the next row was cleared for another number; others have been read
            self._buffers.window_counts.zero_()

    def _remember(self) -> None:
        self._left_behind = (self._cache.num_arrived, self._cache.num_planned, self._cache.clock)

    def _arrive(self, count: int, size: int) -> None:
        cells, _ = self._cache.parts()
        self._inputs.bring(self._buffers.state, ARRIVED, count)
        for _ in range(count):
            recorded_arrive(cells, self._buffers, self._inputs, size, self._cache.stride, self._stamps)

    def _plan(self, count: int, size: int, arriving: bool) -> None:
        cells, slots = self._cache.parts()
        recorded_plan(
            cells, slots, self._buffers, self._inputs, size, count, self.capacity.num_samples, self._cache.policy,
            self._cache.stride,
        )  # fmt: skip
        if arriving:
            self._arrive(count, size)
