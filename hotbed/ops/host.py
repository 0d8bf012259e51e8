"""Numbers on their way from the device to the host: asked for now, read later, without holding anything up."""

from __future__ import annotations

import torch
from torch import Tensor


class Later:
    """A small tensor copied to the host on the current stream. `get` waits if it must; `ready` says whether it would."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def get(self) -> Tensor:
        """The tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
