"""How long a report takes to write and to open in headless Chromium, also of long runs.

    python -m benchmarks.report_page runs/cached                        its log as it is, and as 5,000 and 100,000 lines
    python -m benchmarks.report_page runs/cached --lines 20000

A run folder in, one line a page out: bytes, seconds to write it, and, best of some rounds, CPU seconds of the browser's main
thread and milliseconds by the clock, from navigation until a frame with all plots is painted. A long log is the run's own, its
lines of training again and again, each number off by up to 3 % so that no two are alike. The last page compares three of the
longest.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hotbed.report import write_comparison, write_report

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PAINTED = "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
POSITION = ("epoch", "step", "samples", "seconds")
UNDRAWN = """[...document.querySelectorAll("[data-plot] .series")]
  .filter((one) => !one.querySelector("circle, path.curve[d^=M]")).length"""


class Opened(NamedTuple):
    """One opening of a page."""

    cpu_seconds: float
    milliseconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder, such as runs/demo")
    parser.add_argument("--lines", type=int, nargs="*", default=[5000, 100_000], help="of long logs (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="how often a page is opened (%(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pages = dict(_pages(given.run, given.lines, Path(folder)))
        for name, page in pages.items():
            path, seconds = page
            print(f"{name:>24}  {path.stat().st_size / 1e6:6.2f} MB, written in {seconds:6.2f} s")
        for name, found in _open({name: path for name, (path, _) in pages.items()}, given.rounds).items():
            cpu, clock = min(one.cpu_seconds for one in found), min(one.milliseconds for one in found)
            print(f"{name:>24}  {cpu:6.3f} s CPU of the main thread, {clock:6.0f} ms by the clock")


def _pages(run: Path, lengths: list[int], folder: Path) -> Iterator[tuple[str, tuple[Path, float]]]:
    """(name, (page, seconds to write it))."""
    began = time.perf_counter()
    path = write_report(run, folder / "own.html")
    yield "the run", (path, time.perf_counter() - began)
    longest: list[Path] = []
    for length in lengths:
        longest = [
            _stretched(run, length, folder / f"{length}-{k}", k) for k in range(3 if length == max(lengths) else 1)
        ]
        began = time.perf_counter()
        path = write_report(longest[0])
        yield f"{length:,} lines", (path, time.perf_counter() - began)
    if longest:
        began = time.perf_counter()
        path = write_comparison(longest, folder / "compare.html")
        yield f"3 runs of {lengths[-1]:,} lines", (path, time.perf_counter() - began)


def _stretched(run: Path, length: int, to: Path, seed: int) -> Path:
    """A copy of the run's files whose log has that many lines of training."""
    to.mkdir()
    for name in ("config.json", "data.json", "summary.json"):
        if (run / name).exists():
            shutil.copy(run / name, to)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    if not train:
        raise SystemExit(f"{run} has no lines of training: give a run that has trained.")
    rng = random.Random(seed)
    with (to / "metrics.jsonl").open("w") as file:
        for n in range(length):
            position = {"epoch": 0, "step": n + 1, "samples": 100 * (n + 1), "seconds": n / 10}
            file.write(json.dumps({**_noisy(train[n % len(train)], rng), **position}) + "\n")
        for line in (line for line in lines if line["kind"] == "eval"):
            file.write(json.dumps({**line, "step": length, "samples": 100 * length, "seconds": length / 10}) + "\n")
    return to


def _noisy(tree: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found[name] = _noisy(value, rng)
        elif isinstance(value, float) and math.isfinite(value) and name not in POSITION:
            found[name] = value * rng.uniform(0.97, 1.0)
        else:
            found[name] = value
    return found


def _open(pages: dict[str, Path], rounds: int) -> dict[str, list[Opened]]:
    from playwright.sync_api import sync_playwright

    found: dict[str, list[Opened]] = {name: [] for name in pages}
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        raise SystemExit("there is no Chromium on this machine: install the package chromium.")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--headless", "--no-sandbox", "--disable-gpu"])
        for _ in range(rounds):  # in turns, so that other work on the machine hurts all alike
            for name, path in pages.items():
                found[name].append(_opened(browser, path))
        browser.close()
    return found


def _opened(browser: Any, path: Path) -> Opened:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    wire = page.context.new_cdp_session(page)
    wire.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        metrics = wire.send("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    before = spent()
    page.goto(path.as_uri())
    milliseconds = float(page.evaluate(PAINTED))
    cpu = spent() - before
    undrawn = page.evaluate(UNDRAWN)
    page.close()
    if undrawn:
        raise SystemExit(f"{path}: {undrawn} curves are not drawn")
    return Opened(cpu, milliseconds)


if __name__ == "__main__":
    main()
