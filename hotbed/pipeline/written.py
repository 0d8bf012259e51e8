"""Whether a batch is still what the loader gave, when it is handed out.

In: batches as they are read. Out: an error for one that was written to meanwhile. A loader that fills one tensor again and
again works in a plain loop; read ahead, every batch would be the last one. torch counts the writes to a tensor and to all that
share its memory. Where there were more, some rows are compared with copies of them: a few microseconds per batch.

torch does not see what is written past it (a NumPy array over the same memory), and where training is faster than the loader no
batch waits. So rows are also compared when a batch comes in the memory of an earlier one that waits or is being trained.
What is on a GPU is not seen.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.errors import HotbedError
from hotbed.pipeline.batches import tensors_in

_TENSORS = 4  # of a batch that are looked at
_ADDRESSES = 4096  # that are remembered
_ROWS = 16  # of a tensor that are copied, or up to twice as many


class _Part(NamedTuple):
    tensor: Tensor
    version: int
    rows: Tensor


class _Memory(NamedTuple):
    """A part that was read into some memory."""

    tensor: weakref.ref[Tensor]  # while it lives, nothing else is given this memory
    rows: Tensor
    number: int  # of its batch


class ReadContents:
    """The contents of one reader's batches that are not handed out yet; the same object may occur several times."""

    def __init__(self) -> None:
        self._parts: dict[int, deque[tuple[Any, list[_Part]]]] = {}
        self._memory: dict[int, _Memory] = {}  # by address
        self._num_noted = self._num_forgotten = 0
        self._is_filled_again = False  # the memory of a batch, while that waited or was trained

    def note(self, batch: Any) -> None:
        """A batch was read; in the thread that reads."""
        parts = [_Part(one, one._version, _some(one)) for one in tensors_in(batch)[:_TENSORS] if _is_watched(one)]
        for number in [number for number, noted in self._parts.items() if not noted]:
            del self._parts[number]  # here alone, so that the other thread never finds a list that is being dropped
        if parts:
            self._parts.setdefault(id(batch), deque()).append((batch, parts))  # kept: its number is not given out again
        self._note_memory(parts)

    def _note_memory(self, parts: list[_Part]) -> None:
        if len(self._memory) > _ADDRESSES:
            self._memory.clear()
        for tensor, _, rows in parts:
            address = tensor.data_ptr()
            before = self._memory.get(address)
            if before is not None and before.number >= self._num_forgotten - 1:
                earlier = before.tensor()
                self._is_filled_again |= earlier is not None and not _is_same(_some(earlier), before.rows)
            self._memory[address] = _Memory(weakref.ref(tensor), rows, self._num_noted)
        self._num_noted += 1

    def check(self, batch: Any) -> None:
        """Raise for a batch that was written to; the next call says so again."""
        noted = self._parts.get(id(batch))
        for tensor, version, rows in noted[0][1] if noted else ():
            if self._is_filled_again or (tensor._version != version and not _is_same(_some(tensor), rows)):
                raise HotbedError(
                    "a batch was written to after the loader gave it and before it was handed out: a loader that fills the "
                    "same tensor again and again cannot be read ahead. Yield a tensor of its own for every batch "
                    "(batch.clone()), or leave hotbed.prefetch out"
                )

    def forget(self, batch: Any) -> None:
        """It is handed out: from now on others may write to it."""
        noted = self._parts.get(id(batch))
        if noted:
            noted.popleft()
        self._num_forgotten += 1


def _is_watched(tensor: Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and not tensor.is_nested
    return is_plain and tensor.device.type == "cpu" and not tensor.is_inference()


def _some(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    return found[:: max(1, len(found) // _ROWS)].clone() if found.ndim else found.clone()


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
