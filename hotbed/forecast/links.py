"""Several ranks in; bytes that one of them sends in a step, and the seconds nothing hides, out.

Bytes are those of network.py, which agree with counted ones within 2 % where samples are shuffled. Seconds are a
projection to wires that are assumed, not measured: NVLink in a node of eight, 400 Gb/s a rank across nodes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from hotbed.data.dataset import Dataset
from hotbed.forecast.memory import Shape
from hotbed.forecast.network import Cluster, Group, dense, read_frequencies, sharded
from hotbed.forecast.step_time import NVLINK, Fabric, Work, network, sharded_time
from hotbed.train.build import Sketch

_LOCAL = 8  # ranks of a node
_NETWORK = 400  # Gb/s of a rank


class Wires(NamedTuple):
    """Of one rank and one step."""

    in_node: float  # bytes
    across: float
    seconds: float  # that nothing hides


def wires_of(dataset: Dataset, shape: Shape, found: Sketch, world: int, model: nn.Module) -> Wires:
    """Rows sharded over ranks."""
    local = min(world, _LOCAL)
    cluster = Cluster(-(-world // local), local)
    frequencies = read_frequencies(dataset)
    key_bytes = 4 if found.amounts.rows * world < 2**31 else 8
    exchanges = sharded(cluster, [Group(frequencies, shape.width, key_bytes)], shape.samples)
    weights = dense(cluster, sum(one.numel() for one in model.parameters()))
    fabric = Fabric(NVLINK, network(_NETWORK))
    time = sharded_time(cluster, fabric, Work(0.0, 0.0, 4e12), exchanges, weights)
    total = exchanges.total
    return Wires(total.in_node + weights.in_node, total.across + weights.across, time.exposed)
