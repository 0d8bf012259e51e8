"""How fast ranks send to each other: every pair of ranks alone, and an exchange of all of them in one hop and in two.

All ranks call `measure_links` together, and get the figures of all. One pair at a time sends, so the rate of a pair is that
of an idle network. An exchange between all ranks is slower: they share their cards and cores. Hence it is timed too.
"""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from hotbed.parallel.collect import exchange, exchange_flat
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.world import World

_MESSAGE = {"cpu": 1 << 20, "cuda": 1 << 25}  # bytes: long enough for the rate to count, not the start
_ROUNDS = 5
_ROW = 64  # float32 of a row of the exchange


class HopTimes(NamedTuple):
    """Seconds of one all-to-all between all ranks; the slowest rank's median."""

    num_bytes: int  # that each rank sends
    one: float
    two: float


class LinkFigures(NamedTuple):
    """What was measured."""

    rates: list[list[float | None]]  # [from][to] bytes per second; None: a rank and itself
    hops: HopTimes | None  # None: the mesh has one axis, and there is one way


def measure_links(mesh: Mesh, world: World, device: torch.device) -> LinkFigures:
    """Rates between all pairs of ranks, and times of both ways to exchange; a collective."""
    message = torch.zeros(_MESSAGE[device.type], dtype=torch.uint8, device=device)
    row: list[float | None] = [None] * world.size
    for source in range(world.size):
        for target in range(world.size):
            if source != target:
                world.any(False)  # one pair at a time
                if world.rank == source:
                    row[target] = _send(message, target)
                elif world.rank == target:
                    _receive(message, source)
    return LinkFigures(world.gather(row), _time_hops(mesh, world, device) if mesh.nodes > 1 < mesh.local else None)


def _send(message: torch.Tensor, target: int) -> float:
    """Bytes per second; the first message opens the connection."""
    answer, seconds = message[:1].clone(), []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        dist.send(message, target)
        dist.recv(answer, target)
        answer.item()  # on CUDA nothing has arrived before
        seconds.append(time.perf_counter() - began)
    return message.nbytes / min(seconds[1:])


def _receive(message: torch.Tensor, source: int) -> None:
    for _ in range(_ROUNDS):
        dist.recv(message, source)
        dist.send(message[:1].clone(), source)


def _time_hops(mesh: Mesh, world: World, device: torch.device) -> HopTimes:
    """Equal parts to all ranks, as rows have that a hash spreads."""
    each = max(1, _MESSAGE[device.type] // (4 * _ROW * world.size))
    rows = torch.zeros(each * world.size, _ROW, dtype=torch.float32, device=device)
    counts, found = [each] * world.size, []
    for way in (exchange_flat, exchange):
        seconds = []
        for _ in range(_ROUNDS):
            world.any(False)
            began = time.perf_counter()
            way(mesh, rows, counts).rows[-1, -1].item()
            seconds.append(time.perf_counter() - began)
        found.append(max(world.gather(median(seconds[1:]))))
    return HopTimes(rows.nbytes, *found)
