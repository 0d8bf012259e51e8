"""The speed bars of one GPU, all in one process: `python -m benchmarks.gpu_bars [--only outputs] [--csv FILE.csv]`.

Runs `hotbed bench` over the settings the bars name, every row written beforehand, hotbed compared with FBGEMM, and says of
each bar whether it is met. A host is not equally fast from second to second, and half of all settings wait for it: so every
bar is judged by the median of the ratios of three rounds. Stopped with Ctrl-C it judges by what was measured. Exits with 1 if
a bar is missed or could not be measured.
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
from hotbed.bench.run import Skip, ids_key, run
from hotbed.bench.setting import Setting

HBM, CACHED = "hotbed-hbm", "hotbed-cached"
FBGEMM, FBGEMM_CACHE = (
    "fbgemm-hbm",
    "fbgemm-lru-managed",
)  # the second is the best of its caches wherever we measured all
SYSTEMS = (FBGEMM, FBGEMM_CACHE, HBM, CACHED)
ANCHOR = Setting(torch.device("cuda", 0))
MLP = 1024
BAGS = replace(ANCHOR, ids="bags", batch=4096, cache=0.05)
LARGE = replace(ANCHOR, dim=64, batch=65536, cache=0.05)
HARD = replace(ANCHOR, batch=32768, cache=0.03, zipf=0.9)
ADAM = replace(ANCHOR, optimizer="adam")
SMALL = replace(ANCHOR, dim=64)

Results = dict[tuple[Setting, str], Result]  # of one round


class Bar(NamedTuple):
    """A limit on hotbed's time over another's at a setting."""

    part: str  # of the bars, for --only
    about: str
    setting: Setting
    system: str
    other: tuple[Setting, str]
    limit: float

    def measure(self, results: Results) -> float:
        """The ratio in one round; KeyError if one of the two is lacking."""
        return results[self.setting, self.system].ms / results[self.other].ms


def _over_peer(part: str, setting: Setting, system: str, peer: str, limit: float) -> Bar:
    where = f"dim {setting.dim}, batch {setting.batch:,}, {100 * setting.cache:g} %"
    behind = ", MLP" if setting.dense else ""
    about = f"{system} over {peer}: {setting.optimizer}, {setting.ids}, Zipf {setting.zipf:g}, {where}{behind}"
    return Bar(part, about, setting, system, (setting, peer), limit)


def _bars() -> list[Bar]:
    widths = (0, MLP)
    bars = [
        _over_peer("single", replace(ANCHOR, dim=dim, dense=dense), CACHED, FBGEMM, 1.0)
        for dim in (128, 64, 32)
        for dense in widths
    ]
    bars += [_over_peer("single", replace(ANCHOR, dim=dim), HBM, FBGEMM, 0.6) for dim in (128, 64, 32)]
    bars += [_over_peer("large", replace(LARGE, dense=dense), CACHED, FBGEMM, 1.0) for dense in widths]
    bars.append(_over_peer("hard", HARD, CACHED, FBGEMM_CACHE, 0.6))
    bars.append(_over_peer("adam", ADAM, CACHED, FBGEMM_CACHE, 0.6))
    bars.append(_over_peer("adam", replace(ADAM, dense=MLP), CACHED, FBGEMM, 1.1))
    for kind in ("bags", "varying"):
        alone = replace(BAGS, ids=kind)
        bars.append(_over_peer("bags", alone, HBM, FBGEMM, 0.8))
        bars.append(_over_peer("bags", alone, CACHED, FBGEMM_CACHE, 0.7))
        bars.append(_over_peer("bags", replace(alone, dense=MLP), CACHED, FBGEMM, 1.1))
    kinds = {
        "dynamic ids over preset ones": ("dynamic", replace(SMALL, ids="dynamic"), 1.25),
        "nine tenths of the rows in memory (95 % of the misses), the others on an ssd, over all in memory": (
            "ssd",
            replace(SMALL, ssd=0.9),
            1.25,
        ),
        "one rank over no ranks": ("ranks", replace(SMALL, ranks=1), 1.15),
    }
    bars += [Bar(part, about, one, CACHED, (SMALL, CACHED), limit) for about, (part, one, limit) in kinds.items()]
    for output in ("concat", "dict"):
        for dense in widths:
            one, stack = replace(ANCHOR, output=output, dense=dense), replace(ANCHOR, dense=dense)
            about = f"output {output} over stack{', MLP' if dense else ''}"
            bars += [
                Bar("outputs", f"{system}, {about}", one, system, (stack, system), 1.15) for system in (HBM, CACHED)
            ]
    return bars


BARS = _bars()
PARTS = tuple(dict.fromkeys(bar.part for bar in BARS))


class Verdict(NamedTuple):
    """A bar, judged."""

    bar: Bar
    values: list[float]  # of the rounds in which it could be measured

    @property
    def value(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def is_met(self) -> bool:
        return self.value is not None and self.value <= self.bar.limit

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.3f}"
        spread = f"{min(self.values):.3f} to {max(self.values):.3f}" if len(self.values) > 1 else ""
        verdict = "met   " if self.is_met else "MISSED"
        return f"{verdict}  {value:>12} of {self.bar.limit:<5} {spread:16s} {self.bar.about}"


def judge(rounds: Sequence[Results], bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """Every bar, by the rounds in which both of its measurements are."""
    verdicts = []
    for bar in bars:
        values = []
        for results in rounds:
            with suppress(KeyError):
                values.append(bar.measure(results))
        verdicts.append(Verdict(bar, values))
    return verdicts


def wanted(bars: Sequence[Bar]) -> dict[Setting, list[str]]:
    """The systems to time at every setting, peers first; settings of the same ids, dim and MLP follow each other."""
    found: dict[Setting, set[str]] = {}
    for bar in bars:
        for setting, system in (bar.other, (bar.setting, bar.system)):
            found.setdefault(setting, set()).add(system)
    kinds = {ids_key(setting): number for number, setting in enumerate(reversed(found))}
    order = sorted(found, key=lambda one: (-kinds[ids_key(one)], one.optimizer, -one.dim, one.dense))  # stable
    return {setting: [name for name in SYSTEMS if name in found[setting]] for setting in order}


def measure(bars: Sequence[Bar], results: Results, add: Callable[[Result], None]) -> None:
    """One round, into `results`."""
    for outcome in run(wanted(bars)):
        one = outcome.setting
        what = f"{one.optimizer}, {one.ids}, dim {one.dim}, batch {one.batch:,}, {one.output}, MLP {one.dense}"
        if isinstance(outcome, Skip):
            print(f"{outcome.system:20s} {what}  skipped: {outcome.reason}\n{outcome.trace}", flush=True)
            continue
        results[one, outcome.system] = outcome
        found = outcome.timing.where_rows_were
        print(f"{outcome.system:20s} {what}  {outcome.ms:.3f} ms{found}", flush=True)
        add(outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"parts of the bars, by comma: {', '.join(PARTS)}; left out: all")
    parser.add_argument("--csv", type=Path, help="append one row per result to this file")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    args = parser.parse_args()
    parts = args.only.split(",") if args.only else PARTS
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"--only {', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device, and these bars are of one; `hotbed bench --device cpu` times a CPU")
    file = CsvFile(args.csv, [*columns(ANCHOR), *environment(ANCHOR.device)]) if args.csv else None
    bars = [bar for bar in BARS if bar.part in parts]

    def add(result: Result) -> None:
        if file is not None:
            file.add({**result.row(), **environment(result.setting.device)})

    rounds: list[Results] = [{} for _ in range(args.rounds)]
    with suppress(KeyboardInterrupt):
        for results in rounds:
            measure(bars, results, add)
    verdicts = judge(rounds, bars)
    print(*verdicts, sep="\n")
    raise SystemExit(not all(verdict.is_met for verdict in verdicts))


if __name__ == "__main__":
    main()
