"""A calibration and the traffic of a step in; its stages, the slowest of them and samples/s out.

On a GPU stages run beside each other and the step is as long as the longest. On a CPU they share its cores: the step is the
longest of the training thread, the reader, and all core seconds over the cores. Every epoch also waits for the batches that are
read before its first step.
"""

from __future__ import annotations

from typing import NamedTuple

from hotbed.forecast.calibrate import Calibration
from hotbed.forecast.traffic import Traffic


class Speed(NamedTuple):
    """Seconds of a step by stage, each as if it were alone."""

    stages: dict[str, float]
    step: float
    bottleneck: str
    fill: float  # seconds before the first step of an epoch
    samples_per_s: float  # of the whole run


class Job(NamedTuple):
    """What a step is asked to do."""

    samples: int
    num_steps: int
    record: int  # bytes
    num_slots: int | None
    batches_ahead: int
    cuda: bool
    num_epochs: int = 1  # that are begun
    planning: float = 0.0  # seconds of a step, on a CPU
    ssd_speed: float = 0.0  # bytes/s
    network: float = 0.0  # seconds of exchanges that nothing hides


def speed_of(known: Calibration, traffic: Traffic | None, job: Job) -> Speed:
    """Of one rank."""
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
    return Speed(stages, step, bottleneck, fill, job.samples * job.num_steps / total if total else 0.0)
