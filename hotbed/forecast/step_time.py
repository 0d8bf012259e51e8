"""Seconds of a training step: of one rank from its calibration and traffic, of a cluster from bytes and the speed of wires.

`speed_of`: the stages of a step, the slowest of them, and samples/s. On a GPU stages run concurrently, and a step takes as long
as the longest. On a CPU they share its cores: a step is the longest of the training thread, the reader, and all core seconds
divided by the cores. Every epoch also waits for the batches that are read before its first step.

`sharded_time`, `replicated_time`: a step on a cluster. Every collective takes a start, a little for each partner, and its bytes
divided by the speed that one rank reaches. A row cannot be sent before the gradients of the last step have reached it, so rows
and gradients travel between steps, and nothing hides them. Keys may be settled ahead. A sum of gradients is waited for; a
k-step merge travels during the next `delay` steps. `benchmarks.cluster.model` compares the formulas with measured steps.

`wires_of`: bytes that one of several ranks sends in a step, and the seconds that nothing hides. Bytes are those of network.py,
which agree with counted ones within 2 % where samples are shuffled. Seconds assume NVLink in a node of eight and 400 Gb/s a
rank across nodes.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

from torch import nn

from hotbed.data.dataset import Dataset
from hotbed.forecast.calibrate import Calibration
from hotbed.forecast.memory import BatchShape
from hotbed.forecast.network import Cluster, Exchanges, Group, SentBytes, dense, read_frequencies, sharded
from hotbed.forecast.traffic import RowTraffic
from hotbed.train.build import Sketch

_LOCAL = 8  # ranks of a node
_NETWORK = 400  # Gb/s of a rank
REACHED = 0.8  # of the speed on the label
HIDDEN_SHARE = 0.5  # of the computation: what keys may take without delaying the step
PASSES = 6  # over rows and gradients in device memory, to pack and unpack what travels


class Wire(NamedTuple):
    """The connection of one rank to others, when all ranks send."""

    speed: float  # bytes per second, one way
    start: float  # seconds before a collective moves anything
    message: float  # seconds for each partner


class Fabric(NamedTuple):
    """Both kinds of wire."""

    in_node: Wire
    across: Wire


NVLINK = Wire(REACHED * 450e9, 15e-6, 1e-6)  # NVLink 4: 900 GB/s a GPU, both ways together


def network(gigabits: float, ranks: int = 1) -> Wire:
    """A network card of `gigabits` Gb/s that serves `ranks` ranks."""
    return Wire(REACHED * gigabits * 1e9 / 8 / ranks, 20e-6, 2e-6)


class Work(NamedTuple):
    """The work of one rank in a step, without sending."""

    compute: float  # seconds of a whole training step whose rows are all its own
    dedup: float  # seconds to find the distinct keys of its batch
    copy_speed: float  # of device memory: bytes read and written per second


class DenseSum(NamedTuple):
    """How dense weights are summed over ranks."""

    sent: SentBytes  # of one sum
    k: int = 1  # steps between two sums
    delay: int = 0  # steps that continue while it travels; 0: they wait


class StepTime(NamedTuple):
    """Seconds of one step."""

    compute: float  # with finding distinct keys, packing and unpacking
    exposed: float  # exchanges that nothing hides
    overlapped: float = 0.0  # exchanges that overlap with the computation
    merge: float = 0.0  # one sum of the dense weights
    k: int = 1
    delay: int = 0

    @property
    def step(self) -> float:
        """The mean over steps with and without a sum."""
        alone = self.compute + self.exposed + max(0.0, self.overlapped - HIDDEN_SHARE * self.compute)
        return alone + max(0.0, self.merge - self.delay * alone) / self.k

    @property
    def exchanges(self) -> float:
        """All exchanges one after the other, none of them hidden."""
        return self.exposed + self.overlapped + self.merge / self.k


def sharded_time(
    cluster: Cluster, fabric: Fabric, work: Work, sent: Exchanges, dense: DenseSum, *, ahead: bool = True
) -> StepTime:
    """A step whose rows come from their owners; `ahead`: keys are exchanged before their step."""
    if cluster.size == 1:
        return StepTime(work.compute, 0.0)
    packed = PASSES * max(sent.rows.in_node, sent.rows.across)
    exposed = _hops(cluster, fabric, sent.rows) + _hops(cluster, fabric, sent.gradients)
    settling = _hops(cluster, fabric, SentBytes()) + _hops(cluster, fabric, sent.settling)
    return _step_of(cluster, fabric, work, packed, exposed, settling, dense, ahead)


def replicated_time(
    cluster: Cluster, fabric: Fabric, work: Work, sent: Exchanges, dense: DenseSum, *, ahead: bool = True
) -> StepTime:
    """A step with replicated rows: new rows are gathered, gradients exchanged, new weights gathered."""
    if cluster.size == 1:
        return StepTime(work.compute, 0.0)
    packed = PASSES * max(sent.gradients.in_node, sent.gradients.across)
    gradients = _hops(cluster, fabric, sent.gradients) + _hops(cluster, fabric, SentBytes())
    exposed = _hops(cluster, fabric, sent.rows) + gradients
    settling = _hops(cluster, fabric, SentBytes()) + _hops(cluster, fabric, sent.settling)
    settling += 3 * _hops(cluster, fabric, SentBytes())  # places, sizes and keys of the union
    return _step_of(cluster, fabric, work, packed, exposed, settling, dense, ahead)


def _step_of(
    cluster: Cluster,
    fabric: Fabric,
    work: Work,
    packed: float,
    exposed: float,
    settling: float,
    dense: DenseSum,
    ahead: bool,
) -> StepTime:
    compute = work.compute + work.dedup + packed / work.copy_speed
    waited, overlapped = (exposed, settling) if ahead else (exposed + settling, 0.0)
    return StepTime(compute, waited, overlapped, sum_time(cluster, fabric, dense.sent), dense.k, dense.delay)


def sum_time(cluster: Cluster, fabric: Fabric, sent: SentBytes) -> float:
    """Seconds of an all-reduce: a ring for the bytes, a tree for the latency."""
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
    """Traffic of one rank in one step."""

    in_node: float  # bytes
    across: float
    seconds: float  # that nothing hides


def wires_of(
    dataset: Dataset, shape: BatchShape, found: Sketch, world: int, model: nn.Module, *, once_per_node: bool = False
) -> Wires:
    """Rows sharded over ranks."""
    local = min(world, _LOCAL)
    cluster = Cluster(-(-world // local), local)
    each = zip(read_frequencies(dataset), found.tables.values())
    frequencies = [one._replace(placement=table.placement or "row") for one, table in each]
    key_bytes = 4 if found.amounts.rows * world < 2**31 else 8
    group = Group(frequencies, shape.width, key_bytes)
    exchanges = sharded(cluster, [group], shape.samples, once_per_node=once_per_node)
    weights = dense(cluster, sum(one.numel() for one in model.parameters()))
    fabric = Fabric(NVLINK, network(_NETWORK))
    time = sharded_time(cluster, fabric, Work(0.0, 0.0, 4e12), exchanges, DenseSum(weights))
    total = exchanges.total
    return Wires(total.in_node + weights.in_node, total.across + weights.across, time.exposed + time.merge)


class StepSpeed(NamedTuple):
    """Seconds of a step by stage, each on its own."""

    stages: dict[str, float]
    step: float
    bottleneck: str
    fill: float  # seconds before the first step of an epoch
    samples_per_s: float  # of the whole run


class StepJob(NamedTuple):
    """The work of a step."""

    samples: int
    num_steps: int
    record: int  # bytes
    num_slots: int | None
    batches_ahead: int
    cuda: bool
    num_epochs: int = 1  # that are started
    planning: float = 0.0  # seconds of a step, on a CPU
    ssd_speed: float = 0.0  # bytes/s
    network: float = 0.0  # seconds of exchanges that nothing hides


def speed_of(known: Calibration, traffic: RowTraffic | None, job: StepJob) -> StepSpeed:
    """The speed of one rank."""
    moved = 0.0 if traffic is None else (traffic.misses + traffic.written_back) / 2
    planning = job.planning + (known.slot * (job.num_slots or 0) if moved else 0.0)
    rows = known.row * moved
    ssd = 0.0
    if traffic is not None and job.ssd_speed:
        ssd = (traffic.from_ssd + traffic.to_ssd) * job.record / job.ssd_speed
    stages = {"reader": known.reader}
    if job.cuda:
        stages |= {"GPU": known.step + planning + job.network, "host": rows}
        if traffic is not None and known.copy_speed:
            stages["PCIe"] = max(traffic.copied, traffic.written_back) * job.record / known.copy_speed
    else:
        stages |= {"compute": known.step + planning, "host": rows}
    if ssd:
        stages["SSD"] = ssd
    if job.network:
        stages["network"] = job.network
    bottleneck = max(stages, key=lambda name: stages[name])
    if job.cuda:
        step = max(stages.values())
    else:
        alone = known.step + planning + rows + ssd + job.network
        busy = known.step_cores * alone / known.step if known.step else 0.0
        step = max(alone, known.reader, (busy + known.reader_cores) / known.cores)
        if step > 1.2 * alone:
            bottleneck = "reader"
    fill = known.first_batch + known.reader * min(job.batches_ahead, job.num_steps)
    total = step * job.num_steps + fill * job.num_epochs
    return StepSpeed(stages, step, bottleneck, fill, job.samples * job.num_steps / total if total else 0.0)
