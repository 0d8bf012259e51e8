"""What passes between a cache and its callers: a batch that is known, a window being planned, a window decided.

Numbers come from the device; asking for one waits until it is there.

Shapes: L lookups of a batch, U distinct keys of it, M misses of a window, V victims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hotbed.cache.counts import CacheCounts
from hotbed.cache.device_counters import CounterRow
from hotbed.ops.index import (
    EVICTIONS,
    FREED,
    HITS,
    MISSED_LOOKUPS,
    MISSES,
    NEW_CELLS,
    NUM_KEYS,
    UNPLACED,
    VICTIMS,
    ArrivalCells,
    Lists,
    WindowClock,
)


class Arrival:
    """A batch that is known and not yet planned."""

    def __init__(
        self, arrived: ArrivalCells, number: int | None, sorted_keys: Tensor, order: Tensor | None, row: CounterRow
    ) -> None:
        self.arrived = arrived
        self.number = number  # among the batches ahead; None for one that is planned at once
        self.sorted_keys = sorted_keys  # [L]; in the order of the batch on the CPU, where nothing is sorted
        self.order = order  # [L], the positions of sorted_keys in the batch
        self.row = row
        self._known: list[int] | None = None

    @property
    def num_lookups(self) -> int:
        return int(self.sorted_keys.shape[0])

    @property
    def num_keys(self) -> int:
        """U; waits for the device if it has not come so far."""
        return self._numbers()[NUM_KEYS]

    @property
    def num_new(self) -> int:
        return self._numbers()[NEW_CELLS]

    @property
    def num_unplaced(self) -> int:
        """Keys for which the index had no cell left: never, unless room was counted wrong."""
        return self._numbers()[UNPLACED]

    def _numbers(self) -> list[int]:
        if self._known is None:
            self._known = self.row.read()
        return self._known


class Decision(NamedTuple):
    """A window whose keys have been looked for."""

    window: Sequence[Arrival]
    row: CounterRow
    misses: Tensor  # int32 [>= M], cells
    moment: WindowClock  # of its last batch
    train: bool


class WindowPlan(ABC):
    """One window, decided. Numbers and keys are read on the host; they wait for the device if they must.

    `lists` are at least as long as there are misses; `counts` are what the kernels counted, by the names of ops/index.
    """

    @abstractmethod
    def _lists(self) -> Lists: ...

    @abstractmethod
    def _counts(self) -> list[int]:
        """Waits for the device."""

    @property
    def counts(self) -> list[int]:
        """All numbers, by their names in hotbed.ops.index."""
        return self._counts()

    @property
    def num_hits(self) -> int:
        return self._counts()[HITS]

    @property
    def num_misses(self) -> int:
        """M."""
        return self._counts()[MISSES]

    @property
    def num_victims(self) -> int:
        """V: rows to write back."""
        return self._counts()[VICTIMS]

    @property
    def num_evictions(self) -> int:
        return self._counts()[EVICTIONS]

    @property
    def num_missed_lookups(self) -> int:
        return self._counts()[MISSED_LOOKUPS]

    @property
    def num_freed(self) -> int:
        return self._counts()[FREED]

    @property
    def miss_keys(self) -> Tensor:
        """int64 [M], on the host."""
        return self._lists().host_miss_keys[: self._counts()[MISSES]]

    @property
    def victim_keys(self) -> Tensor:
        """int64 [V], on the host: rows to write back before their slots are filled."""
        return self._lists().host_victim_keys[: self._counts()[VICTIMS]]

    @property
    def miss_slots(self) -> Tensor:
        """int64 [M], on the device."""
        return self._lists().miss_slots[: self.num_misses]

    @property
    def miss_keys_on_device(self) -> Tensor:
        """int64 [M]."""
        return self._lists().miss_keys[: self.num_misses]

    @property
    def victim_slots(self) -> Tensor:
        """int64 [V], on the device."""
        return self._lists().victim_slots[: self.num_victims]

    def cache_counts(
        self, num_batches: int, num_lookups: int, *, num_moved: int, num_created: int, record_bytes: int
    ) -> CacheCounts:
        """What this window adds to the counts of a cache; `num_moved` rows came in."""
        counts = self._counts()
        hits, misses, victims = counts[HITS], counts[MISSES], counts[VICTIMS]
        return CacheCounts(
            windows=1,
            batches=num_batches,
            keys=hits + misses,
            hits=hits,
            misses=misses,
            created=num_created,
            evictions=counts[EVICTIONS],
            written_back=victims,
            lookups=num_lookups,
            missed_lookups=counts[MISSED_LOOKUPS],
            bytes_in=num_moved * record_bytes,
            bytes_out=victims * record_bytes,
        )


class CachePlan(WindowPlan):
    """Planned launch by launch: how many rows are missing was known before they were given slots."""

    def __init__(self, num_misses: int, lists: Lists, row: CounterRow) -> None:
        self._num_misses = num_misses
        self._own_lists = lists
        self.row = row

    def _lists(self) -> Lists:
        return self._own_lists

    def _counts(self) -> list[int]:
        return self.row.read()

    @property
    def num_misses(self) -> int:
        return self._num_misses
