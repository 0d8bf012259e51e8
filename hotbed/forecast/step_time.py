"""Bytes of a step and the speed of wires in, seconds of a step out: a projection to clusters nobody has measured here.

Every collective takes a start, a little for each partner, and its bytes over the speed that one rank reaches. What a step
waits for follows the exact order of training: a row cannot be sent before the last step's gradients have reached it, so
rows and gradients stand between the steps and hide behind nothing. Keys are settled ahead and dense sums travel beside the
computation. `floor` is the step if everything travelled beside it: no order of events can be faster on these wires.

`Wires`: several ranks in; bytes that one of them sends in a step, and the seconds nothing hides, out.

Bytes are those of network.py, which agree with counted ones within 2 % where samples are shuffled. Seconds are a
projection to wires that are assumed, not measured: NVLink in a node of eight, 400 Gb/s a rank across nodes.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

from torch import nn

from hotbed.data.dataset import Dataset
from hotbed.forecast.memory import Shape
from hotbed.forecast.network import Cluster, Exchanges, Group, SentBytes, dense, read_frequencies, sharded
from hotbed.train.build import Sketch

_LOCAL = 8  # ranks of a node
_NETWORK = 400  # Gb/s of a rank
REACHED = 0.8  # of the speed on the label
BESIDE = 0.5  # of the computation: what keys and dense sums may take without being noticed
PASSES = 6  # over rows and gradients in device memory, to pack and unpack what travels


class Wire(NamedTuple):
    """One rank's way to others, when all ranks send."""

    speed: float  # bytes per second, one way
    start: float  # seconds before a collective moves anything
    message: float  # seconds for each partner


class Fabric(NamedTuple):
    """Both kinds of wire."""

    in_node: Wire
    across: Wire


NVLINK = Wire(REACHED * 450e9, 15e-6, 1e-6)  # NVLink 4: 900 GB/s a GPU, both ways together


def network(gigabits: float, ranks: int = 1) -> Wire:
    """A network card of so many Gb/s that serves so many ranks."""
    return Wire(REACHED * gigabits * 1e9 / 8 / ranks, 20e-6, 2e-6)


class Work(NamedTuple):
    """What one rank does in a step besides sending."""

    compute: float  # seconds of a whole training step whose rows are all its own
    deal: float  # seconds to find the distinct keys of its batch
    copy_speed: float  # of device memory: bytes read and written per second


class StepTime(NamedTuple):
    """Seconds of one step."""

    compute: float  # with finding distinct keys, packing and unpacking
    exposed: float  # exchanges that nothing hides
    beside: float  # exchanges that travel beside the computation

    @property
    def step(self) -> float:
        """With as much hidden as exact training allows."""
        return self.compute + self.exposed + max(0.0, self.beside - BESIDE * self.compute)

    @property
    def floor(self) -> float:
        """With everything hidden."""
        return max(self.compute, self.exposed + self.beside)


def sharded_time(cluster: Cluster, fabric: Fabric, work: Work, sent: Exchanges, dense: SentBytes) -> StepTime:
    """Of a step whose rows come from their owners."""
    if cluster.size == 1:
        return StepTime(work.compute, 0.0, 0.0)
    packed = PASSES * max(sent.rows.in_node, sent.rows.across)
    rows = _hops(cluster, fabric, sent.rows)
    gradients = _hops(cluster, fabric, sent.gradients)
    settling = _hops(cluster, fabric, SentBytes()) + _hops(cluster, fabric, sent.settling)
    compute = work.compute + work.deal + packed / work.copy_speed
    return StepTime(compute, rows + gradients, settling + sum_time(cluster, fabric, dense))


def replicated_time(cluster: Cluster, fabric: Fabric, work: Work, sent: Exchanges, dense: SentBytes) -> StepTime:
    """Of a step whose rows are everywhere: new rows are gathered, gradients exchanged, new weights gathered."""
    if cluster.size == 1:
        return StepTime(work.compute, 0.0, 0.0)
    packed = PASSES * max(sent.gradients.in_node, sent.gradients.across)
    rows = _hops(cluster, fabric, sent.rows)
    gradients = _hops(cluster, fabric, sent.gradients) + _hops(cluster, fabric, SentBytes())
    settling = _hops(cluster, fabric, SentBytes()) + _hops(cluster, fabric, sent.settling)
    settling += 3 * _hops(cluster, fabric, SentBytes())  # places, sizes and keys of the union
    compute = work.compute + work.deal + packed / work.copy_speed
    return StepTime(compute, rows + gradients, settling + sum_time(cluster, fabric, dense))


def sum_time(cluster: Cluster, fabric: Fabric, sent: SentBytes) -> float:
    """Of an all-reduce: rings for the bytes, trees for the waiting."""
    seconds = 0.0
    for size, wire, num_bytes in _axes(cluster, fabric, sent):
        seconds += 2 * (wire.start + ceil(log2(size)) * wire.message) + num_bytes / wire.speed
    return seconds


def _hops(cluster: Cluster, fabric: Fabric, sent: SentBytes) -> float:
    """One collective on each axis, one after the other."""
    return sum(
        wire.start + (size - 1) * wire.message + num_bytes / wire.speed
        for size, wire, num_bytes in _axes(cluster, fabric, sent)
    )


def _axes(cluster: Cluster, fabric: Fabric, sent: SentBytes) -> list[tuple[int, Wire, float]]:
    axes = [(cluster.local, fabric.in_node, sent.in_node), (cluster.nodes, fabric.across, sent.across)]
    return [axis for axis in axes if axis[0] > 1]


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
