"""All-to-all of rows over a mesh: rows sorted by the rank they go to in, rows sorted by the rank they come from out.

`exchange_flat` sends every row straight to its rank: W - 1 messages per rank, most of them across nodes. `exchange` takes two
hops: in the node to the local rank of the target, then across nodes to the peer with that same local rank. A rank then talks
to local - 1 + nodes - 1 others, and what goes to one node goes as one message; the price is that nearly every row moves
once more inside the node. Both give the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.errors import ShapeError
from hotbed.parallel.links import Link
from hotbed.parallel.mesh import Mesh


class Received(NamedTuple):
    """Rows from all ranks."""

    rows: Tensor  # [sum of counts, ...], by source rank, in the order each source gave them
    counts: list[int]  # [W] rows of each source rank


def exchange(mesh: Mesh, rows: Tensor, counts: Sequence[int]) -> Received:
    """Send `counts[r]` rows to each rank r, in order; two hops where the mesh has two axes."""
    _check_counts(mesh, rows, counts)
    if mesh.nodes == 1 or mesh.local == 1:
        return exchange_flat(mesh, rows, counts)
    # counts_NL: rows to node n, local rank l
    counts_NL = torch.tensor(counts).view(mesh.nodes, mesh.local)
    by_local = _reordered(rows, counts_NL)  # now by local rank of the target, then by its node
    counts_LN = swapped_counts(mesh.in_node, counts_NL.t().contiguous(), rows.device)  # source local rank x target node
    held = mesh.in_node.all_to_all(by_local, counts_NL.sum(0).tolist(), counts_LN.sum(1).tolist())
    by_node = _reordered(held, counts_LN)  # by node of the target, then by source local rank
    counts_SN = swapped_counts(mesh.across, counts_LN.t().contiguous(), rows.device)  # source node x source local rank
    received = mesh.across.all_to_all(by_node, counts_LN.sum(0).tolist(), counts_SN.sum(1).tolist())
    return Received(received, counts_SN.view(-1).tolist())


def exchange_along(mesh: Mesh, rows: Tensor, counts: Sequence[int], receive: Sequence[int]) -> Tensor:
    """As `exchange`, where it is known how many rows come from each rank."""
    if mesh.nodes == 1 or mesh.local == 1:
        return mesh.flat.all_to_all(rows, counts, receive)
    return exchange(mesh, rows, counts).rows


def exchange_flat(mesh: Mesh, rows: Tensor, counts: Sequence[int]) -> Received:
    """Send `counts[r]` rows to each rank r, in order, in one hop."""
    _check_counts(mesh, rows, counts)
    receive = swapped_counts(mesh.flat, torch.tensor(counts).view(-1, 1), rows.device).view(-1).tolist()
    return Received(mesh.flat.all_to_all(rows, list(counts), receive), receive)


def swapped_counts(link: Link, counts: Tensor, device: torch.device) -> Tensor:
    """Row i of `counts` [size, n] goes to member i; back on the host come the rows of all members."""
    ones = [1] * link.size
    return link.all_to_all(counts.to(device), ones, ones).cpu()


def _reordered(rows: Tensor, counts: Tensor) -> Tensor:
    """Blocks of rows sorted by (first axis, second axis) of `counts` -> sorted by (second, first)."""
    pieces = torch.split(rows, counts.view(-1).tolist())
    first, second = counts.shape
    return torch.cat([pieces[i * second + j] for j in range(second) for i in range(first)])


def _check_counts(mesh: Mesh, rows: Tensor, counts: Sequence[int]) -> None:
    if len(counts) != mesh.size or sum(counts) != rows.shape[0]:
        raise ShapeError(
            f"counts must name every one of {mesh.size} ranks and add up to the {rows.shape[0]} rows; given: "
            f"{len(counts)} counts that add up to {sum(counts)}"
        )
