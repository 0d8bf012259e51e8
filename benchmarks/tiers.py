"""Three tiers against all rows in memory: `python -m benchmarks.tiers [--csv FILE.csv]`, three minutes on 2 cores.

Trains the same tables on the same lookups, once with all rows in memory behind the cache, then with less and less memory over
an ssd, each in a process of its own. Says how much slower that is, how often memory had the row, and what the process really
took against its budget. Rows must be equal at the end, or nothing is said.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hotbed
from hotbed.host.memory import in_words, parse_bytes
from hotbed.store import TieredStore

ROWS, DIM, FEATURES, BATCH = 3_000_000, 32, 4, 4096
HBM = "24MiB"
AHEAD = 8  # batches; their keys take memory in addition to the budget
MEMORY = ("320MiB", "224MiB", "160MiB")
BAR = 0.5  # of the speed with all rows in memory, where memory has 95 % of the rows


class Found(NamedTuple):
    """One run."""

    memory: str
    samples_per_s: float
    from_memory: float  # share of the rows that were read from below the device
    resident_bytes: int  # above what the process had after training small tables: compiled code, buffers of batches
    checksum: int


def batches(count: int) -> list[Tensor]:
    """Ids [B, F] with a long tail; which ids are hot drifts slowly."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(count):
        u = torch.rand(BATCH, FEATURES, generator=generator, dtype=torch.float64)
        rank = ((ROWS ** (1 - 1.15) - 1) * u + 1) ** (1 / (1 - 1.15))
        found.append(((rank.floor().long() - 1).clamp(0, ROWS - 1) * 2654435761 + step // 50 * 97) % ROWS)
    return found


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def new_tables(rows: int, memory: str, ssd: str | None) -> Any:
    return hotbed.EmbeddingTables(
        {f"f{i}": hotbed.Table(rows // FEATURES, DIM, hashing=True) for i in range(FEATURES)},
        hotbed.optim.RowwiseAdagrad(lr=0.05),
        hbm=HBM,
        memory=memory,
        ssd=ssd,
    )


def run(memory: str, ssd: str | None, steps: int) -> Found:
    """Train; speed over the second half."""
    loader = batches(steps)
    for ids in hotbed.prefetch(
        loader[:60], small := new_tables(2**16, memory, ssd and f"{ssd.rpartition(':')[0]}0:64MiB")
    ):
        small(ids).backward(
            torch.zeros(BATCH, FEATURES, DIM)
        )  # compiled code and buffers of batches are there from now on
    del small
    before = resident()
    tables = new_tables(ROWS, memory, ssd)
    (group,) = tables.caches
    grad = torch.full((BATCH, FEATURES, DIM), 1e-3)
    speeds, start, most = [], time.perf_counter(), 0
    counts: Any = None
    for step, ids in enumerate(hotbed.prefetch(loader, tables, look_ahead=AHEAD), start=1):
        tables(ids).backward(grad)
        if step == len(loader) // 2 and isinstance(group.store, TieredStore):
            counts = group.store.counts
        if step % 25 == 0:
            now = time.perf_counter()
            if step > len(loader) // 2:
                speeds.append(25 * BATCH / (now - start))
            start, most = now, max(most, resident() - before)
    share = 1.0
    if isinstance(group.store, TieredStore):
        asked = group.store.counts.minus(counts)
        share = asked.from_memory / max(1, asked.asked)
    keys = torch.arange(0, ROWS, 101)
    tables.flush()
    rows = torch.empty(keys.shape[0], group.layout.width)
    group.store.read(keys, rows)
    checksum = int(rows.view(torch.int32).to(torch.int64).sum())
    group.store.close()
    return Found(memory, statistics.median(speeds), share, most, checksum)


def aside(memory: str, ssd: str | None, steps: int) -> Found:
    """In a process of its own, whose memory nobody used before."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, (memory, ssd, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="append one row per run to this file")
    parser.add_argument("--steps", type=int, default=1000, help="of every run (%(default)s)")
    args = parser.parse_args()
    aside("2GiB", None, 100)  # compiles
    whole = aside("2GiB", None, args.steps)
    print(
        f"all rows in memory: {whole.samples_per_s:,.0f} samples/s, {in_words(whole.resident_bytes)} resident",
        flush=True,
    )
    missed = False
    for memory in MEMORY:
        with tempfile.TemporaryDirectory() as folder:
            found = aside(memory, f"{folder}/rows:4GiB", args.steps)
        assert found.checksum == whole.checksum, "rows differ"
        ratio = found.samples_per_s / whole.samples_per_s
        over = found.resident_bytes / (parse_bytes(memory, "memory") + parse_bytes(HBM, "hbm"))
        print(
            f"memory={memory}: {found.samples_per_s:,.0f} samples/s = {ratio:.2f} of all in memory; memory had "
            f"{100 * found.from_memory:.1f} % of the rows; {in_words(found.resident_bytes)} resident, {over:.2f} of budget",
            flush=True,
        )
        missed |= found.from_memory >= 0.95 and ratio < BAR
        if args.csv:
            new = not args.csv.exists()
            with args.csv.open("a", newline="") as file:
                writer = csv.writer(file)
                if new:
                    writer.writerow([*Found._fields, "ratio"])
                writer.writerow([*found, round(ratio, 3)])
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
