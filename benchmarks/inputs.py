"""What recordings are worth for each kind of batch: `python -m benchmarks.inputs`, about three minutes on an H200.

The embedding step with a given gradient, launch by launch and replayed, in one process and in turns: single ids, batches whose
sizes vary, bags of MLPerf's sizes, fixed and varying; all rows in HBM, and behind a cache with prefetch, every row written
beforehand. Says of each the milliseconds of a step (the best of the rounds' medians), how long the GPU worked, and the launches
of a step (kernels, graphs and copies that Python asks for, by torch's profiler). `--tiny`: a few small batches, on a CPU too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from typing import Any, NamedTuple

import torch

import hotbed
from hotbed.bench.setting import scaled_rows
from hotbed.bench.systems import write_rows
from hotbed.bench.workload import zipf_ids
from hotbed.data.synthetic.shapes import BAG_SIZES


class Case(NamedTuple):
    """One line of the result."""

    kind: str
    batch: int
    cache: float | None


def batches_of(case: Case, rows: tuple[int, ...], count: int, device: torch.device) -> list[Any]:
    """Batches on the device."""
    draw = torch.Generator(device=device).manual_seed(0)
    sizes = torch.Generator().manual_seed(0)
    found: list[Any] = []
    for _ in range(count):
        size = case.batch
        if case.kind == "sizes vary":
            size = int(torch.randint(case.batch // 2, case.batch + 1, (1,), generator=sizes))
        if case.kind in ("single", "sizes vary"):
            columns = [zipf_ids(n, size, 1.05, draw) for n in rows]
            found.append(torch.stack(columns, dim=1).contiguous())
            continue
        bags = {}
        for i, (n, length) in enumerate(zip(rows, BAG_SIZES)):
            lengths = torch.full((size,), length, device=device)
            if case.kind == "varying bags":
                lengths = torch.randint(0, 2 * length + 1, (size,), generator=draw, device=device)
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            bags[f"C{i}"] = hotbed.Jagged(zipf_ids(n, int(offsets[-1]), 1.05, draw), offsets)
        found.append(bags)
    return found


def make_tables(case: Case, rows: tuple[int, ...], dim: int, recorded: bool, device: torch.device) -> Any:
    cache = {} if case.cache is None else {"cache": case.cache}
    tables = hotbed.EmbeddingTables(
        {f"C{i}": hotbed.Table(n, dim) for i, n in enumerate(rows)},
        hotbed.optim.RowwiseAdagrad(lr=0.01),
        device=device,
        output="stack",
        **cache,  # type: ignore[arg-type]
    )
    for group in tables.caches:
        write_rows(group)
    if not recorded:
        tables.stop_recording(feeds=True)
    return tables


def steps(tables: Any, batches: list[Any]) -> Iterator[None]:
    """Train batch after batch."""
    fed: Any = hotbed.prefetch(batches, tables) if tables.caches else iter(batches)
    gradients: dict[int, torch.Tensor] = {}
    with closing(fed) if tables.caches else nullcontext():
        for batch in fed:
            vectors = tables(batch)
            size = vectors.shape[0]
            if size not in gradients:
                gradients[size] = torch.full_like(vectors, 1e-3)
            vectors.backward(gradients[size])
            yield


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(tables: Any, batches: list[Any], warmup: int, device: torch.device) -> float:
    """Milliseconds of a step, the median of groups of ten."""
    times, began = [], 0.0
    for n, _ in enumerate(steps(tables, batches)):
        if n + 1 >= warmup and (n + 1 - warmup) % 10 == 0:
            wait(device)
            now = time.perf_counter()
            if n + 1 > warmup:
                times.append((now - began) * 100)
            began = now
    return statistics.median(times)


def profile(tables: Any, batches: list[Any], device: torch.device) -> tuple[float, float]:
    """(milliseconds the GPU works, launches) of a step."""
    if device.type != "cuda":
        return float("nan"), float("nan")
    from torch.profiler import ProfilerActivity

    count = len(batches) // 2
    found = steps(tables, batches)
    for _ in range(len(batches) - count):
        next(found)
    wait(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(count):
            next(found)
        wait(device)
    for _ in found:
        pass
    busy = launches = 0.0
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            busy += event.time_range.elapsed_us()
        elif event.name.startswith(("cudaLaunch", "cudaGraphLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")):
            launches += 1
    return busy / count / 1e3, launches / count


def cases(tiny: bool) -> Iterator[Case]:
    large, small = (64, 16) if tiny else (16384, 4096)
    for cache in (None, 0.3 if tiny else 0.015):
        yield Case("single", large, cache)
        yield Case("sizes vary", large, cache)
    for cache in (None, 0.6 if tiny else 0.05):
        yield Case("bags", small, cache)
        yield Case("varying bags", small, cache)


def main(say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few small batches, on a CPU too")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured (%(default)s)")
    parser.add_argument("--dim", type=int, default=128, help="row width (%(default)s)")
    parser.add_argument("--rows-scale", type=float, default=1.0, help="share of Criteo-Kaggle's rows (%(default)s)")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not options.tiny:
        raise SystemExit("there is no CUDA device; --tiny runs without one")
    rows = tuple(min(n, 200) for n in scaled_rows(1.0)) if options.tiny else scaled_rows(options.rows_scale)
    dim, warmup, timed = (4, 10, 10) if options.tiny else (options.dim, 60, 60)
    say(f"{'batch':<14}{'rows':<14}{'way':<20}{'ms':>8}{'GPU ms':>9}{'launches':>10}")
    for case in cases(options.tiny):
        batches = batches_of(case, rows, warmup + timed, device)
        best = [float("inf"), float("inf")]
        ways = [make_tables(case, rows, dim, recorded, device) for recorded in (False, True)]
        for _ in range(options.rounds):
            for recorded, tables in enumerate(ways):
                best[recorded] = min(time_steps(tables, batches, warmup, device), best[recorded])
        for recorded, tables in enumerate(ways):
            busy, launches = profile(tables, batches[:80], device)
            place = "in HBM" if case.cache is None else f"{case.cache:.1%} cached"
            way = "replayed" if recorded else "launch by launch"
            say(f"{case.kind:<14}{place:<14}{way:<20}{best[recorded]:>8.2f}{busy:>9.2f}{launches:>10.0f}")


if __name__ == "__main__":
    main()
