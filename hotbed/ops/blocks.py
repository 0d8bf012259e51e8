"""Memory for the vectors of a batch and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.host.pages import advise_huge

_NEVER_KEPT = 32 << 20  # bytes above which glibc gives freed memory back, so that every batch faults its pages in again


def empty_block(num_rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised [num_rows, dim]; a large one on the host in huge pages (54 MB filled by one thread: 7 ms, else 27)."""
    block = torch.empty(num_rows, dim, dtype=dtype, device=device)
    if device.type == "cpu" and block.nbytes > _NEVER_KEPT:
        advise_huge(block.data_ptr(), block.nbytes)
    return block


class Scratch:
    """A block that is kept from batch to batch, where its user is done with it before the next one needs it."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8, device="cpu")

    def block(self, num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [num_rows, dim] on the host."""
        if self._kept.dtype != dtype or self._kept.numel() < num_rows * dim:
            self._kept = empty_block(num_rows, dim, dtype, self._kept.device).view(-1)
        return self._kept[: num_rows * dim].view(num_rows, dim)
