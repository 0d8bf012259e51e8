"""Rows of every rank to all ranks: [n_r, ...] on rank r in, all of them in the order of the ranks out, the same on each.

Ranks may have different numbers of rows, known to all; each sends as many as the one with most. With several nodes and
several ranks per node, rows cross between nodes once, to the rank with the same local rank, and go round in the node then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotbed.parallel.links import Link
from hotbed.parallel.mesh import Mesh


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
