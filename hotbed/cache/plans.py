"""What passes between a cache and those who ask it: a batch that is known, a window being planned, a window decided.

Numbers come from the device; asking for one waits until it is there.

Shapes: L look-ups of a batch, U distinct keys of it, M misses of a window, V victims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hotbed.cache.numbers import Row
from hotbed.ops.index import EVICTIONS, FREED, MISSED_LOOKUPS, NEW_CELLS, NUM_KEYS, UNPLACED, VICTIMS, Arrived, Lists


class Arrival:
    """A batch that is known and not yet planned."""

    def __init__(
        self, arrived: Arrived, number: int | None, sorted_keys: Tensor, order: Tensor | None, row: Row
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
    row: Row
    misses: Tensor  # int32 [>= M], cells
    since: int  # the clock at its first batch
    turn: int  # bit of the batch after it
    clock: int  # at its last batch
    train: bool


class CachePlan:
    """One window, decided. Numbers and keys are read on the host; they wait for the device if they must."""

    def __init__(self, num_hits: int, num_misses: int, lists: Lists, row: Row) -> None:
        self.num_hits = num_hits
        self.num_misses = num_misses
        self.lists = lists
        self.row = row

    @property
    def num_keys(self) -> int:
        return self.num_hits + self.num_misses

    @property
    def num_victims(self) -> int:
        """V: rows to write back."""
        return self.row.read()[VICTIMS]

    @property
    def num_evictions(self) -> int:
        return self.row.read()[EVICTIONS]

    @property
    def num_missed_lookups(self) -> int:
        return self.row.read()[MISSED_LOOKUPS]

    @property
    def num_freed(self) -> int:
        return self.row.read()[FREED]

    @property
    def miss_keys(self) -> Tensor:
        """int64 [M], on the host."""
        self.row.read()
        return self.lists.host_miss_keys[: self.num_misses]

    @property
    def victim_keys(self) -> Tensor:
        """int64 [V], on the host: rows to write back before their slots are filled."""
        return self.lists.host_victim_keys[: self.num_victims]

    @property
    def miss_slots(self) -> Tensor:
        """int64 [M], on the device."""
        return self.lists.miss_slots

    @property
    def miss_keys_on_device(self) -> Tensor:
        """int64 [M]."""
        return self.lists.miss_keys

    @property
    def victim_slots(self) -> Tensor:
        """int64 [V], on the device."""
        return self.lists.victim_slots[: self.num_victims]
