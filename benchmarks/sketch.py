"""Sketches at their limit: `python -m benchmarks.sketch [--ids 2000000000] [--memory 64MiB] [--out FILE.csv]`, five minutes.

A stream of distinct ids, of which every hundredth is replaced by one of 1,000 frequent ones, goes through HyperLogLog and
through heavy hitters in the memory given, on two threads whose halves are merged. Reported: the estimate of distinct ids
compared with the truth, the error the sketch states, whether every frequent id was found and within its bounds, ids a second,
and the time of a core that one takes.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit

from benchmarks.results_file import append_rows
from hotbed.data.prepare.sketches import STANDARD_ERROR, HeavyHitters, HyperLogLog
from hotbed.host.memory import parse_bytes
from hotbed.host.splitmix import mix

FREQUENT = 1000
EVERY = 100
PIECE = 1 << 22


@njit(nogil=True, cache=True)
def stream(begin: int, ids: np.ndarray) -> None:
    """Ids begin, begin + 1, ... of the stream: mixed numbers, so all distinct, and the frequent ones 0 .. 999 by turns."""
    for i in range(len(ids)):
        number = begin + i
        ids[i] = (
            number // EVERY % FREQUENT if number % EVERY == 0 else np.int64(mix(np.uint64(number) + np.uint64(1 << 40)))
        )


def sketch(begin: int, end: int, num_bytes: int) -> tuple[HyperLogLog, HeavyHitters]:
    distinct, heavy = HyperLogLog(), HeavyHitters(num_bytes)
    ids = np.empty(PIECE, dtype=np.int64)
    for at in range(begin, end, PIECE):
        piece = ids[: min(PIECE, end - at)]
        stream(at, piece)
        distinct.add(piece)
        heavy.add(piece)
    return distinct, heavy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=2_000_000_000, help="that go through both sketches (%(default)s)")
    parser.add_argument("--memory", default="64MiB", help="of each of the two sketches that are merged")
    parser.add_argument("--out", help="append results to this CSV file")
    given = parser.parse_args()
    num_bytes = parse_bytes(given.memory, "--memory")
    sketch(0, 1000, 1 << 20)  # loads the kernels
    started, used = time.perf_counter(), time.process_time()
    middle = given.ids // 2
    with ThreadPoolExecutor(2) as threads:
        halves = list(threads.map(lambda ends: sketch(*ends, num_bytes), [(0, middle), (middle, given.ids)]))
    (distinct, heavy), other = halves
    distinct.merge(other[0])
    heavy.merge(other[1])
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    numbered = -(-given.ids // EVERY)
    truth = given.ids - numbered + min(numbered, FREQUENT)
    estimate = distinct.estimate()
    counts = dict(zip(*(column.tolist() for column in heavy.items())))
    least = numbered // FREQUENT
    found = [id_ for id_ in range(FREQUENT) if counts.get(id_, 0) <= least + 1 <= counts.get(id_, 0) + heavy.error + 1]
    missed = [id_ for id_ in range(FREQUENT) if id_ not in counts]
    row = {
        "benchmark": "sketch",
        "ids": given.ids,
        "memory": given.memory,
        "distinct": truth,
        "estimate": round(estimate),
        "off_percent": round(100 * (estimate / truth - 1), 3),
        "standard_error_percent": round(100 * STANDARD_ERROR, 3),
        "stated_error": heavy.error,
        "promised_error": round(2 * heavy.total / heavy.capacity),
        "count_of_frequent": least,
        "frequent_missed": len(missed),
        "million_ids_per_second": round(given.ids / seconds / 1e6, 1),
        "cpu_ns_an_id": round(1e9 * cpu / given.ids),
    }
    for name, value in row.items():
        print(f"{name:24} {value:,}" if isinstance(value, int | float) else f"{name:24} {value}")
    if given.out:
        append_rows(given.out, [row])
    within = abs(estimate / truth - 1) < 4 * STANDARD_ERROR and heavy.error <= row["promised_error"]
    wrong = len(found) < FREQUENT or (bool(missed) and least > heavy.error)
    print("bounds hold" if within and not wrong else "BOUNDS BROKEN")
    raise SystemExit(not within or wrong)


if __name__ == "__main__":
    main()
