"""Seconds to a given AUC: hotbed compared with FuxiCTR and DeepCTR-Torch, whole training runs on real data.

The peers live in an environment of their own, for their pins differ from hotbed's:

    python -m venv ~/peers
    ~/peers/bin/pip install torch==2.13.0 fuxictr==2.3.10 deepctr-torch==0.3.0
    python -m benchmarks.peers --fuxictr-python ~/peers/bin/python --deepctr-python ~/peers/bin/python

Every system gets the same rows and ids, dims, layers, batch size, Adam with the same rate, number of threads, and no L2.
Each trains in a process of its own, in turns, once for each seed; a system's time is the median over seeds. The clock runs
through reading and training and stands still while the valid split is scored. AUC is counted by one function for all. A
setting whose systems do not come within --close of each other's best AUC is not compared. Raw files are read from
HOTBED_DATA or ../shared/data.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.peers.job import Job
from benchmarks.peers.settings import SETTINGS, Setting, prepared
from benchmarks.results_file import append_rows
from hotbed.train.metrics import auc

BAR = 3.0
MODULES = {"hotbed": "run_hotbed", "fuxictr": "run_fuxictr", "deepctr": "run_deepctr"}


class Point(NamedTuple):
    """An evaluation: after which step, after how many seconds of training, how good."""

    step: int
    seconds: float
    auc: float


class Run(NamedTuple):
    """One system with one seed."""

    points: list[Point]
    start_up: float  # seconds from the start of the process to the first of training, evaluations left out
    versions: dict[str, str]

    @property
    def best(self) -> float:
        return max(point.auc for point in self.points)

    def seconds_to(self, target: float) -> float | None:
        return next((point.seconds for point in self.points if point.auc >= target), None)


def train(system: str, python: str, job: Job, folder: Path) -> Run:
    """One run in a process of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job.save(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    start = time.time()
    command = [python, "-m", f"benchmarks.peers.{MODULES[system]}", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{system} failed ({' '.join(command)}):\n{done.stderr[-2000:]}")
    result = json.loads((folder / "done.json").read_text())
    labels = job.columns("valid")["label"]
    points = []
    for point in result["points"]:
        scores = folder / f"scores_{point['step']}.npy"
        found = point["auc"] if "auc" in point else auc(labels, np.load(scores))
        points.append(Point(point["step"], point["seconds"], found))
    return Run(points, result["started"] - start, result["versions"])


def compare(name: str, setting: Setting, pythons: dict[str, str], options: argparse.Namespace) -> dict[str, list[Run]]:
    """Every system's runs of one setting, a seed after the other, taking turns."""
    folder = Path(options.folder)
    dataset = prepared(setting.data, folder)
    runs: dict[str, list[Run]] = {system: [] for system in pythons}
    for seed in range(options.seeds):
        job = setting.job(dataset, folder, seed, options.threads)
        for system, python in pythons.items():
            runs[system].append(train(system, python, job, folder / f"{name}-{system}"))
    return runs


def middle(runs: list[Run], target: float) -> float | None:
    """The median time to the target; None when most runs do not reach it."""
    times = sorted(run.seconds_to(target) or math.inf for run in runs)
    return None if math.isinf(times[len(times) // 2]) else times[len(times) // 2]


def judge(name: str, setting: Setting, runs: dict[str, list[Run]], close: float) -> list[dict[str, object]]:
    """Print one setting; its rows for the CSV."""
    best = {system: statistics.mean(run.best for run in of_seeds) for system, of_seeds in runs.items()}
    print(f"\n{name}: valid AUC {setting.target} (batch {setting.batch_size}, dim {setting.dim}, MLP {setting.hidden})")
    if max(best.values()) - min(best.values()) > close:
        print(f"  not compared: best AUCs are more than {close} apart: {best}")
        return []
    ours = middle(runs["hotbed"], setting.target)
    rows: list[dict[str, object]] = []
    for system, of_seeds in runs.items():
        seconds = middle(of_seeds, setting.target)
        rate = max(run.points[-1].step * setting.batch_size / run.points[-1].seconds for run in of_seeds)
        ratio = seconds / ours if seconds is not None and ours is not None else None
        start_up = min(run.start_up for run in of_seeds)
        row = {
            "setting": name,
            "system": system,
            "target": setting.target,
            "seeds": len(of_seeds),
            "seconds": None if seconds is None else round(seconds, 2),
            "hotbed_is_faster_by": None if ratio is None else round(ratio, 2),
            "mean_best_auc": round(best[system], 5),
            "samples_per_s": round(rate),
            "start_up_s": round(start_up, 1),
        }
        rows.append(row)
        reached = "not reached" if seconds is None else f"{seconds:9.2f} s"
        print(
            f"  {system:8s} {reached}  {'' if ratio is None else f'{ratio:.2f}x':>6s}  best {best[system]:.4f}"
            f"  {round(rate):>8,} samples/s  start-up {start_up:.1f} s",
            flush=True,
        )
    return rows


def main() -> None:
    options = parse()
    pythons = {"hotbed": sys.executable, "fuxictr": options.fuxictr_python, "deepctr": options.deepctr_python}
    pythons = {system: python for system, python in pythons.items() if python}
    rows: list[dict[str, object]] = []
    for name in options.only or SETTINGS:
        setting = SETTINGS[name]
        runs = compare(name, setting, pythons, options)
        rows += judge(name, setting, runs, options.close)
        drawn = {system: [point[1:] for point in of_seeds[0].points] for system, of_seeds in runs.items()}
        (Path(options.folder) / f"{name}.json").write_text(json.dumps(drawn))
    judged = [row for row in rows if row["system"] != "hotbed" and SETTINGS[str(row["setting"])].in_bar]
    faster = [ratio for row in judged if isinstance(ratio := row["hotbed_is_faster_by"], float)]
    if faster:
        verdict = "met" if min(faster) >= BAR else "missed"
        print(f"\nhotbed is at least {min(faster)}x as fast (bar {BAR}x: {verdict})")
    if options.out:
        append_rows(options.out, [{"benchmark": "peers", "threads": options.threads, **row} for row in rows])
    if options.plot:
        Path(options.plot).write_text(plot_of(Path(options.folder)))


def plot_of(folder: Path) -> str:
    """The plot of all settings that were compared in this folder, now or before."""
    panels = {}
    for name in SETTINGS:
        if (folder / f"{name}.json").exists():
            drawn = json.loads((folder / f"{name}.json").read_text())
            panels[name] = [Line(system, points) for system, points in drawn.items()]
    return write_plot(panels, {name: SETTINGS[name].target for name in panels})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fuxictr-python", default="", help="Python that has fuxictr; without it FuxiCTR is left out")
    parser.add_argument("--deepctr-python", default="", help="Python that has deepctr-torch; likewise")
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), help="some settings only")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every system; the median time counts")
    parser.add_argument("--threads", type=int, default=2, help="of every system")
    parser.add_argument("--close", type=float, default=0.005, help="most that best AUCs may be apart")
    parser.add_argument("--folder", default="data-cache/peers", help="where datasets and runs are put")
    parser.add_argument("--out", default="", help="CSV file to append to")
    parser.add_argument("--plot", default="", help="SVG file of AUC over seconds, of all settings under --folder")
    return parser.parse_args()


COLOURS = {"hotbed": "#c2571a", "fuxictr": "#2f77c0", "deepctr": "#3d9463"}
NAMES = {"hotbed": "hotbed", "fuxictr": "FuxiCTR", "deepctr": "DeepCTR-Torch"}
WIDTH, HEIGHT, GAP_X, GAP_Y = 300, 150, 70, 60  # of a panel, and between panels
STYLE = (
    "text{font:11px sans-serif;fill:#333}.title{font-weight:bold}.axis{stroke:#999}"
    ".target{stroke:#999;stroke-dasharray:4 3}.paper{fill:#fff}polyline{fill:none;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.paper{fill:#131416}.axis,.target{stroke:#777}}"
)


class Line(NamedTuple):
    """One system's run."""

    system: str
    points: Sequence[tuple[float, float]]  # seconds, AUC


def write_plot(panels: Mapping[str, Sequence[Line]], targets: Mapping[str, float]) -> str:
    """Two panels in a row."""
    rows = -(-len(panels) // 2)
    width, height = 2 * (WIDTH + GAP_X) + 20, rows * (HEIGHT + GAP_Y) + 20
    parts = []
    for i, (name, lines) in enumerate(panels.items()):
        x, y = 60 + i % 2 * (WIDTH + GAP_X), 26 + i // 2 * (HEIGHT + GAP_Y)
        parts.append(f'<g transform="translate({x} {y})">{_panel(name, lines, targets[name])}</g>')
    label = "Valid AUC over seconds of training, one panel for each dataset and model"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f'<style>{STYLE}</style><rect class="paper" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _panel(name: str, lines: Sequence[Line], target: float) -> str:
    most_x = max(x for line in lines for x, _ in line.points)
    ys = [y for line in lines for _, y in line.points if y > target - 0.05] + [target]
    low, high = min(ys), max(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        return round(x / most_x * WIDTH, 1), round(HEIGHT * (1 - (y - low) / ((high - low) or 1)), 1)

    parts = [f'<text class="title" x="0" y="-10">{name}</text>']
    parts.append(f'<path class="axis" fill="none" d="M0 0V{HEIGHT}H{WIDTH}"/>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">{most_x:.1f} s</text>')
    parts.append(f'<text x="-6" y="4" text-anchor="end">{high:.3f}</text>')
    parts.append(f'<text x="-6" y="{HEIGHT}" text-anchor="end">{low:.3f}</text>')
    _, height = at(0, target)
    parts.append(f'<path class="target" d="M0 {height}H{WIDTH}"/>')
    parts.append(f'<text x="{WIDTH}" y="{height - 4}" text-anchor="end">target {target}</text>')
    for i, line in enumerate(lines):
        shown = " ".join("{},{}".format(*at(x, y)) for x, y in line.points if y >= low)
        parts.append(f'<polyline stroke="{COLOURS[line.system]}" points="{shown}"/>')
        where = f'x="{i * 95}" y="{HEIGHT + 28}"'
        parts.append(f'<text {where} style="fill:{COLOURS[line.system]}">{NAMES[line.system]}</text>')
    return "".join(parts)


if __name__ == "__main__":
    main()
