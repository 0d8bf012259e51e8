"""Who takes part in a merge, as k-step optimizers see it: a few sums of one tensor over ranks.

`hotbed.parallel.mesh.Mesh` is such a thing and knows nodes; `AllRanks` is what is used without one: all ranks of the process
group as equals, one flat all-reduce, or this process alone where there is no process group.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch.distributed as dist
from torch import Tensor

Over = Literal["all", "node"]


class Waiting(Protocol):
    """A sum under way."""

    def wait(self) -> object:
        """Return when the sum is in its tensor, or raise what went wrong."""


class Ranks(Protocol):
    """All ranks make the same calls in the same order."""

    size: int
    local: int  # ranks per node

    def apart(self) -> Ranks:
        """The same ranks with process groups of their own: sums under way must not meet other collectives."""

    def sum_(self, tensor: Tensor, over: Over = "all") -> None:
        """The sum over all ranks or over this rank's node, in place, the same bits on each."""

    def start_sum(self, tensor: Tensor, over: Over = "all") -> Waiting:
        """The same beside what follows; the tensor is left alone until it has arrived."""

    def broadcast_(self, tensor: Tensor) -> None:
        """The values of rank 0, everywhere."""


class AllRanks:
    """Every rank of the process group, on one node as far as anyone knows."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size = self.local = dist.get_world_size() if together else 1
        self._group = dist.new_group() if self.size > 1 else None

    def apart(self) -> AllRanks:
        return AllRanks()

    def sum_(self, tensor: Tensor, over: Over = "all") -> None:
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)

    def start_sum(self, tensor: Tensor, over: Over = "all") -> Waiting:
        if self.size == 1:
            return _Here()
        started: Waiting = dist.all_reduce(tensor, group=self._group, async_op=True)
        return started

    def broadcast_(self, tensor: Tensor) -> None:
        if self.size > 1:
            dist.broadcast(tensor, src=0, group=self._group)


class _Here:
    def wait(self) -> None:
        return
