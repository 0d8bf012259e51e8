"""Seconds of a training step: of one rank from its calibration and traffic, of a cluster from bytes and the speed of wires.

`speed_of`: the stages of a step, the slowest of them, and samples/s. On a GPU stages run concurrently, and a step takes as long
as the longest. On a CPU they share its cores: a step is the longest of the training thread, the reader, and all core seconds
divided by the cores. Every epoch also waits for the batches that are read before its first step.

`sharded_time`, `replicated_time`: a step on a cluster. Every collective takes a start, a little for each partner, and its bytes
divided by the speed that one rank reaches. A row cannot be sent before the gradients of the last step have reached it, so rows
and gradients travel between steps, and nothing hides them. Keys may be settled ahead. A sum of gradients is waited for; a
k-step merge travels during the next `delay` steps. `benchmarks.cluster.model` compares the formulas with measured steps.

`wires_of`: bytes that one of several ranks sends in a step, and the seconds that nothing hides. Bytes are those of network.py,
which agree with counted ones within 2 % where samples are shuffled. Speeds of wires are measured or assumed (links.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

from hotbed.forecast.calibrate import Calibration
from hotbed.forecast.memory import BatchShape
from hotbed.forecast.network import Cluster, Exchanges, Frequencies, Group, SentBytes, dense, sharded, together
from hotbed.forecast.traffic import RowTraffic
from hotbed.run.config import RunConfig
from hotbed.tables.sizing.placement import largest_rank
from hotbed.train.build import Sketch

REACHED = 0.8  # of the speed on the label
HIDDEN_SHARE = 0.5  # of the computation: what keys may take without delaying the step
_DEVICE_MEMORY = 4e12  # bytes/s, read and written
_MERGED = {"params": 1, "frozen_v": 2, "shared_v": 2, "moments": 3}  # tensors of the size of the dense weights
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
    exposed = hops_time(cluster, fabric, sent.rows) + hops_time(cluster, fabric, sent.gradients)
    settling = hops_time(cluster, fabric, SentBytes()) + hops_time(cluster, fabric, sent.settling)
    return _step_of(cluster, fabric, work, packed, exposed, settling, dense, ahead)


def replicated_time(
    cluster: Cluster, fabric: Fabric, work: Work, sent: Exchanges, dense: DenseSum, *, ahead: bool = True
) -> StepTime:
    """A step with replicated rows: new rows are gathered, gradients exchanged, new weights gathered."""
    if cluster.size == 1:
        return StepTime(work.compute, 0.0)
    packed = PASSES * max(sent.gradients.in_node, sent.gradients.across)
    gradients = hops_time(cluster, fabric, sent.gradients) + hops_time(cluster, fabric, SentBytes())
    exposed = hops_time(cluster, fabric, sent.rows) + gradients
    settling = hops_time(cluster, fabric, SentBytes()) + hops_time(cluster, fabric, sent.settling)
    settling += 3 * hops_time(cluster, fabric, SentBytes())  # places, sizes and keys of the union
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


def hops_time(cluster: Cluster, fabric: Fabric, sent: SentBytes) -> float:
    """Seconds of one collective on each axis, one after the other."""
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
    merge: float = 0.0  # of them, for the dense weights


class WireJob(NamedTuple):
    """The ranks of a run, and what they send besides rows."""

    cluster: Cluster
    fabric: Fabric
    compute: float  # seconds of a step without sending; 0: unknown
    weights: int  # dense


def wires_of(
    frequencies: Sequence[Frequencies], shape: BatchShape, found: Sketch, job: WireJob, config: RunConfig
) -> Wires:
    """Rows sharded over ranks, and dense weights summed every k steps. All wait for the rank whose rows are requested most."""
    cluster, given = job.cluster, config.parallel
    names = zip(frequencies, found.tables.values())
    placed = [one._replace(placement=table.placement or "row") for one, table in names]
    key_bytes = 4 if found.amounts.rows * cluster.size < 2**31 else 8
    group = Group(placed, shape.width, key_bytes, 4 if given.traffic == "fp32" else 2)
    sent = sharded(cluster, [group], shape.samples, once_per_node=given.once_per_node)
    rule = given.merge if given.merge != "auto" else "params" if config.dense.optimizer == "sgd" else "frozen_v"
    k, delay = given.k_step, 0
    whole = dense(cluster, job.weights, parts=_MERGED[rule] if k > 1 else 1)
    at_once = SentBytes(whole.in_node / _MERGED[rule], 0.0) if given.across_only and k > 1 else SentBytes()
    merged = whole._replace(in_node=0.0) if at_once.in_node else whole
    if k > 1 and given.overlap:
        delay = given.delay or k // 4
    summed = DenseSum(merged, k, delay)
    time = sharded_time(cluster, job.fabric, Work(job.compute, 0.0, _DEVICE_MEMORY), sent, summed)
    exposed = time.exposed * _busiest(group, found, cluster.size, shape.samples)
    if at_once.in_node:
        exposed += sum_time(Cluster(1, cluster.local), job.fabric, at_once)
    merge = max(0.0, time.merge - delay * (job.compute + exposed)) / k
    total = together(sent.total, SentBytes(merged.in_node / k, merged.across / k), at_once)
    return Wires(total.in_node, total.across, exposed + merge, merge)


def _busiest(group: Group, found: Sketch, world: int, samples: float) -> float:
    """The bytes of the rank that sends most rows, by those of the mean rank; tables on one rank make them differ."""
    owners = largest_rank(found.tables, found.optimizer, found.precision, world)[1]
    loads, spread = [0.0] * world, 0.0
    for name, feature in zip(found.tables, group.features):
        alone = Group([feature], group.dim, group.key_bytes, group.value_bytes)
        num_bytes = alone.bytes_of(alone.demand(world, samples, "auto"))
        if name in owners:
            loads[owners[name]] += num_bytes
        else:
            spread += num_bytes / world
    mean = spread + sum(loads) / world
    return (spread + max(loads)) / mean if mean else 1.0


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
