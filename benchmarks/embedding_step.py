"""Lookup, backward and row update on the CPU, hotbed compared with its peers.

    python -m benchmarks.embedding_step [--batch 4096] [--dim 16] [--steps 200] [--turn 50] [--out FILE.csv]

Every pair first trains small tables from the same initial values and must agree to 1e-5; only then is it timed, in turns of
fifty steps each, so that a noisy machine hurts both alike. The first steps of a turn find the caches full of the other system's
rows, so short turns flatter the slower one. Prints medians, the ratio of the medians, and the bar it was to reach.

A system is built from (rows per table, dim, optimizer). All start from hotbed's initial values, so that results compare.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

import hotbed
from benchmarks.results_file import append_rows
from benchmarks.workload import KAGGLE_ROWS, batches

LR, EPS = 0.01, 1e-12  # torch adds eps before the bias correction of SparseAdam, hotbed after: keep it out of sight
OPTIMIZERS: dict[str, Callable[[], hotbed.optim.RowOptimizer]] = {
    "rowwise_adagrad": lambda: hotbed.optim.RowwiseAdagrad(lr=LR, eps=EPS),
    "adagrad": lambda: hotbed.optim.Adagrad(lr=LR, eps=EPS),
    "adam": lambda: hotbed.optim.Adam(lr=LR, eps=EPS),
    "sgd": lambda: hotbed.optim.SGD(lr=LR),
}


class System(Protocol):
    """One way to do the embedding step."""

    def step(self, ids: Tensor, grad: Tensor) -> None: ...

    def weight(self, table: int) -> Tensor: ...


class Hotbed:
    """EmbeddingTables on the CPU."""

    def __init__(self, rows: tuple[int, ...], dim: int, optimizer: str) -> None:
        tables = {f"C{i}": hotbed.Table(n, dim, init=hotbed.Normal(0.01)) for i, n in enumerate(rows)}
        self._tables = hotbed.EmbeddingTables(tables, OPTIMIZERS[optimizer]())

    def step(self, ids: Tensor, grad: Tensor) -> None:
        self._tables(ids).backward(grad)

    def weight(self, table: int) -> Tensor:
        return self._tables.weight(f"C{table}")


def _initial_values(module: torch.nn.ModuleList, rows: tuple[int, ...]) -> None:
    from hotbed.ops.init_rows import init_rows, stream_of

    for i, n in enumerate(rows):
        weight = module[i].weight.data
        init_rows(weight, torch.arange(n), stream_of(0, f"C{i}"), hotbed.Normal(0.01))


class Torch:
    """One nn.EmbeddingBag per table with sparse gradients and torch.optim."""

    def __init__(self, rows: tuple[int, ...], dim: int, optimizer: str) -> None:
        self._bags = torch.nn.ModuleList(
            [
                torch.nn.EmbeddingBag(
                    n, dim, mode="sum", sparse=True, include_last_offset=True, _weight=torch.empty(n, dim)
                )
                for n in rows
            ]
        )
        _initial_values(self._bags, rows)
        parameters = list(self._bags.parameters())
        self._optimizer: torch.optim.Optimizer
        if optimizer == "adagrad":
            self._optimizer = torch.optim.Adagrad(parameters, lr=LR, eps=EPS)
        elif optimizer == "adam":
            self._optimizer = torch.optim.SparseAdam(parameters, lr=LR, eps=EPS)
        else:
            self._optimizer = torch.optim.SGD(parameters, lr=LR)

    def step(self, ids: Tensor, grad: Tensor) -> None:
        offsets = torch.arange(ids.shape[0] + 1)
        columns = ids.t().contiguous()
        out = torch.stack([bag(column, offsets) for bag, column in zip(self._bags, columns)], dim=1)
        self._optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own sparse tensors
            out.backward(grad)
            self._optimizer.step()

    def weight(self, table: int) -> Tensor:
        return self._bags[table].weight.data


class Fbgemm:
    """FBGEMM's table-batched embedding on the CPU (`pip install --no-deps fbgemm-gpu-cpu`)."""

    def __init__(self, rows: tuple[int, ...], dim: int, optimizer: str) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        from hotbed.ops.init_rows import init_rows, stream_of

        kinds = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "sgd": EmbOptimType.EXACT_SGD}
        self._module = SplitTableBatchedEmbeddingBagsCodegen(
            [(n, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for n in rows],
            optimizer=kinds[optimizer],
            learning_rate=LR,
            eps=EPS,
        )
        self._weights = self._module.split_embedding_weights()
        for i, n in enumerate(rows):
            init_rows(self._weights[i], torch.arange(n), stream_of(0, f"C{i}"), hotbed.Normal(0.01))

    def step(self, ids: Tensor, grad: Tensor) -> None:
        size, features = ids.shape
        values = ids.t().reshape(-1)
        out = self._module(values, torch.arange(size * features + 1))
        out.backward(grad.view(size, -1))

    def weight(self, table: int) -> Tensor:
        return self._weights[table]


PAIRS = (  # optimizer, peer, name of the peer, the bar: hotbed at least this many times as fast
    ("rowwise_adagrad", Fbgemm, "fbgemm-gpu-cpu", 2.0),
    ("adagrad", Torch, "torch sparse Adagrad", 4.0),
    ("adam", Torch, "torch SparseAdam", 6.0),
    ("sgd", Torch, "torch sparse SGD", None),
)
_WARMUP = 10  # steps


def check(optimizer: str, peer: type[System], dim: int) -> None:
    """Both systems from the same start must reach the same rows."""
    rows = (3, 50, 1000)
    ours, theirs = Hotbed(rows, dim, optimizer), peer(rows, dim, optimizer)
    steps = (
        1 if optimizer == "adam" else 3
    )  # SparseAdam counts steps per table, hotbed per row: equal at the first step
    for ids in batches(rows, 257, steps, seed=7):
        grad = torch.randn(*ids.shape, dim) * 0.1
        ours.step(ids, grad)
        theirs.step(ids, grad)
    for i in range(len(rows)):
        worst = float((ours.weight(i) - theirs.weight(i)).abs().max())
        if not worst <= 1e-5:
            raise SystemExit(
                f"{optimizer}: rows differ by {worst} between hotbed and {peer.__name__}; nothing was timed"
            )


def measure(systems: list[System], ids: list[torch.Tensor], grad: torch.Tensor, turn: int) -> list[list[float]]:
    """Milliseconds of every timed step of every system, in turns of `turn` steps."""
    for system in systems:
        for batch in ids[:_WARMUP]:
            system.step(batch, grad)
    times: list[list[float]] = [[] for _ in systems]
    for start in range(_WARMUP, len(ids), turn):
        for i, system in enumerate(systems):
            for batch in ids[start : start + turn]:
                begin = time.perf_counter()
                system.step(batch, grad)
                times[i].append((time.perf_counter() - begin) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4096, help="samples a step (%(default)s)")
    parser.add_argument("--dim", type=int, default=16, help="of the vectors (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="timed, of each system (%(default)s)")
    parser.add_argument("--turn", type=int, default=50, help="steps of one system before the other's (%(default)s)")
    parser.add_argument("--only", default="", help="comma-separated optimizers")
    parser.add_argument("--out", default="", help="CSV file to append to")
    args = parser.parse_args()
    if args.steps < 2 or args.turn < 1:
        parser.error(f"--steps {args.steps} --turn {args.turn}: at least 2 steps, in turns of at least 1")
    ids = batches(KAGGLE_ROWS, args.batch, _WARMUP + args.steps)
    grad = torch.randn(args.batch, len(KAGGLE_ROWS), args.dim) * 1e-3
    rows = []
    for optimizer, peer, name, bar in PAIRS:
        if args.only and optimizer not in args.only.split(","):
            continue
        if peer is Fbgemm and importlib.util.find_spec("fbgemm_gpu") is None:
            print(f"{optimizer}: skipped, fbgemm_gpu is not installed (pip install --no-deps fbgemm-gpu-cpu==1.8.0)")
            continue
        check(optimizer, peer, args.dim)
        systems: list[System] = [Hotbed(KAGGLE_ROWS, args.dim, optimizer), peer(KAGGLE_ROWS, args.dim, optimizer)]
        ours, theirs = measure(systems, ids, grad, args.turn)
        ratio = statistics.median(theirs) / statistics.median(ours)
        for system, times in (("hotbed", ours), (name, theirs)):
            p20, p50, p80 = (statistics.quantiles(times, n=10)[k] for k in (1, 4, 7))
            rows.append(
                {
                    "benchmark": "embedding_step_cpu",
                    "system": system,
                    "optimizer": optimizer,
                    "dim": args.dim,
                    "batch": args.batch,
                    "ms_p20": round(p20, 2),
                    "ms_p50": round(p50, 2),
                    "ms_p80": round(p80, 2),
                    "samples_per_s": round(args.batch / p50 * 1e3),
                }
            )
            print(f"{optimizer:16s} {system:22s} {p50:8.2f} ms a step {args.batch / p50:8.0f}k samples/s", flush=True)
        print(f"{'':16s} hotbed is {ratio:.2f}x as fast" + (f" (bar {bar:g}x)" if bar else ""), flush=True)
        del systems
        gc.collect()
    if args.out:
        append_rows(args.out, rows)


if __name__ == "__main__":
    main()
