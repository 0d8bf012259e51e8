"""The outputs "concat" and "dict" compared with "stack": `python -m benchmarks.outputs [--device cuda]`.

Two minutes on 2 cores. The embedding step, 26 tables, single ids, every row on the device, row-wise Adagrad. The forms take
turns of ten steps in one process; figures are the tenth percentile of a step, which other work on the machine disturbs least,
and ratios to "stack". With one thread on a CPU (OMP_NUM_THREADS=1) it is CPU time. A dict is used in three ways:

    dict           the features' gradients lie side by side, as torch.cat and torch.stack leave them
    dict, cat      the same, and the model's own torch.cat of the features is part of the step
    dict, apart    every feature's gradient is a tensor of its own: backward copies them together

Exits with 1 if concat or dict takes more than 1.15 times stack. Rows must be the same to the bit, or nothing is said.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hotbed
from benchmarks.results_file import append_rows
from hotbed.bench.setting import Setting, scaled_rows
from hotbed.bench.workload import make_workload

WAYS = ("stack", "concat", "dict", "dict, cat", "dict, apart")
BAR, BARRED = 1.15, ("concat", "dict")
TURN = 10  # steps


def steps_of(setting: Setting) -> dict[str, tuple[hotbed.EmbeddingTables, Callable[[Tensor], None]]]:
    """Tables of every way, and a training step with them."""
    size, count = setting.batch, len(setting.rows)
    grad = torch.randn(size, setting.width, device=setting.device) * 1e-3
    adjacent = grad.view(size, count, setting.dim).unbind(1)
    apart = [part.contiguous() for part in adjacent]
    found = {}
    for way in WAYS:
        tables = hotbed.EmbeddingTables(
            {f"C{i}": hotbed.Table(rows, setting.dim) for i, rows in enumerate(setting.rows)},
            hotbed.optim.RowwiseAdagrad(lr=0.01),
            device=setting.device,
            output=way.partition(",")[0],  # type: ignore[arg-type]
        )

        def step(ids: Tensor, way: str = way, tables: Any = tables) -> None:
            out = tables(ids)
            if way == "dict, cat":
                torch.cat(list(out.values()), dim=1).backward(grad)
            elif way.startswith("dict"):
                torch.autograd.backward(list(out.values()), apart if way == "dict, apart" else adjacent)
            else:
                out.backward(grad.view(out.shape))

        found[way] = tables, step
    return found


def measure(setting: Setting, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every step, by way."""
    workload = make_workload(setting, TURN).batches
    steps = steps_of(setting)
    alone = setting.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):  # the first compiles and warms up
        for way, (_, step) in steps.items():
            for ids in workload:
                start = clock()
                step(ids)  # type: ignore[arg-type]
                if setting.device.type == "cuda":
                    torch.cuda.synchronize(setting.device)
                if turn:
                    times[way].append((clock() - start) * 1e3)
    first = steps["stack"][0]
    for way, (tables, _) in steps.items():
        for name in first.tables:
            if not torch.equal(tables.weight(name), first.weight(name)):
                raise SystemExit(f"the rows of {name} after {way!r} are not those after 'stack'")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--dim", default="16,64,128", help="row widths, by comma (%(default)s)")
    parser.add_argument("--batch", default="4096,16384", help="samples of a step, by comma (%(default)s)")
    parser.add_argument("--rows-scale", type=float, default=0.02, help="of Criteo-Kaggle's rows (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every way (%(default)s)")
    parser.add_argument("--csv", default="", help="file to append the table to")
    asked = parser.parse_args()
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {asked.device}: torch finds no CUDA device")
    rows, met = [], True
    for batch in map(int, asked.batch.split(",")):
        for dim in map(int, asked.dim.split(",")):
            setting = Setting(torch.device(asked.device), dim=dim, batch=batch, rows=scaled_rows(asked.rows_scale))
            times = {way: statistics.quantiles(some, n=10)[0] for way, some in measure(setting, asked.rounds).items()}
            ratios = {way: ms / times["stack"] for way, ms in times.items()}
            met &= all(ratios[way] <= BAR for way in BARRED)
            line = "   ".join(f"{way} {times[way]:.2f} ms ({ratios[way]:.2f}x)" for way in WAYS)
            print(f"dim {dim:3d}, batch {batch:,}:   {line}", flush=True)
            rows += [
                {"benchmark": "outputs", "device": asked.device, "dim": dim, "batch": batch, "output": way}
                | {"ms": round(times[way], 3), "ratio": round(ratios[way], 3)}
                for way in WAYS
            ]
    if asked.csv:
        append_rows(asked.csv, rows)
    raise SystemExit(not met)


if __name__ == "__main__":
    main()
