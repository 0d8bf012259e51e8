"""Lookups a second of the simulator, one core: `python -m benchmarks.simulate [--batches 200] [--csv FILE.csv]`, two minutes.

Every policy and the optimum, over the demo's click log (batch 4,096) and a Zipf 1.05 stream over Criteo-Kaggle's tables (batch
16,384), at caches of 0.5, 1.5, 5 and 20 % of the rows; those that hold no batch are left out. Lookups are those of training:
26 a sample, duplicates removed batch by batch. Time is the better of two rounds; preparing the trace is reported separately,
once for all caches. Exits with 1 if anything is below 5 million lookups/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import numba
import torch

from benchmarks.results_file import append_rows
from benchmarks.traces import zipf_trace
from hotbed.data.dataset import hot_rows, num_warm
from hotbed.data.embedded import resolve
from hotbed.forecast.optimum import optimum
from hotbed.forecast.replay import Replay, simulate
from hotbed.forecast.trace import TraceSource, hottest_of, read_trace

SHARES = (0.005, 0.015, 0.05, 0.2)
POLICIES = ("oracle", "lfu", "lru", "static")
BAR = 5e6


def traces(num_batches: int) -> Iterator[tuple[str, TraceSource]]:
    """The streams."""
    dataset = resolve("criteo-like")
    trace = read_trace(dataset, batch_size=4096, shuffle=True, max_batches=num_batches)
    yield "criteo-like", TraceSource(trace, [], [], lambda size: hot_rows(dataset, size))
    trace = zipf_trace(max(1, num_batches // 4))
    yield "Zipf 1.05", TraceSource(trace, [], [], lambda size: hottest_of(trace, size))


def seconds(work: Callable[[], object], rounds: int = 2) -> float:
    """The better round."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def measure(name: str, given: TraceSource) -> Iterator[dict[str, object]]:
    """A row for every cache and policy."""
    trace = given.trace
    replay = Replay(trace)
    for policy in POLICIES:  # compiles
        simulate(
            Replay(trace),
            trace.most_keys,
            policy,
            hot=given.hot(num_warm(trace.most_keys, "static", 0)) if policy == "static" else None,
        )
    ready = seconds(lambda: Replay(trace))
    print(
        f"{name}: {trace.num_batches} batches, {trace.num_lookups:,} lookups, {trace.keys.shape[0]:,} distinct keys of"
    )
    print(f"  batches, {trace.num_rows:,} rows; made ready at {trace.num_lookups / ready / 1e6:.1f} million lookups/s")
    for share in SHARES:
        num_slots = round(share * trace.num_rows)
        if num_slots < trace.most_keys:
            continue
        hot = given.hot(num_warm(num_slots, "static", 0))
        for policy in (*POLICIES, "optimum"):

            def work(policy: str = policy, num_slots: int = num_slots, hot: object = hot) -> object:
                if policy == "optimum":
                    return optimum(trace, num_slots)
                return simulate(replay, num_slots, policy, hot=hot if policy == "static" else None)  # type: ignore[arg-type]

            speed = trace.num_lookups / seconds(work)
            print(f"  {100 * share:5.1f} %  {policy:8} {speed / 1e6:6.1f} million lookups/s", flush=True)
            yield {"trace": name, "cache": share, "slots": num_slots, "policy": policy, "lookups_per_s": round(speed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--batches", type=int, default=200, help="of the click log; the Zipf stream has a quarter of it"
    )
    parser.add_argument("--csv", help="append one row per result to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    rows = [row for name, given in traces(args.batches) for row in measure(name, given)]
    if args.csv:
        append_rows(args.csv, rows)
    slow = [row for row in rows if int(str(row["lookups_per_s"])) < BAR]
    print(f"{len(rows) - len(slow)} of {len(rows)} at {BAR / 1e6:g} million lookups/s or more")
    raise SystemExit(1 if slow else 0)


if __name__ == "__main__":
    main()
