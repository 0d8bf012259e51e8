"""The id traces that cache policies are judged on: four real logs in file order, and Zipf 1.05 over Criteo-Kaggle's tables.

Real files are looked for in one directory (docs/benchmarks.md lists their names); they are prepared like any
raw log, so a cache's share counts the rows that training would have.
"""

from __future__ import annotations

import csv
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import KAGGLE_ROWS, batches
from hotbed.data.dataset import Dataset, HotRows, hot_rows, num_warm
from hotbed.data.prepare.prepare import prepare
from hotbed.forecast.trace import Trace, hottest_of, read_trace, trace_of


class Log(NamedTuple):
    """A real log: its file, and how it becomes a dataset."""

    file: str
    prepare: Callable[[Path, Path], object]


def _gowalla(raw: Path, out: Path) -> object:
    """One line per user, `user item item ...`, becomes one row per pair; the label is made up."""
    pairs = out.parent / "gowalla.csv"
    with lzma.open(raw, "rt") as lines, pairs.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "user", "item"])
        for line in lines:
            user, *items = line.split()
            writer.writerows([1, user, item] for item in items)
    return prepare([pairs], out, ids=["user", "item"])


LOGS = {
    "criteo": Log("criteo_60k.tsv.xz", lambda raw, out: prepare([raw], out)),
    "avazu": Log("avazu_9k.csv.xz", lambda raw, out: prepare([raw], out, label="click", ids=["*"], drop=["id"])),
    "frappe": Log("frappe_train.csv.xz", lambda raw, out: prepare([raw], out, label="label", ids=["*"])),
    "gowalla": Log("gowalla_train.txt.xz", _gowalla),
}


class Case(NamedTuple):
    """A cache and a batch size at which a batch takes between a twentieth and all of it."""

    share: float
    batch_size: int


CASES = {
    "criteo": [*(Case(0.005, n) for n in (8, 16, 32)), *(Case(0.015, n) for n in (8, 16, 32, 64, 128))]
    + [Case(0.05, n) for n in (32, 64, 128, 256, 512)],
    "avazu": [*(Case(0.015, n) for n in (8, 16)), *(Case(0.05, n) for n in (8, 16, 32, 64))],
    "frappe": [Case(0.015, 8), *(Case(0.05, n) for n in (8, 16, 32, 64))],
    "gowalla": [*(Case(0.005, n) for n in (16, 32, 64, 128, 256)), *(Case(0.015, n) for n in (64, 128, 256, 512, 1024))]
    + [Case(0.05, n) for n in (256, 512, 1024, 2048)],
}
ZIPF_CASES = [Case(share, 16384) for share in (0.005, 0.015, 0.05)]


def prepared(name: str, data: Path, work: Path) -> Dataset:
    """The dataset of a real log, made in `work`."""
    raw = data / LOGS[name].file
    if not raw.exists():
        raise SystemExit(
            f"{raw} is not there. docs/benchmarks.md says where raw files come from; --data names their folder"
        )
    LOGS[name].prepare(raw, work / name)
    return Dataset.open(work / name)


def real_trace(dataset: Dataset, batch_size: int) -> Trace:
    """The log as it is on file."""
    return read_trace(dataset, batch_size=batch_size, shuffle=False)


def zipf_trace(num_batches: int, batch_size: int = 16384) -> Trace:
    """One Zipf 1.05 id per feature, as in the speed benchmarks."""
    base = np.cumsum([0, *KAGGLE_ROWS[:-1]])

    def lookups() -> Iterator[NDArray[np.int64]]:
        for seed in range(num_batches):
            (ids,) = batches(KAGGLE_ROWS, batch_size, 1, seed=seed)
            yield (ids.numpy() + base).ravel()

    return trace_of(lookups(), sum(KAGGLE_ROWS))


def hot_of(trace: Trace, num_slots: int, dataset: Dataset | None) -> HotRows:
    """The rows that the static policy keeps: by the dataset's counts, or for a synthetic trace by its own."""
    warm = num_warm(num_slots, "static", 0.0)
    return hottest_of(trace, warm) if dataset is None else hot_rows(dataset, warm)
