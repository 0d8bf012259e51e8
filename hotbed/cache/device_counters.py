"""Small numbers that kernels count on the device and the host wants to know, many at a time, without stopping anything.

Rows of eight in a ring. `publish` copies the whole ring, a few KiB, to memory the host can read and marks the point on the
stream; reading a row waits for the first publication after the row was handed out, which is usually long past.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotbed.host.devices import pinned_empty
from hotbed.ops.streams import mark

_ROWS = 512
_HALF = _ROWS // 2
WIDTH = 8


class _Publication:
    """One copy of the ring; `event` is its end."""

    def __init__(self) -> None:
        self.done = False
        self.event: Any = None


class CounterRow:
    """Eight numbers."""

    def __init__(self, counters: DeviceCounters, index: int) -> None:
        self._counters = counters
        self._index = index
        self._publication = counters.coming
        self.counts = counters.rows[index]  # int64 [8], on the device

    def again(self) -> None:
        """More will be counted: what is read from now on comes with the next publication."""
        self._publication = self._counters.coming

    def ready(self) -> bool:
        """Whether `read` would not wait."""
        publication = self._publication
        return publication.done and (publication.event is None or publication.event.query())

    def read(self) -> list[int]:
        """The numbers as they were when published."""
        if not self._publication.done:
            self._counters.publish()
        if self._publication.event is not None:
            self._publication.event.synchronize()
        numbers: list[int] = self._counters.array[self._index].tolist()
        return numbers


class DeviceCounters:
    """The ring. Fewer than 256 rows are in use at a time."""

    def __init__(self, device: torch.device) -> None:
        self._ring = torch.zeros(_ROWS, WIDTH, dtype=torch.int64, device=device)
        self._on_cuda = device.type == "cuda"
        self.mirror = pinned_empty((_ROWS, WIDTH), torch.int64).zero_() if self._on_cuda else self._ring
        self.array = self.mirror.numpy()  # the same memory, quicker to read
        self.rows: list[Tensor] = list(self._ring.unbind(0))
        self.coming = _Publication()
        self._next = 0

    def take(self) -> CounterRow:
        """A row of zeros."""
        if self._next % _HALF == 0:
            self._ring[self._next : self._next + _HALF].zero_()
        row = CounterRow(self, self._next)
        self._next = (self._next + 1) % _ROWS
        return row

    def publish(self) -> None:
        """Make known to the host all that was counted so far on the current stream."""
        publication, self.coming = self.coming, _Publication()
        if self._on_cuda:
            self.mirror.copy_(self._ring, non_blocking=True)
            publication.event = mark(self._ring.device)
        publication.done = True
