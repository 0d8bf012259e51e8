"""All-to-all of rows over a mesh: rows sorted by target rank -> rows sorted by source rank.

`exchange_flat` sends every row straight to its rank: W - 1 messages per rank, most of them across nodes. `exchange` takes two
hops: in the node to the local rank of the target, then across nodes to the peer with the same local rank. A rank then talks to
local - 1 + nodes - 1 others, and rows for one node travel as one message; the price is that nearly every row moves once more
inside the node. Both give the same rows in the same order. The numbers of rows are exchanged once, as a RowRouting; rows then
travel along it in both directions, as often as needed.

`merge_in_node`: rows that several ranks of a node request of the same owner cross to the node once. The rank between the two
hops requests them for all, hands each to who wants it, and adds what goes to the owner in the order of the local ranks.

`gather`: [n_r, ...] on every rank r -> the rows of all ranks in their order, the same on each. Ranks may have different
numbers of rows, known to all; each sends as many as the one with most. With several nodes and several ranks per node, rows
cross between nodes once, to the rank with the same local rank, and are then gathered in the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.errors import ShapeError
from hotbed.ops.partition import partition_by_owner
from hotbed.parallel.mesh import Link, Mesh


class RowRouting(NamedTuple):
    """How many rows go from this rank to each, with the counts of the two hops; valid for both directions."""

    send: list[int]  # [W] rows to each rank
    receive: list[int]  # [W] rows from each rank
    held: Tensor | None = None  # int64 [L, N], with two hops: rows of each local rank of this node for each node
    merged: NodeMerge | None = None  # with two hops: rows that cross once, whoever wants them

    @property
    def num_sent(self) -> int:
        return sum(self.send)

    @property
    def num_received(self) -> int:
        return sum(self.receive if self.merged is None else self.merged.receive)


class NodeMerge(NamedTuple):
    """Rows that the ranks of this node request by way of this rank, each once."""

    places: Tensor  # int64, of every held row: its place among the merged ones
    counts: list[int]  # [L] held rows of each local rank
    send: list[int]  # [N] merged rows to each node
    receive: list[int]  # [N] merged rows from each node

    def sums(self, held: Tensor) -> Tensor:
        """Held rows [H, ...] -> merged rows, added in the order of the local ranks, each of which has a row once."""
        exact = torch.promote_types(held.dtype, torch.float32)
        total = held.new_zeros((sum(self.send), *held.shape[1:]), dtype=exact)
        for places, rows in zip(torch.split(self.places, self.counts), torch.split(held, self.counts)):
            total.index_add_(0, places, rows.to(exact))
        return total.to(held.dtype)


class ReceivedRows(NamedTuple):
    """Rows from all ranks."""

    rows: Tensor  # [sum of counts, ...], by source rank, in the order each source gave them
    counts: list[int]  # [W] rows of each source rank


def make_routings(mesh: Mesh, counts: Tensor, device: torch.device) -> list[RowRouting]:
    """Announce numbers of rows to all ranks: one routing for each column of `counts` [W, n]. Two hops on two axes."""
    numbers = range(counts.shape[1])
    if mesh.nodes == 1 or mesh.local == 1:
        received = swap_counts(mesh.flat, counts, device)
        return [RowRouting(counts[:, i].tolist(), received[:, i].tolist()) for i in numbers]
    N, L = mesh.nodes, mesh.local
    to_local = counts.view(N, L, -1).transpose(0, 1).reshape(L, -1)
    held_LN = swap_counts(mesh.in_node, to_local, device).view(L, N, -1)  # source local rank x target node
    to_node = held_LN.transpose(0, 1).reshape(N, -1)
    received = swap_counts(mesh.across, to_node, device).view(N * L, -1)
    return [RowRouting(counts[:, i].tolist(), received[:, i].tolist(), held_LN[:, :, i]) for i in numbers]


def carry(mesh: Mesh, rows: Tensor, routing: RowRouting) -> Tensor:
    """Rows by target rank -> rows by source rank."""
    if routing.held is None:
        return mesh.flat.all_to_all(rows, routing.send, routing.receive)
    held_LN, held = routing.held, _first_hop(mesh, rows, routing)
    if routing.merged is not None:
        return mesh.across.all_to_all(routing.merged.sums(held), routing.merged.send, routing.merged.receive)
    _, receive_NL = _axes(mesh, routing)
    by_node = _reordered(held, held_LN)  # by node of the target, then by source local rank
    return mesh.across.all_to_all(by_node, held_LN.sum(0).tolist(), receive_NL.sum(1).tolist())


def _first_hop(mesh: Mesh, rows: Tensor, routing: RowRouting) -> Tensor:
    """Rows by target rank -> rows of this node's ranks, by source local rank, then by node of the target."""
    assert routing.held is not None, "two hops"
    send_NL, _ = _axes(mesh, routing)
    by_local = _reordered(rows, send_NL)  # by local rank of the target, then by its node
    return mesh.in_node.all_to_all(by_local, send_NL.sum(0).tolist(), routing.held.sum(1).tolist())


