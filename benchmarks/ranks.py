"""DLRM with rows sharded over W Gloo processes of one core each, compared with one process of one core, same global batch.

    python -m benchmarks.ranks [--ranks 2] [--batch 16384] [--steps 60] [--out FILE.csv]

Every process is bound to a core of its own and has one thread. Both ways train the same model (26 tables of a million rows,
dim 16, Zipf 1.05, row-wise Adagrad; DLRM of hotbed.models with Adam) on the same batches; the losses of the first steps are
compared before anything is timed. They take turns, so that a slow minute of the machine hits both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results_file import append_rows
from benchmarks.workload import batches as id_batches
from hotbed import EmbeddingTables, Table, optim
from hotbed.models import build_model
from hotbed.parallel.sharded import ShardedTables

TABLES, ROWS, DIM, DENSE = 26, 1_000_000, 16, 13
_COMPARED, _TURNS = 3, 3


class Step:
    """The model, on this rank's part of every batch."""

    def __init__(self, rank: int, world: int, batch: int) -> None:
        torch.manual_seed(0)
        names = [f"t{i}" for i in range(TABLES)]
        declared = {name: Table(ROWS, DIM) for name in names}
        rows = optim.RowwiseAdagrad(lr=0.02)
        self._batch = batch
        self._part = slice(batch * rank // world, batch * (rank + 1) // world)
        self._tables: EmbeddingTables
        if world == 1:
            self._tables = EmbeddingTables(declared, rows)
        else:
            self._tables = ShardedTables(declared, rows, gradients="sum")
        self._model = build_model("dlrm", num_features=TABLES, dim=DIM, num_dense=DENSE, options={})
        self._optimizer = optim.KStepAdam(self._model.parameters(), lr=1e-3, k=1)
        self._world = world

    def __call__(self, ids: Tensor, dense: Tensor, labels: Tensor) -> float:
        part = self._part
        logits = self._model(self._tables(ids[part]), dense[part])
        loss = F.binary_cross_entropy_with_logits(logits, labels[part], reduction="sum") / self._batch
        self._optimizer.zero_grad()
        loss.backward()
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self._world)  # k-step Adam takes the mean, the loss adds up
        self._optimizer.step()
        return float(loss.detach())


def _batches(count: int, batch: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            ids,
            torch.randn(batch, DENSE, generator=generator),
            torch.randint(0, 2, [batch], generator=generator).float(),
        )
        for ids in id_batches((ROWS,) * TABLES, batch, count)
    ]


def _rank(rank: int, world: int, core: int, folder: str, args: argparse.Namespace, pipe: Any) -> None:
    """Answers every "go" with the seconds of a turn; the first answer is the losses."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    batches = _batches(20, args.batch)
    step = Step(rank, world, args.batch)
    pipe.send([step(*batches[i]) for i in range(_COMPARED)])
    number = _COMPARED
    while pipe.recv() == "go":
        begin = time.perf_counter()
        for _ in range(args.steps // _TURNS):
            step(*batches[number % len(batches)])
            number += 1
        pipe.send(time.perf_counter() - begin)
    if world > 1:
        dist.destroy_process_group()


def _start(world: int, args: argparse.Namespace, folder: str) -> tuple[list[Any], list[Any]]:
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        arguments = (rank, world, cores[rank], folder, args, theirs)
        process = context.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    return pipes, processes


def _turn(pipes: Sequence[Any]) -> float:
    for pipe in pipes:
        pipe.send("go")
    return max(pipe.recv() for pipe in pipes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes of one core each (%(default)s)")
    parser.add_argument("--batch", type=int, default=16_384, help="samples of all ranks together (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="timed, of each way (%(default)s)")
    parser.add_argument("--out", default="", help="CSV file to append to")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if cores < args.ranks:
        raise SystemExit(f"{args.ranks} ranks need as many cores; here are {cores}")
    seconds: dict[int, list[float]] = {1: [], args.ranks: []}
    with tempfile.TemporaryDirectory() as folder:
        started = {world: _start(world, args, folder) for world in seconds}
        losses = {
            world: [sum(parts) for parts in zip(*(pipe.recv() for pipe in pipes))]
            for world, (pipes, _) in started.items()
        }
        if any(abs(a - b) > 1e-4 * abs(a) for a, b in zip(*losses.values())):
            raise SystemExit(f"losses differ, nothing was timed: {losses}")
        for _ in range(_TURNS):
            for world, (pipes, _) in started.items():
                seconds[world].append(_turn(pipes))
        for pipes, processes in started.values():
            for pipe, process in zip(pipes, processes):
                pipe.send("stop")
                process.join()
    rows = []
    for world, times in seconds.items():
        rate = args.batch * (args.steps // _TURNS) / statistics.median(times)
        print(f"{world} process{'es' if world > 1 else ''} of one core: {rate:10,.0f} samples/s")
        rows.append({"benchmark": "ranks", "ranks": world, "batch": args.batch, "samples_per_s": round(rate)})
    print(f"{args.ranks} ranks are {rows[1]['samples_per_s'] / rows[0]['samples_per_s']:.2f}x one (bar 1.5x for 2)")
    if args.out:
        append_rows(args.out, rows)


if __name__ == "__main__":
    main()
