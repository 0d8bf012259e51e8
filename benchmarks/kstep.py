"""k-step Adam on real click logs with 4 processes: what merging less often costs in AUC and saves in bytes and time.

    python -m benchmarks.kstep auc [--data criteo,frappe] [--seeds 0,1,2]
    python -m benchmarks.kstep time
    python -m benchmarks.kstep page        # the table and the plot of docs/kstep.md, from the CSV files

Every rank has one thread and a quarter of each global batch. Tables are trained synchronously in all runs: plain nn.Embedding,
their gradients averaged every step. Only the dense weights are merged every k steps. The runs share seeds, batches and first
values; they differ in k and rule. `time` puts a slow wire under the dense traffic: every all-reduce sleeps, in the thread that
carries it, for what a ring over that wire would take. Rows already in the CSV files are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.accuracy.__main__ import prepare
from benchmarks.kstep_page import BANDWIDTH, LATENCY, write_page
from benchmarks.plain_torch.twin import PlainTwin
from benchmarks.results_file import append_rows
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.optim import KStepAdam
from hotbed.parallel.mesh import Link, Mesh
from hotbed.train.metrics import Metrics, measure

WORLD = 4
RULES = ("params", "moments", "shared_v", "frozen_v")
KS = (4, 16, 64)
RESULTS = Path("benchmarks/results")
AUC, TIME = RESULTS / "kstep_auc.csv", RESULTS / "kstep_time.csv"
JOBS_PER_LIFE = 13  # of the processes; each job adds process groups, and with them sockets
BLOCK, NUM_BLOCKS = 64, 3  # steps that are timed together; the quickest block counts, as other work only slows


@dataclass(frozen=True)
class Task:
    """How a dataset is trained: as the DeepFM of docs/accuracy.md, made smaller where that takes minutes."""

    data: str
    batch: int  # of all ranks
    epochs: int
    dim: int
    options: dict[str, Any]
    l2: float
    init_std: float
    slow_epochs: int = 0  # the last ones, at a tenth of the rate


TASKS = {
    "frappe": Task("frappe", 1024, 6, 10, {"hidden": [128, 128], "batch_norm": True, "dropout": 0.2}, 0.05, 1e-4, 2),
    "criteo": Task("criteo", 512, 3, 8, {"hidden": [128, 64], "dropout": 0.3}, 1e-3, 1e-2),
}
# Of a size that a slow wire feels: 0.37 million dense weights, 1.5 MB.
TIMED = Task("frappe", 1024, 1, 10, {"hidden": [400, 400, 400], "batch_norm": True, "dropout": 0.2}, 0.05, 1e-4)


class Way(NamedTuple):
    """How the dense weights are merged."""

    rule: str
    k: int
    scale: bool = True
    overlap: bool = True

    @property
    def name(self) -> str:
        return self.rule if self.k > 1 else "synchronous"


SYNCHRONOUS = Way("params", 1, False, False)
WAYS = [SYNCHRONOUS, *(Way(rule, k) for k in KS for rule in RULES), *(Way("params", k, scale=False) for k in KS)]
TIMED_WAYS = [*WAYS[: 1 + len(KS) * len(RULES)], *(Way("params", k, overlap=False) for k in KS)]


class Samples(NamedTuple):
    """A whole split in memory."""

    ids: Tensor  # [N, F]
    dense: Tensor  # [N, n]
    labels: Tensor  # [N]


class Learner:
    """The twin with its two optimizers, on one rank."""

    def __init__(self, task: Task, way: Way, seed: int, mesh: Mesh) -> None:
        dataset = Dataset.open(Path("data-cache") / task.data)
        torch.manual_seed(seed)
        rows = [feature.rows for feature in dataset.schema.features]
        num_dense = len(dataset.schema.dense)
        self.twin = PlainTwin("deepfm", rows, task.dim, num_dense, task.options, init_std=task.init_std)
        self.l2 = task.l2
        self.tables = KStepAdam(self.twin.tables.parameters(), lr=1e-3, k=1)
        self.dense = KStepAdam(
            self.twin.model.parameters(),
            lr=1e-3,
            k=way.k,
            merge=way.rule,
            mesh=mesh,
            scale_lr=way.scale,
            overlap=way.overlap,
            buffers=self.twin.model.buffers(),
        )
        self.num_dense_weights = sum(one.numel() for one in self.twin.model.parameters())
        torch.manual_seed(1000 * seed + dist.get_rank())  # dropout differs between ranks

    def step(self, part: Samples) -> None:
        self.twin.train()
        loss = F.binary_cross_entropy_with_logits(self.twin(part.ids, part.dense), part.labels)
        (loss + self.twin.l2_loss(self.l2)).backward()
        weight = float(len(part.labels))
        self.tables.step(weight=weight)
        self.dense.step(weight=weight)
        self.tables.zero_grad()
        self.dense.zero_grad()

    def set_rate(self, lr: float) -> None:
        for group in (*self.tables.param_groups, *self.dense.param_groups):
            group["lr"] = lr

    @torch.no_grad()
    def evaluate(self, samples: Samples) -> Metrics:
        self.twin.eval()
        logits = self.twin(samples.ids, samples.dense)
        return measure(samples.labels.numpy(), logits.numpy())


def samples_of(data: str, split: str) -> Samples:
    batches = list(Loader(Dataset.open(Path("data-cache") / data), split, batch_size=65536).epoch(0))
    return Samples(*(torch.cat([getattr(batch, name) for batch in batches]) for name in ("ids", "dense", "labels")))


def parts_of(samples: Samples, task: Task, seed: int, epoch: int) -> Iterator[Samples]:
    """This rank's part of each global batch of an epoch; the last batch may be short."""
    order = torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(len(samples.labels)))
    for batch in order.split(task.batch):
        mine = batch[dist.get_rank() :: WORLD]
        yield Samples(*(one[mine] for one in samples))


