"""Our side of a claim: numbers from benchmarks/results, where they were measured, and a verdict."""

from __future__ import annotations

import csv
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

RESULTS = Path(__file__).parent.parent / "results"
Verdict = Literal[
    "reproduced", "shape reproduced", "not reproduced", "not reproducible here", "not measured", "not built"
]
H200 = "one H200, 16 cores"
TWO_CORES = "2 CPU cores"
BUSY = "2 CPU cores shared with other work"
Row = dict[str, str]


class Evidence(NamedTuple):
    """Our side of a claim."""

    ours: str
    where: str  # hardware
    verdict: Verdict
    why: str = ""


class Missing(NamedTuple):
    """A claim without a number of ours."""

    verdict: Verdict
    why: str

    def __call__(self) -> Evidence:
        return Evidence("", "", self.verdict, self.why)


class Checked(NamedTuple):
    """A claim that tests and --quick check, without a row in a file."""

    ours: str
    why: str = ""

    def __call__(self) -> Evidence:
        return Evidence(self.ours, "any CPU", "reproduced", self.why)


Source = Callable[[], Evidence]


@functools.cache
def rows_of(name: str) -> tuple[Row, ...]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return tuple(csv.DictReader(file))


def find(file: str, /, **wanted: str) -> list[Row]:
    """Rows whose columns have these values."""
    found = [row for row in rows_of(file) if all(row[column] == value for column, value in wanted.items())]
    assert found, f"{file}.csv has no row with {wanted}"
    return found


def mean(file: str, column: str, /, **wanted: str) -> float:
    return statistics.mean(float(row[column]) for row in find(file, **wanted))


def gpu(system: str, column: str = "ms_p50", benchmark: str = "training_step", **wanted: str) -> float:
    """The median on an H200, every row written before."""
    wanted = {"dim": "128", "batch": "16384", "ids": "single", **wanted}
    rows = find("h200_bars_written", benchmark=benchmark, system=system, **wanted)
    return statistics.median(float(row[column]) for row in rows if row["output"] in ("", "stack"))


def ms_of(row: Row, way: str, column: str = "ms_p50") -> float:
    """Of another way on the same nodes and links."""
    return float(find("cluster", nodes=row["nodes"], local=row["local"], gbit=row["gbit"], way=way)[0][column])
