"""All ranks of a run, as the code that drives it sees them: a few agreements between processes, each with a name.

`ALONE` is a single process, where every agreement is what this process says; so whoever drives a run asks the same questions
in both cases. Agreements travel over a Gloo group of their own, on the host, whatever carries the tensors of training.
Between them a pulse (pulse.py) tells other ranks how far this one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hotbed.parallel.pulse import Pulse

T = TypeVar("T")


class World:
    """`size` ranks, of which this is `rank`. All of them make the same calls in the same order."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, pulse: Pulse | None = None) -> None:
        self.rank, self.size = rank, size
        self._group, self._pulse = group, pulse

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once, and speaks for all."""
        return self.rank == 0

    def stage(self, name: str, *, alone: bool = False) -> None:
        """What all ranks do from here on; `alone`: each for itself, and none waits for another."""
        if self._pulse is not None:
            self._pulse.enter(name, alone=alone)

    def counted(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; other ranks see how many there were."""
        for batch in batches:
            if self._pulse is not None:
                self._pulse.batches += 1
            yield batch

    def any(self, flag: bool) -> bool:
        """Whether some rank says so."""
        if self.size == 1:
            return flag
        said = torch.tensor([int(flag)], device="cpu")
        dist.all_reduce(said, group=self._group)
        return bool(said)

    def gather(self, value: T) -> list[T]:
        """What every rank says, in their order; plain values."""
        said: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(said, value, group=self._group)
        return said

    def from_first(self, value: T | None) -> T:
        """What rank 0 says."""
        said: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(said, src=0, group=self._group)
        found: T = said[0]
        return found

    def collect(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """The arrays of all ranks, which may differ in length, on rank 0; none elsewhere."""
        if self.size == 1:
            return [array]
        shapes = self.gather(array.shape)
        if self.is_first:
            return [array, *(self._received(rank, shapes[rank], array.dtype) for rank in range(1, self.size))]
        if array.size:
            dist.send(torch.from_numpy(np.ascontiguousarray(array)), 0, group=self._group)
        return []

    def _received(self, rank: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        array = np.empty(shape, dtype)
        if array.size:
            dist.recv(torch.from_numpy(array), rank, group=self._group)
        return array


ALONE = World()
