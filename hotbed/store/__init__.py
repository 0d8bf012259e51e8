"""Keys -> records below the device.

memory.py   MemoryStore: every row in host memory, an array
ssd/        SsdStore: every row in files on an SSD
int8.py     Int8Store: every row in host memory, its weights rounded to int8
tiered.py   TieredStore: memory over ssd (memory_tier.py: its slots; tier_windows.py: for compiled transfers)
held.py     rows of one moment for a checkpoint, while training continues
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotbed.ops.index import ScoreFunction
from hotbed.ops.records import Layout
from hotbed.store.counts import TierContents, Tiers
from hotbed.store.held import Holder
from hotbed.store.int8 import Int8Store
from hotbed.store.memory import MemoryStore
from hotbed.store.ssd import SsdStore
from hotbed.store.tiered import TieredStore

__all__ = ["Int8Store", "MemoryStore", "Place", "SsdStore", "Store", "TieredStore"]


class Store(Protocol):
    """What every store does. One thread at a time moves rows; tensors are on the host and contiguous."""

    def read(self, keys: Tensor, out: Tensor) -> None:
        """The records of `keys` [U] into `out` [U, W]; what was never written reads as its initial value."""

    def expect(self, keys: Tensor) -> None:
        """These rows are on their way here: a reader that wants one before it is written must wait."""

    def fetch(self, keys: Tensor, out: Tensor, source: Tensor) -> tuple[int, Tensor]:
        """Pack the rows that were ever written into `out`: (their number, positions of those expected)."""

    def write(self, keys: Tensor, records: Tensor) -> None:
        """Keep the records [U, W] of `keys` [U], distinct."""

    def forget(self, keys: Tensor) -> None:
        """These rows are gone: they read as their initial values again."""

    def clear(self) -> None:
        """Every row reads as its initial value."""

    def items(self, chunk: int = ...) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of every row ever written, in key order."""

    def keys(self) -> Iterator[NDArray[np.int64]]:
        """Keys that have a record, some at a time, in no order; some may come twice."""

    def flush(self) -> None:
        """Bring everything to the lowest tier."""

    def holder(self) -> Holder:
        """Holds the rows of one moment for a checkpoint, once its `take` is called."""

    def adopt(self, folder: Path) -> None:
        """Take over the rows of a folder that a checkpoint's files were linked into; nothing was written since `clear`."""

    def count_as_saved(self) -> None:
        """All rows are as a checkpoint has them; none is changed since."""

    def tiers(self, num_keys: int) -> Tiers | None:
        """Counts and sizes of memory and ssd, where `num_keys` keys were ever used; None without an ssd."""

    def contents(self) -> TierContents | None:
        """What a tier of memory over an ssd holds; None without one."""

    def restore_contents(self, held: TierContents) -> bool | None:
        """Bring back the rows that the tier held; False if it had another size; None without one."""

    def close(self) -> None:
        """Close files and free what they hold."""

    @property
    def array(self) -> MemoryStore | None:
        """This store, where every row has its place in one array, so that others may move rows themselves; else None."""

    @property
    def tiered(self) -> TieredStore | None:
        """This store, where it is memory over an ssd, which brings rows from there ahead of need; else None."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory, once everything is used."""


class Place(NamedTuple):
    """Where the rows of one group are below the device. Without an ssd, memory takes every row."""

    folder: Path | None = None  # on the ssd, the group's own
    ssd_bytes: int = 0
    memory_slots: int = 0  # rows in memory over the ssd; 0: a row that is not on the device is on the ssd
    grows: bool = False  # rows of dynamic ids: far fewer than there could be
    int8: bool = False  # their weights are rounded, in memory without an ssd

    def open(self, num_rows: int, layout: Layout, first: Callable[[Tensor], Tensor], scoring: ScoreFunction) -> Store:
        """A store for `num_rows` rows."""
        if self.folder is None and self.int8:
            return Int8Store(num_rows, layout, first, grows=self.grows)
        if self.folder is None:
            return MemoryStore(num_rows, layout.width, first, grows=self.grows)
        ssd = SsdStore(self.folder, num_rows, layout.width, first, max_bytes=self.ssd_bytes)
        if not self.memory_slots:
            return ssd
        return TieredStore(ssd, num_rows, layout.width, self.memory_slots, scoring, first)