def merge_in_node(mesh: Mesh, keys: Tensor, routing: RowRouting, num_keys: int) -> tuple[RowRouting, Tensor]:
    """(the routing with rows merged, keys at their owners by requesting node); keys are below `num_keys`. A collective."""
    assert routing.held is not None, "two hops"
    held = _first_hop(mesh, keys, routing)
    nodes = torch.arange(mesh.nodes, device="cpu").repeat(mesh.local)
    nodes = torch.repeat_interleave(nodes, routing.held.reshape(-1)).to(held.device)
    names = held.to(torch.int64) + nodes * num_keys
    found = partition_by_owner(names, None, lambda keys, _: keys // num_keys, mesh.nodes)
    receive = swap_counts(mesh.across, torch.tensor(found.counts, device="cpu").view(-1, 1), held.device).view(-1)
    merged = NodeMerge(found.places, routing.held.sum(1).tolist(), found.counts, receive.tolist())
    crossed = mesh.across.all_to_all((found.keys % num_keys).to(keys.dtype), merged.send, merged.receive)
    return routing._replace(merged=merged), crossed


def carry_back(mesh: Mesh, rows: Tensor, routing: RowRouting) -> Tensor:
    """The inverse of `carry`: the same hops backwards."""
    if routing.held is None:
        return mesh.flat.all_to_all(rows, routing.receive, routing.send)
    held_LN, (send_NL, receive_NL) = routing.held, _axes(mesh, routing)
    if routing.merged is not None:
        held = mesh.across.all_to_all(rows, routing.merged.receive, routing.merged.send)[routing.merged.places]
    else:
        by_node = mesh.across.all_to_all(rows, receive_NL.sum(1).tolist(), held_LN.sum(0).tolist())
        held = _reordered(by_node, held_LN.t())
    by_local = mesh.in_node.all_to_all(held, held_LN.sum(1).tolist(), send_NL.sum(0).tolist())
    return _reordered(by_local, send_NL.t())


def exchange(mesh: Mesh, rows: Tensor, counts: Sequence[int]) -> ReceivedRows:
    """Send `counts[r]` rows to each rank r, in order; two hops if the mesh has two axes."""
    _check_counts(mesh, rows, counts)
    (routing,) = make_routings(mesh, torch.tensor(counts, device="cpu").view(-1, 1), rows.device)
    return ReceivedRows(carry(mesh, rows, routing), routing.receive)


def exchange_flat(mesh: Mesh, rows: Tensor, counts: Sequence[int]) -> ReceivedRows:
    """Send `counts[r]` rows to each rank r, in order, in one hop."""
    _check_counts(mesh, rows, counts)
    receive = swap_counts(mesh.flat, torch.tensor(counts, device="cpu").view(-1, 1), rows.device).view(-1).tolist()
    return ReceivedRows(mesh.flat.all_to_all(rows, list(counts), receive), receive)


def swap_counts(link: Link, counts: Tensor, device: torch.device) -> Tensor:
    """Row i of `counts` [size, n] goes to member i; returns the rows of all members, on the host."""
    ones = [1] * link.size
    return link.all_to_all(counts.to(device), ones, ones).cpu()


def _reordered(rows: Tensor, counts: Tensor) -> Tensor:
    """Blocks of rows sorted by (first axis, second axis) of `counts` -> sorted by (second, first)."""
    pieces = torch.split(rows, counts.reshape(-1).tolist())
    first, second = counts.shape
    return torch.cat([pieces[i * second + j] for j in range(second) for i in range(first)])


def _axes(mesh: Mesh, routing: RowRouting) -> tuple[Tensor, Tensor]:
    """Numbers of rows sent and received, [N, L] each."""
    sent, received = (
        torch.tensor(counts, device="cpu").view(mesh.nodes, mesh.local) for counts in (routing.send, routing.receive)
    )
    return sent, received


def _check_counts(mesh: Mesh, rows: Tensor, counts: Sequence[int]) -> None:
    if len(counts) != mesh.size or sum(counts) != rows.shape[0]:
        raise ShapeError(
            f"counts must name every one of {mesh.size} ranks and add up to the {rows.shape[0]} rows; given: "
            f"{len(counts)} counts that add up to {sum(counts)}"
        )


def gather(mesh: Mesh, rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Rows [sum of sizes, ...] of all ranks; `sizes[r]` come from rank r."""
    most = max(sizes)
    if mesh.size == 1 or most == 0:
        return rows
    part = rows
    if rows.shape[0] < most:
        part = rows.new_zeros(most, *rows.shape[1:])
        part[: rows.shape[0]] = rows
    if mesh.nodes == 1 or mesh.local == 1:
        all_rows = _gathered(mesh.flat, part).view(mesh.size, *part.shape)
    else:
        by_place = _gathered(mesh.in_node, _gathered(mesh.across, part)).view(mesh.local, mesh.nodes, *part.shape)
        all_rows = by_place.transpose(0, 1).reshape(mesh.size, *part.shape)
    if min(sizes) == most:
        return all_rows.reshape(-1, *rows.shape[1:])
    return torch.cat([all_rows[rank, :size] for rank, size in enumerate(sizes)])


def gather_numbers(mesh: Mesh, numbers: Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """Some numbers of every rank, [W, n] on the host; integers as int64, others as float64."""
    is_whole = all(isinstance(number, int) for number in numbers)
    mine = torch.tensor([numbers], dtype=torch.int64 if is_whole else torch.float64, device="cpu")
    return gather(mesh, mine.to(device), [1] * mesh.size).cpu()


def _gathered(link: Link, part: Tensor) -> Tensor:
    """[n, ...] of each member -> [size, n, ...]; as bytes, which every backend supports."""
    out = part.new_empty((link.size, *part.shape))
    link.all_gather(part.contiguous().view(-1).view(torch.uint8), out.view(-1).view(torch.uint8))
    return out
