"""Misses of every policy compared with the optimum: `python -m benchmarks.policies [--data DIR] [--zipf-batches 300]`.

Runs the cache that trains over the traces of benchmarks/traces.py and prints the tables of docs/decisions/0003-policies.md.
Exits with 1 if the default policy misses its bar: at most 1.10 times the optimum with up to 1.5 % of the rows, 1.2 with 5 %.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.traces import CASES, ZIPF_CASES, Case, hot_of, prepared, real_trace, zipf_trace
from hotbed.cache import DEFAULT_POLICY, POLICIES
from hotbed.data.dataset import Dataset
from hotbed.forecast.optimum import optimum
from hotbed.forecast.replay import simulate
from hotbed.forecast.trace import Trace

ORDER = sorted(POLICIES, key=lambda name: (name != DEFAULT_POLICY, name))


def bar(share: float) -> float:
    """How many times the optimum the default policy may miss."""
    return 1.10 if share <= 0.015 else 1.20


def measure(name: str, case: Case, trace: Trace, dataset: Dataset | None) -> tuple[str, bool]:
    """(a line of the table, whether the default policy meets its bar)."""
    num_slots = round(case.share * trace.num_rows)
    fewest = optimum(trace, num_slots)
    ratios = {}
    for policy in ORDER:
        hot = hot_of(trace, num_slots, dataset) if policy == "static" else None
        ratios[policy] = simulate(trace, num_slots, policy, hot=hot).misses / fewest
    taken = trace.keys.shape[0] / trace.num_batches / num_slots
    new = trace.distinct().shape[0] / fewest
    cells = [name, f"{100 * case.share:g} %", f"{case.batch_size:,}", f"{taken:.2f}"]
    cells += [f"{fewest / trace.num_batches:,.0f}", f"{100 * new:.0f} %", *(f"{ratios[one]:.3f}" for one in ORDER)]
    return f"| {' | '.join(cells)} |", ratios[DEFAULT_POLICY] <= bar(case.share)


def measure_all(data: Path | None, num_zipf: int) -> Iterator[tuple[str, bool]]:
    """Every line of the tables."""
    if data is not None:
        with tempfile.TemporaryDirectory() as work:
            for name, cases in CASES.items():
                dataset = prepared(name, data, Path(work))
                for case in cases:
                    yield measure(name, case, real_trace(dataset, case.batch_size), dataset)
    if num_zipf:
        trace = zipf_trace(num_zipf)
        for case in ZIPF_CASES:
            yield measure("Zipf 1.05", case, trace, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of the real logs; left out: Zipf alone")
    parser.add_argument("--zipf-batches", type=int, default=300, help="length of the Zipf trace; 0: none")
    args = parser.parse_args()
    print(f"| trace | cache | batch | batch / cache | optimum | new rows | {' | '.join(ORDER)} |")
    print("|---|---|---|---|---|---|" + "---|" * len(ORDER))
    missed = 0
    for line, meets in measure_all(args.data, args.zipf_batches):
        missed += not meets
        print(line + ("" if meets else " <- over the bar"), flush=True)
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
