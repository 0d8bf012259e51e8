"""How the ids of each feature of a group become keys: base + id, checked, or base + id modulo rows where hashing was asked.

`Flags`: the first lookup of a batch whose id lies outside its table.

On CUDA a kernel finds it. A flag per batch, out of a ring, lies on the device for the kernels that follow, which do nothing
when it is set, and a second one in memory the host can read: so asking costs no copy, only the mark of an event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.host.devices import mapped_empty
from hotbed.ops.streams import mark

NONE = 2**62
_FLAGS = 256  # batches whose answer may be outstanding


@dataclass(frozen=True, eq=False)
class Addresses:
    """One entry per span."""

    base: NDArray[np.int64]
    rows: NDArray[np.int64]
    hashing: NDArray[np.bool_]
    has_padding: NDArray[np.bool_]
    padding: NDArray[np.int64]
    on_device: dict[Any, Any] = field(default_factory=dict)  # copies for kernels, by shape of batch

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.base, self.rows, self.hashing, self.has_padding, self.padding


class Flags:
    """The flags of one device."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.full((_FLAGS, 2), NONE, dtype=torch.int64, device=device)  # two: kernels like 16 bytes
        self.on_host = mapped_empty((_FLAGS, 2), device).fill_(NONE)
        self.rows: list[Tensor] = list(self.on_device.unbind(0))
        self._next = 0

    def take(self) -> int:
        """A flag that is not set."""
        self._next = (self._next + 1) % _FLAGS
        return self._next

    def clear(self, index: int) -> None:
        self.on_device[index] = NONE
        self.on_host[index] = NONE


@cache
def flags_of(device: torch.device) -> Flags:
    return Flags(device)


class FirstBad:
    """A position, or none; on CUDA the answer is on its way."""

    def __init__(self, position: int | None, flags: Flags | None = None, index: int = 0) -> None:
        self._position = position
        self._flags, self._index = flags, index
        self._event = None if flags is None else mark(flags.on_device.device)

    @property
    def flag(self) -> Tensor | None:
        """int64 on the device: NONE or a position; None where the answer is known."""
        return None if self._flags is None else self._flags.rows[self._index]

    def get(self) -> int | None:
        """The position, or None; waits for the device. The flag is free from then on."""
        if self._flags is not None:
            if self._event is not None:
                self._event.synchronize()
            if int(self._flags.on_host[self._index, 0]) != NONE:
                self._position = int(self._flags.on_device[self._index, 0])
                self._flags.clear(self._index)
            self._flags = None
        return self._position