def measure_auc(task: Task, way: Way, seed: int, splits: tuple[Samples, Samples]) -> dict[str, object]:
    """One training; the row of rank 0."""
    train, test = splits
    mesh = Mesh(nodes=WORLD, local=1)
    learner = Learner(task, way, seed, mesh)
    before, num_steps, start = mesh.traffic.across, 0, time.perf_counter()
    for epoch in range(task.epochs):
        learner.set_rate(1e-3 if epoch < task.epochs - task.slow_epochs else 1e-4)
        for part in parts_of(train, task, seed, epoch):
            learner.step(part)
            num_steps += 1
        learner.dense.merge()
    seconds = time.perf_counter() - start
    found = learner.evaluate(test)
    return {
        "benchmark": "kstep_auc",
        "data": task.data,
        "rule": way.name,
        "k": way.k,
        "scale_lr": int(way.scale),
        "seed": seed,
        "ranks": WORLD,
        "steps": num_steps,
        "auc": round(found.auc, 6),
        "log_loss": round(found.log_loss, 6),
        "dense_weights": learner.num_dense_weights,
        "dense_bytes_per_step": round((mesh.traffic.across - before) / num_steps),
        "seconds": round(seconds, 1),
    }


class SlowLink(Link):
    """A ring over a slow wire: each of 2 (W - 1) hops takes the latency and the W-th part of the bytes."""

    def all_reduce_(self, tensor: Tensor) -> None:
        super().all_reduce_(tensor)
        time.sleep(2 * (self.size - 1) * (LATENCY + tensor.nbytes / self.size / BANDWIDTH))


