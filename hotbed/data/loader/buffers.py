"""Memory for batches that is used again: sizes in, tensors out, their memory back when nobody can see them any more.

Fresh memory costs as much as decoding into it does: the kernel zeroes every page at its first touch. So the memory of a batch
goes back to a shelf, and the next batch of its size takes it from there. The rule of return is Python's own: a tensor keeps
its memory alive, and so does every view of it, slice, numpy array or graph of autograd. When the last of them is gone, the
memory is on the shelf, and not before. Whoever holds on to a batch keeps it as it is, and costs its memory and no more.

Pinned memory comes from torch, whose allocator keeps the same rule, and waits for copies to the device that are under way.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SMALL = 1 << 17  # bytes; the C library uses smaller pieces again by itself
_STEPS = 8  # sizes between two powers of two: at most an eighth is wasted


class Buffers:
    """A shelf of free memory; any thread may take from it and drop what it took."""

    def __init__(self, *, pin_memory: bool = False, most_bytes: int = 1 << 30) -> None:
        """`most_bytes` is the most that lies free on the shelf; what comes back beyond it goes to the system."""
        self.pin_memory = pin_memory
        self._most_bytes = most_bytes
        self._free: dict[int, deque[Tensor]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of any contents."""
        count = int(np.prod(shape, dtype=np.int64))
        num_bytes = count * dtype.itemsize
        if self.pin_memory or num_bytes < _SMALL:
            return torch.empty(shape, dtype=dtype, pin_memory=self.pin_memory, device="cpu")
        size = _size_class(num_bytes)
        try:
            memory = self._free[size].pop()
        except (KeyError, IndexError):
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        # numpy's views name the first owner as their base, not each other: what is watched is what torch holds on to
        watched = memory[:num_bytes].view(dtype).reshape(shape).numpy()
        weakref.finalize(watched, self._take_back, memory).atexit = False
        return torch.from_numpy(watched)

    @property
    def free_bytes(self) -> int:
        """What lies on the shelf."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def _take_back(self, memory: Any) -> None:
        """Called wherever the last view ends, inside any other step of this class too: single steps, and no lock."""
        size = memory.numel()
        if self.free_bytes + size <= self._most_bytes:
            self._free.setdefault(size, deque()).append(memory)


def _size_class(num_bytes: int) -> int:
    """The size that is used for so many bytes."""
    step = max(1 << (num_bytes - 1).bit_length() >> 1, _STEPS) // _STEPS
    return -(-num_bytes // step) * step
