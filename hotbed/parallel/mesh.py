"""All ranks as a mesh of nodes and local ranks: rank = node * local + local rank.

`Mesh.from_environment()` reads the environment of torchrun, `Mesh(nodes=2, local=4)` sets it by hand. A mesh has three links:
`flat` over all ranks, `in_node` over the ranks of this node, `across` over the ranks with this local rank on every node. It
also has sums that send little between nodes. Building a mesh is a collective: all ranks build it, in the same order among
other groups. A mesh serves one thread at a time; `apart()` makes another over the same ranks.

`Link`: the collectives of one process group, with bytes counted by the kind of wire. A link wraps a `torch.distributed` group
so that the same calls run on NCCL and on Gloo, and so that a benchmark can simulate a slow wire. It counts the bytes that this
rank sends to others: exactly for an all-to-all, by the formula of a ring for the rest (to the next member). Gloo has no
reduce-scatter of its own: torch uses an all-reduce, which moves twice the bytes. Here it is an all-to-all and a sum in the
order of the members, which also fixes the order of the sum.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotbed.errors import ConfigError
from hotbed.optim.kstep.merge import Over, PendingSum

# torch 2.13 gave both a new name and warns about the old one.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class TrafficCounter:
    """Bytes that this rank has sent so far."""

    in_node: int = 0  # bytes to ranks of the same node
    across: int = 0  # bytes to ranks of other nodes
    num_collectives: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, in_node: int, across: int) -> None:
        """Count a collective; sums in the background are counted too."""
        with self._lock:
            self.in_node += in_node
            self.across += across
            self.num_collectives += 1


class Link:
    """The collectives of one group of ranks; all members make the same calls in the same order."""

    def __init__(self, group: Any, members: Sequence[int], local: int, traffic: TrafficCounter) -> None:
        """`members` are ranks, `local` of them to a node; `group` is None for a single member."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.members = tuple(members)
        self.index = self.members.index(rank)
        self.size = len(self.members)
        self.traffic = traffic
        self._group = group
        self._is_across = [member // local != rank // local for member in self.members]

    def gather_text(self, text: str) -> list[str]:
        """The text of every member, in their order."""
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
        """Whether its backend is Gloo."""
        if self.size == 1:
            return False
        backends = dict(pair.split(":") for pair in dist.get_backend_config(self._group).split(","))
        return backends[tensor.device.type] == "gloo"

    def _count_ring(self, num_bytes: int) -> None:
        if self._is_across[(self.index + 1) % self.size]:
            self.traffic.add(0, num_bytes)
        else:
            self.traffic.add(num_bytes, 0)


MakeLink = Callable[[Any, Sequence[int], int, TrafficCounter], Link]


class Mesh:
    """`nodes` x `local` ranks, and this rank's place among them."""

    def __init__(self, nodes: int, local: int, *, timeout: timedelta | None = None, make_link: MakeLink = Link) -> None:
        """`timeout` is that of the new process groups; torch's own when None."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        _check_sizes(nodes, local, world)
        self.nodes, self.local, self.size = nodes, local, world
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.node, self.local_rank = divmod(self.rank, local)
        self.traffic = TrafficCounter()
        self.timeout, self._make_link = timeout, make_link
        self.flat = self._link([range(world)])
        rows = [range(node * local, (node + 1) * local) for node in range(nodes)]
        columns = [range(place, world, local) for place in range(local)]
        self.in_node = self.flat if nodes == 1 else self._link(rows)
        self.across = self.flat if local == 1 else self._link(columns)

    @classmethod
    def from_environment(cls, *, timeout: timedelta | None = None) -> Mesh:
        """As torchrun started these ranks; all on one node without its environment."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if world > 1 else 1
        if world > 1:
            _check_environment(local, world)
        return cls(nodes=world // local, local=local, timeout=timeout)

    def apart(self) -> Mesh:
        """The same ranks with groups of their own, for another thread; a collective. Bytes are counted together."""
        mesh = Mesh(self.nodes, self.local, timeout=self.timeout, make_link=self._make_link)
        for link in (mesh, mesh.flat, mesh.in_node, mesh.across):
            link.traffic = self.traffic
        return mesh

    def sum_(self, tensor: Tensor, over: Over = "all") -> None:
        """The sum of a contiguous tensor in place, over all ranks or over this node; the same bits on each of them.

        With several nodes and several ranks per node, what crosses between nodes does so once per node and not once per
        rank: the sum is scattered in the node, added across nodes by the ranks with the same local rank, and gathered.
        """
        if over == "node":
            self.in_node.all_reduce_(tensor)
        elif self.nodes == 1 or self.local == 1:
            self.flat.all_reduce_(tensor)
        else:
            self._sum_in_parts_(tensor.view(-1))

    def _sum_in_parts_(self, flat: Tensor) -> None:
        size = -(-flat.numel() // self.local) * self.local  # every local rank has an equal part
        whole = flat if flat.numel() == size else flat.new_zeros(size)
        if whole is not flat:
            whole[: flat.numel()].copy_(flat)
        part = self.in_node.reduce_scatter(whole)
        self.across.all_reduce_(part)
        self.in_node.all_gather(part, whole)
        if whole is not flat:
            flat.copy_(whole[: flat.numel()])

    def start_sum(self, tensor: Tensor, over: Over = "all") -> PendingSum:
        """`sum_` in the background; do not use the tensor or this mesh until `wait` has returned."""
        if tensor.device.type == "cuda":
            return _StreamedWork(lambda: self.sum_(tensor, over), tensor, self.flat.is_gloo(tensor))
        return _ThreadedWork(lambda: self.sum_(tensor, over))

    def broadcast_(self, tensor: Tensor) -> None:
        """The values of rank 0, everywhere."""
        self.flat.broadcast_(tensor)

    def _link(self, groups: Sequence[range]) -> Link:
        """The link of the group that has this rank; all ranks make all groups, as torch requires."""
        mine = next(members for members in groups if self.rank in members)
        made = {}
        if len(mine) > 1:
            made = {members: dist.new_group(list(members), timeout=self.timeout) for members in groups}
        return self._make_link(made.get(mine), mine, self.local, self.traffic)

    def __repr__(self) -> str:
        return (
            f"Mesh(nodes={self.nodes}, local={self.local}), rank {self.rank}: node {self.node}, local {self.local_rank}"
        )


class _ThreadedWork:
    """Runs in a thread of its own; Gloo waits without the GIL."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hotbed-sum", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as failure:  # raised again in the thread that waits
            self._failure = failure

    def wait(self) -> None:
        self._thread.join()
        if self._failure is not None:
            raise self._failure


class _StreamedWork:
    """Runs on a stream of its own. NCCL only enqueues work on the host; Gloo needs a thread too."""

    def __init__(self, work: Callable[[], None], tensor: Tensor, is_gloo: bool) -> None:
        self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        self._work, self._tensor = work, tensor
        self._thread = _ThreadedWork(self._run) if is_gloo else None
        if self._thread is None:
            self._run()

    def _run(self) -> None:
        with torch.cuda.stream(self._stream):
            self._work()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.wait()
        torch.cuda.current_stream(self._tensor.device).wait_stream(self._stream)


def _check_sizes(nodes: int, local: int, world: int) -> None:
    if nodes < 1 or local < 1:
        raise ConfigError(f"a mesh has at least one node and one rank per node; given: nodes={nodes}, local={local}")
    if nodes * local == world:
        return
    given = f"Mesh(nodes={nodes}, local={local}) has {nodes * local} ranks"
    if not dist.is_initialized():
        raise ConfigError(
            f"{given}, but this process is alone: start it with torchrun and call torch.distributed.init_process_group "
            "first, or use nodes=1, local=1"
        )
    fitting = ", ".join(f"{n} x {world // n}" for n in range(1, world + 1) if world % n == 0)
    raise ConfigError(f"{given}, but the process group has {world}; nodes x local may be {fitting}")


def _check_environment(local: int, world: int) -> None:
    """A mesh has equal rows, filled in order: raise on every rank if one is elsewhere, before any group is made."""
    rank = dist.get_rank()
    node, place = int(os.environ.get("GROUP_RANK", rank // local)), int(os.environ.get("LOCAL_RANK", rank % local))
    found: list[Any] = [None] * world
    dist.all_gather_object(found, (local, node, place))
    if len({size for size, _, _ in found}) > 1 or world % local:
        raise ConfigError(
            f"all nodes must run the same number of ranks, and it must divide the {world} ranks; LOCAL_WORLD_SIZE of each "
            f"rank: {[size for size, _, _ in found]}. Give torchrun the same --nproc-per-node everywhere"
        )
    wrong = [r for r, (_, node, place) in enumerate(found) if (node, place) != divmod(r, local)]
    if wrong:
        _, node, place = found[wrong[0]]
        raise ConfigError(
            f"rank {wrong[0]} of {world} with {local} ranks per node is node {wrong[0] // local}, local rank "
            f"{wrong[0] % local}, but its environment says GROUP_RANK={node}, LOCAL_RANK={place}; start the ranks with "
            "torchrun, or set the mesh by hand: Mesh(nodes=..., local=...)"
        )
