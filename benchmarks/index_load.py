"""The cache's index where it is fullest: `python -m benchmarks.index_load`, about four minutes on an H200.

Batches of uniform ids, hardly one of which comes twice, through a recorded cache (as training on CUDA does) over an index
whose bytes are a budget: keys in slots and keys of the batches ahead fill 0.9 of its cells, and every window takes new ones.
Every window must end within --limit, put every lookup in the slot of its key, and leave an index that is whole; the buckets
that a search for a new key passes are counted at the end. Exits with 1 if one does not. Without a CUDA device only
`python -m benchmarks.index_load --tiny` runs, under Triton's interpreter: a few windows of the same, in a minute.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

_NUM_IDS = 10**8
_WINDOW = 2
_CHECKED_EVERY = 200  # windows


class Case(NamedTuple):
    """One cache, and batches of one size."""

    num_slots: int
    batch: int
    windows: int


class Outcome(NamedTuple):
    """What became of a case."""

    load: float  # share of cells in use
    marked: float  # share of buckets that a search does not stop at
    passed: float  # buckets that a search for a new key looks at, on average
    longest: int
    milliseconds: list[float]  # by window
    grown: bool


def cases(tiny: bool) -> Iterator[Case]:
    for num_slots in (128,) if tiny else (20_000, 100_000):
        for share in (32, 16) if tiny else (128, 64, 32):
            yield Case(num_slots, num_slots // share, 40 if tiny else 2_000)


class Stream:
    """A recorded cache, and batches for it that stay where they are until they are planned."""

    def __init__(self, case: Case, device: torch.device) -> None:
        from hotbed.cache import Cache, bounded_cells
        from hotbed.cache.policies import ORACLE
        from hotbed.cache.recorded_planner import RecordedCache
        from hotbed.ops.index import new_cells, triton
        from hotbed.ops.inputs import Capacity, InputLayout, describe_ids
        from hotbed.ops.inputs.triton import Descriptions
        from hotbed.ops.keys import Addresses

        self.cache = Cache(case.num_slots, ORACLE, device, bounded=True, name="the cache of this benchmark")
        self.cache.index.cells = new_cells(bounded_cells(case.num_slots, "cuda"), device)  # as small without CUDA, too
        self.cache._ops = self.cache.index._ops = triton
        addresses = Addresses(*(np.array([value]) for value in (0, _NUM_IDS, False, False, 0)))
        self._describe = describe_ids
        inputs = Descriptions(InputLayout(addresses, is_bags=False), device)
        self.recorded = RecordedCache(self.cache, inputs, Capacity(case.batch, case.batch), _WINDOW)
        self._draw = torch.Generator(device).manual_seed(0)
        self._case, self._device = case, device
        self.look_ahead = self.cache.look_ahead(case.batch, None)
        self.waiting = [self.next() for _ in range(self.look_ahead)]
        for ids in self.waiting:
            self.recorded.arrive(self._describe(ids))
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)  # lookups in another slot than their key's

    def next(self) -> torch.Tensor:
        return torch.randint(0, _NUM_IDS, (self._case.batch,), generator=self._draw, device=self._device)

    def plan(self) -> None:
        """A window's turn, while as many batches arrive."""
        window, new = self.waiting[:_WINDOW], [self.next() for _ in range(_WINDOW)]
        self.waiting = self.waiting[_WINDOW:] + new
        _, placed = self.recorded.plan(_WINDOW, [self._describe(ids) for ids in new])
        cells, slots = self.cache.parts()
        for ids, row in zip(window, placed):
            there = cells.key[slots.cell[row.slots.to(torch.int64)].to(torch.int64)]
            self.wrong += (there != ids).sum() + (row.slots < 0).sum()

    def check(self) -> None:
        self.recorded.settle()
        self.cache.check_integrity()
        assert int(self.wrong) == 0, f"{int(self.wrong)} lookups are in another slot than their key's"


def passed_buckets(spilled: torch.Tensor) -> tuple[float, int]:
    """(mean, most) of the buckets that a search for a key without a cell looks at, from every home."""
    marks = (spilled != 0).cpu().numpy()
    if marks.all():
        return float(marks.size), int(marks.size)
    stops = np.flatnonzero(~np.concatenate([marks, marks]))
    lengths = stops[np.searchsorted(stops, np.arange(marks.size))] - np.arange(marks.size) + 1
    return float(lengths.mean()), int(lengths.max())


def run(case: Case, device: torch.device, limit: float) -> Outcome:
    stream = Stream(case, device)
    num_cells = stream.cache.parts()[0].key.shape[0]
    milliseconds = []
    for window in range(case.windows):
        faulthandler.dump_traceback_later(limit, exit=True)  # the only way to see a kernel that never ends
        began = time.perf_counter()
        stream.plan()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        milliseconds.append(1e3 * (time.perf_counter() - began))
        faulthandler.cancel_dump_traceback_later()
        if window % _CHECKED_EVERY == _CHECKED_EVERY - 1:
            stream.check()
    stream.check()
    cells = stream.cache.parts()[0]
    return Outcome(
        load=stream.cache.index.num_live / cells.key.shape[0],
        marked=float((cells.spilled != 0).double().mean()),
        passed=passed_buckets(cells.spilled)[0],
        longest=passed_buckets(cells.spilled)[1],
        milliseconds=milliseconds,
        grown=cells.key.shape[0] > num_cells,
    )


def line(case: Case, outcome: Outcome) -> str:
    times = sorted(outcome.milliseconds[len(outcome.milliseconds) // 20 :])  # kernels compile and are recorded first
    return (
        f"{case.num_slots:7,} slots, batches of {case.batch:5,}: {case.windows:,} windows ended, load {outcome.load:.2f}"
        f"{', GROWN' if outcome.grown else ''}, {outcome.marked:.2f} of buckets marked, a search for a new key passes "
        f"{outcome.passed:.1f} ({outcome.longest} at most), a window takes {statistics.median(times):.2f} ms "
        f"(p99 {times[int(0.99 * (len(times) - 1))]:.2f}, most {times[-1]:.2f})"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small cache and few windows; also runs on a CPU")
    parser.add_argument("--windows", type=int, help="windows of each case, instead of 2,000 (40 where --tiny)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a window is given up (60)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        if not options.tiny:
            print("there is no CUDA device; --tiny runs under Triton's interpreter", file=sys.stderr)
            return 1
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    for case in cases(options.tiny):
        case = case._replace(windows=options.windows or case.windows)  # noqa: PLW2901
        print(line(case, run(case, device, options.limit)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
