"""The speed bars of one GPU, all in one process: `python -m benchmarks.gpu_bars [--csv FILE.csv]`, eight minutes on an H200.

Runs `hotbed bench` over the settings the bars name, FBGEMM beside hotbed, and says of each bar whether it is met. A host is not
equally fast from second to second, and half of all settings wait for it: so every bar is judged by the median of the ratios of
three rounds, each of two measurements seconds apart. Exits with 1 if a bar is missed or could not be measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from hotbed.bench.results import CsvFile, Result, columns, environment
from hotbed.bench.run import Skip, run
from hotbed.bench.setting import Setting

SYSTEMS = ("fbgemm-hbm", "fbgemm-lru-managed", "hotbed-hbm", "hotbed-cached")
ANCHOR = Setting(torch.device("cuda", 0))
CASES = (("rowwise_adagrad", 128), ("adam", 128), ("rowwise_adagrad", 64), ("rowwise_adagrad", 32))
SMALL_BATCH = [replace(ANCHOR, optimizer=name, dim=dim, dense=dense) for name, dim in CASES for dense in (0, 1024)]
LARGE_BATCH = [replace(ANCHOR, dim=64, batch=65536, cache=0.05, dense=dense) for dense in (0, 1024)]


class Bar(NamedTuple):
    """A limit on hotbed's time over a peer's, or on another figure."""

    about: str
    holds_for: Callable[[Setting], bool]
    measure: Callable[[dict[str, Result]], float]  # from the results of one setting; KeyError if one is lacking
    limit: float


def _over(ours: str, theirs: str) -> Callable[[dict[str, Result]], float]:
    return lambda results: results[ours].ms / results[theirs].ms


def _stall(results: dict[str, Result]) -> float:
    share = results["hotbed-cached"].timing.stall_share
    return float("nan") if share is None else share


BARS = (
    Bar(
        "row-wise Adagrad, cached, with the MLP: over FBGEMM in HBM",
        lambda one: one.optimizer == "rowwise_adagrad" and one.dense > 0,
        _over("hotbed-cached", "fbgemm-hbm"),
        1.0,
    ),
    Bar(
        "row-wise Adagrad, cached, embedding step: over FBGEMM in HBM",
        lambda one: one.optimizer == "rowwise_adagrad" and not one.dense,
        _over("hotbed-cached", "fbgemm-hbm"),
        1.2,
    ),
    Bar(
        "Adam, cached, with the MLP: over FBGEMM in HBM",
        lambda one: one.optimizer == "adam" and one.dense > 0,
        _over("hotbed-cached", "fbgemm-hbm"),
        1.1,
    ),
    Bar(
        "Adam, cached, embedding step: over FBGEMM's best cache",
        lambda one: one.optimizer == "adam" and not one.dense,
        _over("hotbed-cached", "fbgemm-lru-managed"),
        0.6,
    ),
    Bar(
        "every row in HBM, embedding step: over FBGEMM in HBM",
        lambda one: not one.dense,
        _over("hotbed-hbm", "fbgemm-hbm"),
        0.6,
    ),
    Bar("cached, with the MLP: share of time stalled", lambda one: one.dense > 0, _stall, 0.05),
)


class Verdict(NamedTuple):
    bar: Bar
    setting: Setting
    values: list[float]  # of the rounds in which it could be measured

    @property
    def value(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def is_met(self) -> bool:
        return self.value is not None and self.value <= self.bar.limit

    def __str__(self) -> str:
        one = self.setting
        where = f"dim {one.dim}, batch {one.batch:,}, {100 * one.cache:g} %"
        value = "not measured" if self.value is None else f"{self.value:.3f}"
        spread = f"{min(self.values):.3f} to {max(self.values):.3f}" if len(self.values) > 1 else ""
        verdict = "met   " if self.is_met else "MISSED"
        return f"{verdict}  {value:>12} of {self.bar.limit:<5} {spread:16s} {self.bar.about} ({where})"


def judge(rounds: Sequence[Sequence[Result]], settings: Sequence[Setting]) -> list[Verdict]:
    """Every bar at every setting it holds for."""
    verdicts = []
    for bar in BARS:
        for setting in filter(bar.holds_for, settings):
            values = []
            for results in rounds:
                found = {result.system: result for result in results if result.setting == setting}
                with suppress(KeyError):
                    values.append(bar.measure(found))
            verdicts.append(Verdict(bar, setting, values))
    return verdicts


def measure(settings: Sequence[Setting], file: CsvFile | None) -> list[Result]:
    """One round."""
    results: list[Result] = []
    for outcome in run(settings, SYSTEMS):
        one = outcome.setting
        name = f"{outcome.system:20s} {one.optimizer:16s} dim {one.dim:3d} batch {one.batch:,} dense {one.dense:4d}"
        if isinstance(outcome, Skip):
            print(f"{name}  skipped: {outcome.reason}\n{outcome.trace}", flush=True)
            continue
        results.append(outcome)
        print(f"{name}  {outcome.ms:.3f} ms  {outcome.peak_bytes / 2**30:.2f} GiB", flush=True)
        if file:
            file.add({**outcome.row(), **environment(one.device)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="append one row per result to this file")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device, and these bars are of one; `hotbed bench --device cpu` times a CPU")
    file = CsvFile(args.csv, [*columns(ANCHOR), *environment(ANCHOR.device)]) if args.csv else None
    rounds = [
        [result for settings in (SMALL_BATCH, LARGE_BATCH) for result in measure(settings, file)]
        for _ in range(args.rounds)
    ]
    verdicts = judge(rounds, [*SMALL_BATCH, *LARGE_BATCH])
    print(*verdicts, sep="\n")
    raise SystemExit(not all(verdict.is_met for verdict in verdicts))


if __name__ == "__main__":
    main()