def measure_time(way: Way, make_link: Callable[..., Link], splits: tuple[Samples, Samples]) -> dict[str, object]:
    """Milliseconds per step of the slowest rank."""
    mesh = Mesh(nodes=WORLD, local=1, make_link=make_link)
    learner = Learner(TIMED, way, 0, mesh)
    parts = list(parts_of(splits[0], TIMED, 0, 0))
    for part in parts[:4]:
        learner.step(part)
    learner.dense.merge()
    before, seconds = mesh.traffic.across, []
    for block in range(NUM_BLOCKS):
        dist.barrier()
        start = time.perf_counter()
        for part in parts[block * BLOCK : (block + 1) * BLOCK]:
            learner.step(part)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    sent = mesh.traffic.across - before
    learner.dense.merge()
    return {
        "benchmark": "kstep_time",
        "wire": "slow" if make_link is SlowLink else "none",
        "rule": way.name,
        "k": way.k,
        "overlap": int(way.overlap),
        "ranks": WORLD,
        "steps": NUM_BLOCKS * BLOCK,
        "dense_weights": learner.num_dense_weights,
        "dense_bytes_per_step": round(sent / NUM_BLOCKS / BLOCK),
        "ms_per_step": round(min(seconds) / BLOCK * 1e3, 2),
    }


class Job(NamedTuple):
    """One row of a CSV file."""

    kind: str  # auc, slow (time with the wire), none (time without it)
    data: str
    way: Way
    seed: int = 0

    def key(self) -> tuple[str, ...]:
        """What names the row."""
        way = self.way
        if self.kind == "auc":
            return self.data, way.name, str(way.k), str(int(way.scale)), str(self.seed)
        return self.kind, way.name, str(way.k), str(int(way.overlap))

    def run(self, splits: tuple[Samples, Samples]) -> dict[str, object]:
        if self.kind == "auc":
            return measure_auc(TASKS[self.data], self.way, self.seed, splits)
        return measure_time(self.way, SlowLink if self.kind == "slow" else Link, splits)


def jobs_for(kind: str, data: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """Those whose row is not there yet."""
    if kind == "auc":
        names, out = ("data", "rule", "k", "scale_lr", "seed"), AUC
        jobs = [Job("auc", name, way, seed) for seed in seeds for name in data for way in WAYS]
    else:
        names, out = ("wire", "rule", "k", "overlap"), TIME
        jobs = [Job(wire, TIMED.data, way) for way in TIMED_WAYS for wire in ("slow", "none")]
    done = {tuple(row[name] for name in names) for row in rows_in(out)}
    return [job for job in jobs if job.key() not in done]


def rows_in(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def run_rank(rank: int, store: str, jobs: Sequence[Job]) -> None:
    """One of the processes: all jobs one after the other; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    loaded: dict[str, tuple[Samples, Samples]] = {}
    for job in jobs:
        if job.data not in loaded:
            loaded[job.data] = samples_of(job.data, "train"), samples_of(job.data, "test")
        row = job.run(loaded[job.data])
        if rank == 0:
            append_rows(str(AUC if job.kind == "auc" else TIME), [row])
            print(" ".join(f"{name}={value}" for name, value in row.items() if name != "benchmark"), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        choices=["auc", "time", "page"],
        help="auc: train on the logs; time: steps over a slow wire; page: tables and plot from the CSV files",
    )
    parser.add_argument("--data", default="criteo,frappe", help="logs, files as in benchmarks.accuracy (%(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="of every run (%(default)s)")
    args = parser.parse_args()
    if args.what == "page":
        print(write_page(rows_in(AUC), rows_in(TIME), Path("docs/kstep.svg")))
        return
    data = args.data.split(",")
    for name in data:
        prepare(name)
    jobs = jobs_for(args.what, data, [int(seed) for seed in args.seeds.split(",")])
    print(f"{len(jobs)} rows to measure", flush=True)
    for first in range(0, len(jobs), JOBS_PER_LIFE):
        with tempfile.TemporaryDirectory() as folder:
            some = jobs[first : first + JOBS_PER_LIFE]
            torch.multiprocessing.spawn(run_rank, (f"{folder}/store", some), nprocs=WORLD)


if __name__ == "__main__":
    main()
