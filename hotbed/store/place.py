"""Where the rows of a group are, beside those on the device: in memory, on an ssd, or in memory over an ssd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from hotbed.ops.index import Scoring
from hotbed.ops.records import Layout
from hotbed.store.memory import MemoryStore
from hotbed.store.ssd import SsdStore
from hotbed.store.tiered import TieredStore

if TYPE_CHECKING:
    from hotbed.store import Store


class Place(NamedTuple):
    """The room of one group below the device. Without an ssd, memory takes every row."""

    folder: Path | None = None  # on the ssd, the group's own
    ssd_bytes: int = 0
    memory_slots: int = 0  # rows in memory over the ssd; 0: none, what is not on the device is on the ssd
    grows: bool = False  # the rows are those of dynamic ids: far fewer than there could be

    def open(self, num_rows: int, layout: Layout, first: Callable[[Tensor], Tensor], scoring: Scoring) -> Store:
        """A store for that many rows."""
        if self.folder is None:
            return MemoryStore(num_rows, layout, first, grows=self.grows)
        ssd = SsdStore(self.folder, num_rows, layout.width, first, max_bytes=self.ssd_bytes)
        if not self.memory_slots:
            return ssd
        return TieredStore(ssd, num_rows, layout.width, self.memory_slots, scoring, first)
