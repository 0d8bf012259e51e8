"""Pinned memory between the store and the device: rows on their way wait here, in two buffers each way.

A buffer is filled again only when the copy out of it is done, so the copy of one window runs while the next is gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotbed.host.devices import pinned, pinned_empty, with_spare
from hotbed.ops.streams import current, mark

_ROUND = 4096  # rows


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, behind what the current stream does; without waiting."""
    return pinned(tensor).to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Staging:
    """Buffers for rows of W floats; they grow to the largest window, of at most `most` rows, and stay."""

    def __init__(self, width: int, device: torch.device, most: int | None = None) -> None:
        self._width, self._most = width, most
        self._device = device
        self._pinned = device.type == "cuda"
        self._in: list[tuple[Tensor, Tensor]] = [self._new(0), self._new(0)]
        self._out = self._new(0)[0]
        self._sent: list[Any] = [None, None]
        self._turn = 0

    def inward(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """(rows [N, W], source int32 [N]) to fill; waits for the copy that still reads them."""
        self._turn = 1 - self._turn
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        if self._in[self._turn][0].shape[0] < num_rows:
            self._in[self._turn] = self._new(num_rows)
        rows, source = self._in[self._turn]
        return rows[:num_rows], source[:num_rows]

    def sent(self) -> None:
        """The copies out of what `inward` gave are on the current stream."""
        if self._pinned:
            self._sent[self._turn] = mark(self._device)

    def outward(self, packed: Tensor) -> Tensor:
        """Rows [V, W] on the host, when the copy (on the current stream) is done; they stay until the next call."""
        if not self._pinned:
            return packed
        if self._out.shape[0] < packed.shape[0]:
            self._out = self._new(packed.shape[0])[0]
        rows = self._out[: packed.shape[0]]
        rows.copy_(packed, non_blocking=True)
        current(packed.device).synchronize()
        return rows

    def _new(self, num_rows: int) -> tuple[Tensor, Tensor]:
        num_rows = with_spare(-(-num_rows // _ROUND) * _ROUND if self._most is None else num_rows, self._most)
        return (
            pinned_empty((num_rows, self._width), torch.float32, pins=self._pinned),
            pinned_empty((num_rows,), torch.int32, pins=self._pinned),
        )
