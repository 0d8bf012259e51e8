"""How fast the wires are: the time of an exchange and of a gather over a mesh, as a line: so much a call, so much a byte.

Measured with two sizes on the mesh that is to be used, so that topology, backend and the way rows take are all in it. Every
rank gets the numbers of the slowest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.parallel.collect import carry, passages
from hotbed.parallel.gather import gather, gather_numbers
from hotbed.parallel.mesh import Mesh

_SMALL, _LARGE = 1 << 10, 1 << 20  # bytes that a rank has for all others together
_ROW = 64  # bytes
_TIMES = 5


class Speed(NamedTuple):
    """Of one kind of collective."""

    call: float  # seconds
    byte: float  # seconds, for each that a rank sends

    def seconds(self, num_bytes: float) -> float:
        """Of one call in which a rank sends so many bytes."""
        return self.call + self.byte * num_bytes


class Speeds(NamedTuple):
    """Of the two kinds that rows take."""

    exchange: Speed
    gather: Speed


def measured(mesh: Mesh, device: torch.device) -> Speeds:
    """The same on all ranks; a collective. Takes some milliseconds."""
    world = mesh.size

    sizes = (_SMALL, _LARGE)
    counts = torch.tensor([[size // _ROW // world for size in sizes]], device="cpu").expand(world, -1)
    passage_of = dict(zip(sizes, passages(mesh, counts.contiguous(), device)))

    def exchanged(rows: Tensor) -> None:
        passage = passage_of[rows.nbytes]
        carry(mesh, rows[: passage.num_sent], passage)

    def gathered(rows: Tensor) -> None:
        part = rows[: rows.shape[0] // world]
        gather(mesh, part, [part.shape[0]] * world)

    times = [_time(run, size, device) for run in (exchanged, gathered) for size in sizes]
    worst = gather_numbers(mesh, times, device).max(0).values.tolist()
    return Speeds(_line(worst[0], worst[1], world), _line(worst[2], worst[3], world))


def _time(run: Callable[[Tensor], None], num_bytes: int, device: torch.device) -> float:
    """Median seconds."""
    rows = torch.zeros(num_bytes // _ROW, _ROW // 4, device=device, dtype=torch.float32)
    found = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        run(rows)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def _line(small: float, large: float, world: int) -> Speed:
    """Through two measurements; a rank keeps its own share of the bytes."""
    sent = (world - 1) / world
    byte = max(0.0, large - small) / ((_LARGE - _SMALL) * sent) if world > 1 else 0.0
    return Speed(max(0.0, small - byte * _SMALL * sent), byte)
