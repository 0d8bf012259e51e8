"""hotbed as `hotbed train` runs it: the same objects, built from a run's config; its own clock leaves evaluations out."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import hotbed
from benchmarks.peers.job import Clock, Job
from hotbed.data.dataset import Dataset
from hotbed.run.config import DataConfig, DenseConfig, ModelConfig, RunConfig, TablesConfig, TrainConfig
from hotbed.telemetry.observer import Observer, Progress, Record
from hotbed.train.build import build
from hotbed.train.step import repeatable


class Watcher(Observer):
    """Notes step, seconds and AUC of every evaluation."""

    def __init__(self, opening: float) -> None:
        self.opening = opening  # seconds that the dataset took to open
        self.points: list[dict[str, float]] = []

    def begin(self, progress: Progress, total_steps: int) -> None:
        self.progress, self.started = progress, time.time()

    def record(self, record: Record) -> None:
        if record["kind"] == "eval":
            seconds = self.opening + self.progress.train_seconds
            self.points.append({"step": record["step"], "seconds": seconds, "auc": record["auc"]})


def config_of(job: Job) -> RunConfig:
    """The run file of the job."""
    options = {"hidden": job.hidden, "batch_norm": job.batch_norm, "dropout": job.dropout}
    if job.model == "dcnv2":
        options |= {"structure": "parallel", "num_cross": job.num_cross}
    return RunConfig(
        data=DataConfig(path=job.dataset, batch_size=job.batch_size),
        model=ModelConfig(name=job.model, dim=job.dim, options=options),
        tables=TablesConfig(
            optimizer="adam",
            lr=job.lr,
            init=f"normal({job.init_std})",
            decay_scope="table",  # Adam of the peers moves every row at every step
        ),
        dense=DenseConfig(optimizer="adam", lr=job.lr),
        train=TrainConfig(epochs=job.epochs, seed=job.seed, eval_every=job.eval_every, device="cpu", keep_best=False),
    )


def main() -> None:
    folder = Path(sys.argv[1])
    job, clock = Job.load(folder), Clock(folder)
    torch.set_num_threads(job.threads)
    start = time.perf_counter()
    dataset = Dataset.open(job.dataset)
    watcher = Watcher(time.perf_counter() - start)
    run = folder / "run"
    run.mkdir()
    training = build(config_of(job), dataset, run, [watcher]).training
    with repeatable():
        training.train(lambda: False)
    training.close()
    clock.points, clock.started = watcher.points, watcher.started
    clock.done({"torch": torch.__version__, "hotbed": hotbed.__version__})


if __name__ == "__main__":
    main()
