"""Page-locked memory, which is not asked for while a CUDA graph is recorded.

torch's allocator of such memory looks after graphs that are being recorded, also those of other threads: on an H200 one request
of a reading thread among some thousands failed with "invalid argument". So a graph is never recorded meanwhile. Memory that
users' loaders pin in threads of their own does not: there is no way to stop them.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

RECORDING = threading.RLock()  # held while a graph is recorded


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A page-locked tensor of any contents."""
    with RECORDING:
        return torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")


def pinned(tensor: Tensor) -> Tensor:
    """A page-locked copy of a tensor on the host."""
    with RECORDING:
        return tensor.pin_memory()
