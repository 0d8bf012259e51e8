"""The first look-up of a batch whose id lies outside its table."""

from __future__ import annotations

from torch import Tensor

from hotbed.ops.host import Later

NONE = 2**62


class FirstBad:
    """A position, or NONE; on CUDA it is on its way."""

    def __init__(self, position: int | Tensor) -> None:
        self.flag = position if isinstance(position, Tensor) else None  # int64 [1], for kernels
        self._later = Later(position) if isinstance(position, Tensor) else None
        self._position = position if isinstance(position, int) else NONE

    def get(self) -> int | None:
        """The position, or None; waits for the device."""
        if self._later is not None:
            self._position, self._later = int(self._later.get()[0]), None
        return None if self._position == NONE else self._position
