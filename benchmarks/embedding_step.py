"""Look-up, backward and row update on the CPU, hotbed beside its peers.

    python -m benchmarks.embedding_step [--batch 4096] [--dim 16] [--steps 200] [--turn 50] [--out FILE.csv]

Every pair first trains small tables from the same first values and must agree to 1e-5; only then is it timed, in turns of
fifty steps each, so that a noisy machine hurts both alike. The first steps of a turn find the caches full of the other system's
rows, so short turns flatter the slower one. Prints medians, the ratio of the medians, and the bar it was to reach.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import time

import torch

from benchmarks.results_file import append_rows
from benchmarks.systems import Fbgemm, Hotbed, System, Torch
from benchmarks.workload import KAGGLE_ROWS, batches

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
    """Milliseconds of every timed step of every system, in turns of so many steps."""
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
