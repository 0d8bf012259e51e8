"""One rank of the virtual cluster: trains every point of its mesh and times blocks of steps.

Started by torchrun in every node as `python -m benchmarks.cluster.rank JOB.json`. Rank 0 sets the rates of the links and writes
one JSON line for each point. A step is a lookup, an MLP, its backward pass with the row update, and a step of the dense
optimizer; nothing is prefetched, so no exchange but a k-step merge overlaps with anything.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hotbed
from benchmarks.cluster.nodes import set_rate
from benchmarks.cluster.points import BATCH, DENSE_WEIGHTS, DIM, MLP, ROWS, Point, Way
from benchmarks.workload import batches
from hotbed.optim import Adagrad, KStepAdam
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.sharded import ShardedTables

NUM_BATCHES = 16
WARM_KSTEP = 24  # steps: 8 synchronous ones, then the first merge after 16


class Job(NamedTuple):
    """What the parent wants."""

    points: list[Point]
    out: str
    switch: str
    nodes: list[str]
    blocks: int  # per point
    steps: int  # per block of a synchronous way; a block of k-step training has k of them, or a multiple

    @classmethod
    def read(cls, path: str) -> Job:
        given = json.loads(Path(path).read_text())
        points = [Point(*one[:3], Way(*one[3])) for one in given.pop("points")]
        return cls(points, **given)


class Learner:
    """The model of one rank and how it is trained."""

    def __init__(self, point: Point) -> None:
        way = point.way
        shape = (point.nodes, point.local) if way.two_hops else (point.ranks, 1)
        self.mesh = Mesh(*shape)
        declared = {f"C{number}": hotbed.Table(rows, DIM) for number, rows in enumerate(ROWS)}
        self.tables = ShardedTables(declared, Adagrad(lr=0.05), mesh=self.mesh, traffic=way.traffic, mode=way.mode)
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inside, outside in pairwise(MLP):
            layers += [nn.Linear(inside, outside), nn.ReLU()]
        self.mlp = nn.Sequential(*layers[:-1])
        self.optimizer = KStepAdam(self.mlp.parameters(), lr=1e-3, k=way.k, mesh=self.mesh, across_only=way.across_only)

    def step(self, ids: Tensor, labels: Tensor) -> float:
        vectors = self.tables(ids)
        logits = self.mlp(vectors.flatten(1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def measure(point: Point, job: Job, ids: list[Tensor], labels: list[Tensor]) -> tuple[dict[str, Any], list[float]]:
    """The row of a point, and the losses of its first steps."""
    learner = Learner(point)
    local = point.way.k > 1
    block = -(-job.steps // point.way.k) * point.way.k if local else job.steps
    losses = [
        learner.step(ids[number % NUM_BATCHES], labels[number % NUM_BATCHES])
        for number in range(WARM_KSTEP if local else 4)
    ]
    sent, seconds = (learner.mesh.traffic.in_node, learner.mesh.traffic.across), []
    for number in range(job.blocks):
        dist.barrier()
        start = time.perf_counter()
        for step in range(block):
            place = (number * block + step) % NUM_BATCHES
            learner.step(ids[place], labels[place])
        dist.barrier()
        seconds.append((time.perf_counter() - start) / block)
    count = job.blocks * block
    row = {
        "benchmark": "cluster",
        "nodes": point.nodes,
        "local": point.local,
        "ranks": point.ranks,
        "gbit": f"{point.gigabits:g}",
        "way": point.way.name,
        "k": point.way.k,
        "batch_per_rank": BATCH,
        "dim": DIM,
        "dense_weights": DENSE_WEIGHTS,
        "steps": count,
        "ms_p50": round(statistics.median(seconds) * 1e3, 2),
        "ms_min": round(min(seconds) * 1e3, 2),
        "ms_max": round(max(seconds) * 1e3, 2),
        "in_node": round((learner.mesh.traffic.in_node - sent[0]) / count),
        "across": round((learner.mesh.traffic.across - sent[1]) / count),
        "load": round(os.getloadavg()[0], 1),
    }
    learner.optimizer.merge()  # no merge stays pending
    return row, losses


def run(job: Job) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    drawn = batches(ROWS, BATCH * world, NUM_BATCHES, seed=0)
    ids = [one[rank * BATCH : (rank + 1) * BATCH].contiguous() for one in drawn]
    labels = [(one.sum(1) % 3 == 0).float() for one in ids]
    expected: dict[str, list[float]] = {}
    rate = 0.0
    for point in job.points:
        if point.gigabits != rate:
            dist.barrier()  # what is on the way arrives at the rate it left with
            if rank == 0:
                set_rate(job.switch, job.nodes, point.gigabits)
            dist.barrier()
            rate = point.gigabits
        row, losses = measure(point, job, ids, labels)
        if point.way.name in ("sharded", "replicated") and expected.setdefault("losses", losses) != losses:
            raise SystemExit(f"{point}: the losses are not those of the points before: {losses}, {expected['losses']}")
        if rank == 0:
            with open(job.out, "a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(Job.read(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
