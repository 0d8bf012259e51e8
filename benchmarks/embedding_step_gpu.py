"""Look-up, backward and row update on one CUDA device, every row in its memory: the workload of bench_fbgemm.py.

    python -m benchmarks.embedding_step_gpu [--dim 128] [--batch 16384] [--optimizer rowwise_adagrad,adam] [--steps 100]

26 tables with Criteo-Kaggle's cardinalities, one Zipf 1.05 id per feature. Checks one step against the torch reference on
small tables, then prints the median wall clock of a step in windows of ten (the device is only waited for at their ends).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

import hotbed
from benchmarks.systems import OPTIMIZERS
from benchmarks.workload import KAGGLE_ROWS, batches

_WINDOW = 10


def check(optimizer: str, dim: int) -> None:
    """The device and the CPU, from the same first values, must reach the same rows."""
    rows = (3, 50, 1000)
    ids = batches(rows, 257, 3, seed=7)
    grads = [torch.randn(257, 3, dim) * 0.1 for _ in ids]
    results = []
    for device in ("cpu", "cuda"):
        tables = hotbed.EmbeddingTables(
            {f"C{i}": hotbed.Table(n, dim) for i, n in enumerate(rows)}, OPTIMIZERS[optimizer](), device=device
        )
        for batch, grad in zip(ids, grads):
            tables(batch.to(device)).backward(grad.to(device))
        results.append([tables.weight(f"C{i}").cpu() for i in range(len(rows))])
    for cpu, cuda in zip(*results):
        torch.testing.assert_close(cuda, cpu, rtol=1e-4, atol=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--optimizer", default="rowwise_adagrad")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    ids = [batch.cuda() for batch in batches(KAGGLE_ROWS, args.batch, args.steps + 50)]
    grad = torch.randn(args.batch, len(KAGGLE_ROWS), args.dim, device="cuda") * 1e-3
    for optimizer in args.optimizer.split(","):
        check(optimizer, args.dim)
        torch.cuda.reset_peak_memory_stats()
        tables = hotbed.EmbeddingTables(
            {f"C{i}": hotbed.Table(n, args.dim) for i, n in enumerate(KAGGLE_ROWS)},
            OPTIMIZERS[optimizer](),
            device="cuda",
        )
        times = []
        for start in range(0, len(ids), _WINDOW):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for batch in ids[start : start + _WINDOW]:
                tables(batch).backward(grad)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / _WINDOW * 1e3)
        ms = statistics.median(times[50 // _WINDOW :])
        row = {
            "system": "hotbed, every row on the device",
            "optimizer": optimizer,
            "dim": args.dim,
            "batch": args.batch,
            "ms_per_step": round(ms, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }
        print(json.dumps(row), flush=True)
        del tables


if __name__ == "__main__":
    main()
