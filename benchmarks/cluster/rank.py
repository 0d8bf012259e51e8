"""One rank of the virtual cluster: trains every point of its mesh and times blocks of steps.

Started by torchrun in every node as `python -m benchmarks.cluster.rank JOB.json`. Rank 0 sets the rates of the links and writes
one JSON line for each point. A step is a lookup, an MLP, its backward pass with the row update, and a step of the dense
optimizer; nothing is prefetched, so no exchange but a k-step merge overlaps with anything.

Before every block all ranks train as many steps alone, each with tables of its own: the same work without a network, at the
same number of processes and the same load of the machine. That is what the model of docs/scaling.md starts from.
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
WARM_KSTEP = 30  # steps: 8 synchronous ones, 16 to the first merge, which is used 4 later; none is pending at 30


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


class Learner(NamedTuple):
    """A model, and how it is trained."""

    tables: hotbed.EmbeddingTables
    mlp: nn.Sequential
    optimizer: Any
    mesh: Mesh | None = None

    def step(self, ids: Tensor, labels: Tensor) -> float:
        vectors = self.tables(ids)
        assert isinstance(vectors, Tensor)
        logits = self.mlp(vectors.flatten(1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def learner_alone() -> Learner:
    """Without other ranks."""
    tables, mlp = hotbed.EmbeddingTables(_declared(), Adagrad(lr=0.05), independent=True), _make_mlp()
    return Learner(tables, mlp, torch.optim.Adam(mlp.parameters(), lr=1e-3))


def learner_of(point: Point) -> Learner:
    """One of the ranks of a point."""
    way = point.way
    mesh = Mesh(point.nodes, point.local) if way.two_hops else Mesh(point.ranks, 1)
    tables = ShardedTables(_declared(), Adagrad(lr=0.05), mesh=mesh, traffic=way.traffic, mode=way.mode)
    mlp = _make_mlp()
    optimizer = KStepAdam(mlp.parameters(), lr=1e-3, k=way.k, mesh=mesh, across_only=way.across_only)
    return Learner(tables, mlp, optimizer, mesh)


def _declared() -> dict[str, hotbed.Table]:
    return {f"C{number}": hotbed.Table(rows, DIM) for number, rows in enumerate(ROWS)}


def _make_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inside, outside in pairwise(MLP):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Samples(NamedTuple):
    """The batches of this rank."""

    ids: list[Tensor]
    labels: list[Tensor]


def timed(learner: Learner, samples: Samples, first: int, count: int) -> float:
    """Seconds of a step, the mean over `count`, from barrier to barrier."""
    dist.barrier()
    start = time.perf_counter()
    for number in range(first, first + count):
        learner.step(samples.ids[number % NUM_BATCHES], samples.labels[number % NUM_BATCHES])
    dist.barrier()
    return (time.perf_counter() - start) / count


def measure(point: Point, job: Job, samples: Samples, alone: Learner) -> tuple[dict[str, Any], list[float]]:
    """The row of a point, and the losses of its first steps."""
    learner = learner_of(point)
    assert learner.mesh is not None
    local = point.way.k > 1
    block = -(-job.steps // point.way.k) * point.way.k if local else job.steps
    warm = range(WARM_KSTEP if local else 4)
    losses = [learner.step(samples.ids[n % NUM_BATCHES], samples.labels[n % NUM_BATCHES]) for n in warm]
    traffic, seconds, seconds_alone = learner.mesh.traffic, [], []
    sent = traffic.in_node, traffic.across
    for number in range(job.blocks):
        seconds_alone.append(timed(alone, samples, number * block, job.steps))
        seconds.append(timed(learner, samples, number * block, block))
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
        "alone_ms": round(statistics.median(seconds_alone) * 1e3, 2),
        "in_node": round((traffic.in_node - sent[0]) / count),
        "across": round((traffic.across - sent[1]) / count),
        "load": round(os.getloadavg()[0], 1),
    }
    learner.optimizer.merge()  # no merge stays pending
    return row, losses


def run(job: Job) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    drawn = batches(ROWS, BATCH * world, NUM_BATCHES, seed=0)
    alone = learner_alone()
    ids = [one[rank * BATCH : (rank + 1) * BATCH].contiguous() for one in drawn]
    samples = Samples(ids, [(one.sum(1) % 3 == 0).float() for one in ids])
    timed(alone, samples, 0, NUM_BATCHES)  # rows and kernels are warm
    expected: dict[str, list[float]] = {}
    rate = 0.0
    for point in job.points:
        if point.gigabits != rate:
            dist.barrier()  # what is on the way arrives at the rate it left with
            if rank == 0:
                set_rate(job.switch, job.nodes, point.gigabits)
            dist.barrier()
            rate = point.gigabits
        row, losses = measure(point, job, samples, alone)
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
