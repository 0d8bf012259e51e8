"""One process group as a link: tensors in, collectives over its members out, bytes counted by the kind of wire they take.

A link wraps a `torch.distributed` group so that the same calls run on NCCL and on Gloo, and so that a benchmark can put a
slow wire in its place. Counted are the bytes this rank hands to others: exactly for an all-to-all, by the formula of a ring
for the rest (its next member takes them). Gloo has no reduce-scatter of its own: torch makes one of an all-reduce, which
moves twice the bytes. Here it is an all-to-all and a sum in the order of the members, which also fixes the order of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 gave both a new name and warns about the old one.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """What this rank has sent so far."""

    in_node: int = 0  # bytes to ranks of the same node
    across: int = 0  # bytes to ranks of other nodes
    num_collectives: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, in_node: int, across: int) -> None:
        """One more collective; sums in the background count here too."""
        with self._lock:
            self.in_node += in_node
            self.across += across
            self.num_collectives += 1


class Link:
    """The collectives of one group of ranks; all members make the same calls in the same order."""

    def __init__(self, group: Any, members: Sequence[int], local: int, traffic: Traffic) -> None:
        """`members` are ranks, `local` of them to a node; `group` is None for a single member."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.members = tuple(members)
        self.index = self.members.index(rank)
        self.size = len(self.members)
        self.traffic = traffic
        self._group = group
        self._is_across = [member // local != rank // local for member in self.members]

    def gather_text(self, text: str) -> list[str]:
        """What every member has to say, in their order."""
        said = [text] * self.size
        if self.size > 1:
            dist.all_gather_object(said, text, group=self._group)
        return said

    def all_reduce_(self, tensor: Tensor) -> None:
        """The sum over the members, in place, the same bits everywhere."""
        if self.size > 1:
            self._count_ring(2 * tensor.nbytes * (self.size - 1) // self.size)
            dist.all_reduce(tensor, group=self._group)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """This member's part [n / size] of the sum of all [n]; the size divides n."""
        if self.size == 1:
            return tensor
        part = tensor.numel() // self.size
        if self.is_gloo(tensor):
            parts = self.all_to_all(tensor, [part] * self.size, [part] * self.size).view(self.size, part)
            total = parts[0]
            for other in parts[1:]:
                total.add_(other)
            return total
        self._count_ring(tensor.nbytes * (self.size - 1) // self.size)
        total = tensor.new_empty(part)
        _reduce_scatter(total, tensor, group=self._group)
        return total

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        """The parts [n / size] of all members, in their order, into `out` [n]."""
        if self.size == 1:
            out.copy_(part)
            return
        self._count_ring(part.nbytes * (self.size - 1))
        _all_gather(out, part, group=self._group)

    def broadcast_(self, tensor: Tensor) -> None:
        """The first member's values, everywhere."""
        if self.size > 1:
            self._count_ring(tensor.nbytes if self.index < self.size - 1 else 0)
            dist.broadcast(tensor, src=self.members[0], group=self._group)

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """`send[i]` rows go to member i, in order; out come `receive[i]` rows of each member i, in order."""
        if self.size == 1:
            return rows
        bytes_per_row = rows.nbytes // max(1, rows.shape[0])
        num_rows = [0, 0]  # to the same node, to others
        for member, number in enumerate(send):
            num_rows[self._is_across[member]] += number if member != self.index else 0
        self.traffic.add(num_rows[0] * bytes_per_row, num_rows[1] * bytes_per_row)
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), list(receive), list(send), group=self._group)
        return out

    def is_gloo(self, tensor: Tensor) -> bool:
        """Whether Gloo would carry it."""
        if self.size == 1:
            return False
        backends = dict(pair.split(":") for pair in dist.get_backend_config(self._group).split(","))
        return backends[tensor.device.type] == "gloo"

    def _count_ring(self, num_bytes: int) -> None:
        if self._is_across[(self.index + 1) % self.size]:
            self.traffic.add(0, num_bytes)
        else:
            self.traffic.add(num_bytes, 0)
