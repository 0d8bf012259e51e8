"""Where the time of a step behind a cache goes on the CPU: `python -m benchmarks.cache_step [--cache 0.015,0.15]`.

Tables of the demo's size (Criteo-Kaggle's 26, 2.3 M rows in all) behind caches of several sizes. The parts of a step run one
after the other on one thread of Python, as the pipeline would call them, with as many batches ahead as it would have. Caches
take turns of ten steps, so that a noisy machine hurts all alike. The index must be whole before anything is timed, and after.

    keys      ids -> keys                           read      missed rows from the store
    arrive    a batch ahead becomes known           exchange  victims leave their slots, misses take them
    begin     hits and misses of a window           write     victims to the store
    finish    victims chosen, lookups placed        lookup, update

Prints the median and the tenth percentile of every part, in milliseconds a batch, and what a step costs compared with the first
cache. With --threads 1 it is processor time, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import hotbed
from benchmarks.results_file import append_rows
from benchmarks.workload import batches as id_batches
from hotbed.bench.setting import ZIPF, scaled_rows
from hotbed.bench.systems import write_rows
from hotbed.cache import window_length
from hotbed.ops.lookups import Lookups, Ticket
from hotbed.tables.group.cached import ArrivedBatch
from hotbed.tables.inputs import flatten, read_inputs

PARTS = ("keys", "arrive", "begin", "finish", "read", "exchange", "write", "lookup", "update")
PLANNING = PARTS[:4]
_TURN = 10  # steps of one cache before the next one's
_MOST_BATCHES = 256  # drawn; a longer run uses them again


class CacheStep:
    """One cache, and the parts of its steps."""

    def __init__(self, share: float, rows: tuple[int, ...], dim: int, batches: list[torch.Tensor], policy: str) -> None:
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        tables = {f"C{i}": hotbed.Table(n, dim) for i, n in enumerate(rows)}
        self.tables = hotbed.EmbeddingTables(tables, hotbed.optim.Adagrad(lr=0.01), cache=share, policy=policy)
        self.group, self.rows = self.tables.groups[0], self.tables.caches[0]
        write_rows(self.rows)  # a miss is copied, and a victim finds its pages there
        self._ids, self._drawn = batches, 0
        self._grad = torch.randn(batches[0].numel(), dim) * 1e-3
        self._ahead: deque[tuple[Lookups, ArrivedBatch]] = deque()
        self._look_ahead = 1
        self.times: list[dict[str, float]] = []
        self._now: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = self._clock()
        yield
        self._now[part] = self._now.get(part, 0.0) + 1e3 * (self._clock() - began)

    def _arrive(self) -> None:
        ids = self._ids[self._drawn % len(self._ids)]
        self._drawn += 1
        with self.timed("keys"):
            given = read_inputs(self.tables.features, ids, None, self.tables.device)
            lookups = flatten(self.group, self.tables.group_inputs[0], given, True)
        with self.timed("arrive"):
            arrived = self.rows.arrive(lookups)
        self._ahead.append((lookups, arrived))

    def step(self) -> int:
        """One window; its batches."""
        if not self._ahead:
            self._arrive()
            self._look_ahead = self.rows.cache.look_ahead(self._ahead[0][1].arrival.num_keys, None)
        while len(self._ahead) < self._look_ahead:
            self._arrive()
        self._now = {}
        keys = [arrived.arrival.num_keys for _, arrived in list(self._ahead)[:2]]
        length = window_length(keys, self.rows.num_slots, None)
        window = [self._ahead.popleft()[1] for _ in range(length)]
        with self.timed("begin"):
            decision = self.rows.begin(window, True)
        with self.timed("finish"):
            fetch, placed = self.rows.finish(window, decision, Ticket(True))
        for part in ("read", "exchange", "write"):
            with self.timed(part):
                getattr(fetch, part)()
        for lookups in placed:
            with self.timed("lookup"):
                self.group.lookup(lookups)
            with self.timed("update"):
                self.group.update(lookups, self.tables.group_inputs[0].tables, self._grad, _Step())
        for _ in range(length):
            self._arrive()
        self.times.append({part: self._now.get(part, 0.0) / length for part in PARTS})
        return length

    def check(self) -> None:
        """The index is whole, and every row of the last window is in the slot of its key."""
        self.rows.cache.check_integrity()


class _Step:
    def taken(self) -> tuple[float, int]:
        return 0.01, 0


def measure(caches: list[CacheStep], steps: int, warmup: int) -> None:
    """So many steps of every cache, in turns, after others that warm it up."""
    for cache in caches:
        done = 0
        while done < warmup:
            done += cache.step()
        cache.check()
        cache.times.clear()
    for _ in range(0, steps, _TURN):
        for cache in caches:
            done = 0
            while done < _TURN:
                done += cache.step()
    for cache in caches:
        cache.check()


def table_of(shares: list[float], caches: list[CacheStep]) -> list[dict[str, object]]:
    """Printed; one row for each cache."""
    found: list[dict[str, object]] = []
    print(f"{'ms a batch, median (p10)':26s}" + "".join(f"{100 * share:>14g} %" for share in shares))
    sums: dict[str, list[float]] = {}
    for part in (*PARTS, "planning", "step"):
        cells = []
        for cache in caches:
            names = {"planning": PLANNING, "step": PARTS}.get(part, (part,))
            times = [sum(each[name] for name in names) for each in cache.times]
            sums.setdefault(part, []).append(statistics.median(times))
            cells.append(f"{statistics.median(times):8.2f} ({statistics.quantiles(times, n=10)[0]:.2f})")
        print(f"{part:26s}" + "".join(f"{cell:>16s}" for cell in cells))
    for i, (share, cache) in enumerate(zip(shares, caches)):
        counts = cache.rows.counters()
        line: dict[str, object] = {"benchmark": "cache_step", "cache": share, "slots": cache.rows.num_slots}
        line |= {f"{part}_ms": round(sums[part][i], 3) for part in sums}
        line |= {
            "misses_a_batch": round(counts.misses / counts.batches),
            "to_first": round(sums["step"][i] / sums["step"][0], 3),
        }
        print(
            f"{share:g}: {cache.rows.num_slots:,} slots, {counts.keys // counts.batches:,} distinct rows and "
            f"{counts.misses // counts.batches:,} misses a batch; a step is {line['to_first']}x that of {shares[0]:g}"
        )
        found.append(line)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", default="0.015,0.15", help="shares of the rows, comma-separated (%(default)s)")
    parser.add_argument("--policy", default="oracle", help="which rows stay (%(default)s)")
    parser.add_argument("--batch", type=int, default=4096, help="samples of a batch (%(default)s)")
    parser.add_argument("--dim", type=int, default=16, help="of the vectors (%(default)s)")
    parser.add_argument("--scale", type=float, default=0.067, help="of Criteo-Kaggle's rows (%(default)s)")
    parser.add_argument("--zipf", type=float, default=ZIPF, help="exponent of the ids (%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="timed, of each cache (%(default)s)")
    parser.add_argument("--warmup", type=int, default=60, help="steps before (%(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of torch and of kernels (torch's choice)")
    parser.add_argument("--out", default="", help="CSV file to append to")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    shares = [float(share) for share in args.cache.split(",")]
    rows, count = scaled_rows(args.scale), min(args.steps + args.warmup + 64, _MOST_BATCHES)
    batches = id_batches(rows, args.batch, count, exponent=args.zipf)
    caches = [CacheStep(share, rows, args.dim, batches, args.policy) for share in shares]
    measure(caches, args.steps, args.warmup)
    found = table_of(shares, caches)
    if args.out:
        append_rows(args.out, found)


if __name__ == "__main__":
    main()
