"""Whole training of DeepFM on the demo's click log: hotbed compared with the same model over nn.Embedding and torch.optim.

    python -m benchmarks.deepfm_training [--optimizer adagrad|adam] [--steps 100] [--data criteo-like] [--out FILE.csv]

Both read the same batches from the same loader (its time is charged to both), run the same dense model, and train the same
rows; only the tables and their optimizer differ. They take turns of a few steps in one process. The losses of both are
compared first: with equal initial values they must agree.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.plain_torch.twin import PlainTwin
from benchmarks.results_file import append_rows
from hotbed.data import resolve
from hotbed.data.loader.loader import Loader
from hotbed.run.config import RunConfig, TablesConfig
from hotbed.train.build import build
from hotbed.train.step import Learner
from hotbed.types import Batch

_TURN = 10


class Twin:
    """The plain model with its optimizers."""

    def __init__(self, learner: Learner, config: RunConfig) -> None:
        tables = learner.tables
        dim = config.model.dim
        self._twin = PlainTwin(
            config.model.name,
            [table.rows for table in tables.tables.values()],
            dim,
            learner.model.num_dense,
            config.model.options,
            sparse=True,
        )
        self._twin.model.load_state_dict(learner.model.state_dict())
        with torch.no_grad():
            for i, name in enumerate(tables.tables):
                self._twin.tables[2 * i].weight.copy_(tables.weight(name)[:, :dim])
                self._twin.tables[2 * i + 1].weight.copy_(tables.weight(name)[:, dim:])
        self._optimizers = self._twin.optimizers(config.tables.optimizer, lr=config.tables.lr, dense_lr=config.dense.lr)

    def step(self, batch: Batch) -> float:
        loss = F.binary_cross_entropy_with_logits(self._twin(batch.ids, batch.dense), batch.labels)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default="criteo-like", help="dataset directory, or a name of `hotbed data list` (%(default)s)"
    )
    parser.add_argument("--optimizer", choices=["adagrad", "adam"], default="adagrad", help="of the rows (%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="timed, of each system (%(default)s)")
    parser.add_argument("--out", default="", help="CSV file to append to")
    args = parser.parse_args()
    config = RunConfig(tables=TablesConfig(optimizer=args.optimizer))
    dataset = resolve(args.data)
    with tempfile.TemporaryDirectory() as folder:  # of a run that writes nothing
        learner = build(config, dataset, Path(folder)).training.learner
    twin = Twin(learner, config)
    loader = Loader(dataset, "train", batch_size=config.data.batch_size, shuffle=True, threads=config.data.threads)
    batches = loader.epoch(0)
    for batch in itertools.islice(batches, 3):  # also compiles and warms up
        ours, theirs = float(learner.step(batch).loss), twin.step(batch)
        if abs(ours - theirs) > 2e-3 * abs(theirs):
            raise SystemExit(f"losses differ: {ours} and {theirs}; nothing was timed")
    ours_ms: list[float] = []
    theirs_ms: list[float] = []
    while len(ours_ms) * _TURN < args.steps:
        start = time.perf_counter()
        turn = list(itertools.islice(batches, _TURN))
        reading = time.perf_counter() - start
        if len(turn) < _TURN:
            break
        for step, times in ((learner.step, ours_ms), (twin.step, theirs_ms)):
            start = time.perf_counter()
            for batch in turn:
                step(batch)
            times.append((time.perf_counter() - start + reading) / _TURN * 1e3)
    if not ours_ms:
        raise SystemExit(
            f"{args.data} has too few samples: {3 + _TURN} batches of {config.data.batch_size:,} are needed"
        )
    rows = []
    for system, times in (("hotbed", ours_ms), ("nn.Embedding + torch.optim", theirs_ms)):
        ms = statistics.median(times)
        rate = config.data.batch_size / ms * 1e3
        print(f"{args.optimizer:8s} {system:28s} {ms:8.1f} ms a step {rate:10,.0f} samples/s")
        rows.append(
            {
                "benchmark": "deepfm_training_cpu",
                "system": system,
                "optimizer": args.optimizer,
                "dim": config.model.dim,
                "batch": config.data.batch_size,
                "ms_p50": round(ms, 2),
                "samples_per_s": round(rate),
            }
        )
    print(f"hotbed is {statistics.median(theirs_ms) / statistics.median(ours_ms):.2f}x as fast (bar 2x)")
    if args.out:
        append_rows(args.out, rows)


if __name__ == "__main__":
    main()
