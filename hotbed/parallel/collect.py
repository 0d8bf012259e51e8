"""All-to-all of rows over a mesh: rows sorted by the rank they go to in, rows sorted by the rank they come from out.

`exchange_flat` sends every row straight to its rank: W - 1 messages per rank, most of them across nodes. `exchange` takes two
hops: in the node to the local rank of the target, then across nodes to the peer with that same local rank. A rank then talks
to local - 1 + nodes - 1 others, and what goes to one node goes as one message; the price is that nearly every row moves
once more inside the node. Both give the same rows in the same order. How much comes is told once, in a passage: rows then
travel along it in both directions, as often as needed.

`gather`: rows of every rank to all ranks: [n_r, ...] on rank r in, all of them in the order of the ranks out, the same on each.

Ranks may have different numbers of rows, known to all; each sends as many as the one with most. With several nodes and
several ranks per node, rows cross between nodes once, to the rank with the same local rank, and go round in the node then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.errors import ShapeError
from hotbed.parallel.mesh import Link, Mesh


class RowRouting(NamedTuple):
    """How many rows go from this rank to each, and what that means for those who carry them; good for both directions."""

    send: list[int]  # [W] rows to each rank
    receive: list[int]  # [W] rows from each rank
    held: Tensor | None = None  # int64 [L, N], with two hops: rows of each local rank of this node for each node

    @property
    def num_sent(self) -> int:
        return sum(self.send)

    @property
    def num_received(self) -> int:
        return sum(self.receive)


class ReceivedRows(NamedTuple):
    """Rows from all ranks."""

    rows: Tensor  # [sum of counts, ...], by source rank, in the order each source gave them
    counts: list[int]  # [W] rows of each source rank


def passages(mesh: Mesh, counts: Tensor, device: torch.device) -> list[RowRouting]:
    """Tell all ranks how many rows come: one passage for each column of `counts` [W, n]. Two hops where there are two axes."""
    numbers = range(counts.shape[1])
    if mesh.nodes == 1 or mesh.local == 1:
        received = swapped_counts(mesh.flat, counts, device)
        return [RowRouting(counts[:, i].tolist(), received[:, i].tolist()) for i in numbers]
    N, L = mesh.nodes, mesh.local
    to_local = counts.view(N, L, -1).transpose(0, 1).reshape(L, -1)
    held_LN = swapped_counts(mesh.in_node, to_local, device).view(L, N, -1)  # source local rank x target node
    to_node = held_LN.transpose(0, 1).reshape(N, -1)
    received = swapped_counts(mesh.across, to_node, device).view(N * L, -1)
    return [RowRouting(counts[:, i].tolist(), received[:, i].tolist(), held_LN[:, :, i]) for i in numbers]


def carry(mesh: Mesh, rows: Tensor, passage: RowRouting) -> Tensor:
    """Rows by target rank -> rows by source rank."""
    if passage.held is None:
        return mesh.flat.all_to_all(rows, passage.send, passage.receive)
    held_LN, (send_NL, receive_NL) = passage.held, _axes(mesh, passage)
    by_local = _reordered(rows, send_NL)  # by local rank of the target, then by its node
    held = mesh.in_node.all_to_all(by_local, send_NL.sum(0).tolist(), held_LN.sum(1).tolist())
    by_node = _reordered(held, held_LN)  # by node of the target, then by source local rank
    return mesh.across.all_to_all(by_node, held_LN.sum(0).tolist(), receive_NL.sum(1).tolist())


def carry_back(mesh: Mesh, rows: Tensor, passage: RowRouting) -> Tensor:
    """Rows as `carry` gave them out -> as it took them in: the same hops backwards."""
    if passage.held is None:
        return mesh.flat.all_to_all(rows, passage.receive, passage.send)
    held_LN, (send_NL, receive_NL) = passage.held, _axes(mesh, passage)
    by_node = mesh.across.all_to_all(rows, receive_NL.sum(1).tolist(), held_LN.sum(0).tolist())
    held = _reordered(by_node, held_LN.t())
    by_local = mesh.in_node.all_to_all(held, held_LN.sum(1).tolist(), send_NL.sum(0).tolist())
    return _reordered(by_local, send_NL.t())


def exchange(mesh: Mesh, rows: Tensor, counts: Sequence[int]) -> ReceivedRows:
    """Send `counts[r]` rows to each rank r, in order; two hops where the mesh has two axes."""
    _check_counts(mesh, rows, counts)
    (passage,) = passages(mesh, torch.tensor(counts, device="cpu").view(-1, 1), rows.device)
    return ReceivedRows(carry(mesh, rows, passage), passage.receive)


def exchange_flat(mesh: Mesh, rows: Tensor, counts: Sequence[int]) -> ReceivedRows:
    """Send `counts[r]` rows to each rank r, in order, in one hop."""
    _check_counts(mesh, rows, counts)
    receive = swapped_counts(mesh.flat, torch.tensor(counts, device="cpu").view(-1, 1), rows.device).view(-1).tolist()
    return ReceivedRows(mesh.flat.all_to_all(rows, list(counts), receive), receive)


def swapped_counts(link: Link, counts: Tensor, device: torch.device) -> Tensor:
    """Row i of `counts` [size, n] goes to member i; back on the host come the rows of all members."""
    ones = [1] * link.size
    return link.all_to_all(counts.to(device), ones, ones).cpu()


def _reordered(rows: Tensor, counts: Tensor) -> Tensor:
    """Blocks of rows sorted by (first axis, second axis) of `counts` -> sorted by (second, first)."""
    pieces = torch.split(rows, counts.reshape(-1).tolist())
    first, second = counts.shape
    return torch.cat([pieces[i * second + j] for j in range(second) for i in range(first)])


def _axes(mesh: Mesh, passage: RowRouting) -> tuple[Tensor, Tensor]:
    """What is sent and received, [N, L] each."""
    sent, received = (
        torch.tensor(counts, device="cpu").view(mesh.nodes, mesh.local) for counts in (passage.send, passage.receive)
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
    """Some numbers of every rank, [W, n] on the host; whole ones as int64, others as float64."""
    is_whole = all(isinstance(number, int) for number in numbers)
    mine = torch.tensor([numbers], dtype=torch.int64 if is_whole else torch.float64, device="cpu")
    return gather(mesh, mine.to(device), [1] * mesh.size).cpu()


def _gathered(link: Link, part: Tensor) -> Tensor:
    """[n, ...] of each member -> [size, n, ...]; as bytes, which every backend can carry."""
    out = part.new_empty((link.size, *part.shape))
    link.all_gather(part.contiguous().view(-1).view(torch.uint8), out.view(-1).view(torch.uint8))
    return out
