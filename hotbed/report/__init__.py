"""A run directory in, one self-contained page out: what was asked, how it learned, how good it is, what the data is like.

A run with a cache also shows what the cache did, one over an ssd what the tiers did, and one with dynamic ids what became of
them. Several directories in, one page that compares them. Pages are written from files alone, so they can be written again at
any time, on any machine, also for a run that was cut off. They load nothing from anywhere and hold no time stamp: equal run
directories give equal pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotbed.errors import RunError
from hotbed.host.atomic import write_file
from hotbed.report.compare import MOST_RUNS, compare
from hotbed.report.page import render
from hotbed.report.read import read_run

__all__ = ["write_comparison", "write_report"]


def write_report(run_dir: Path, path: Path | None = None) -> Path:
    """Write run_dir/report.html, or `path`, in one step and return where; RunError when run_dir is not a run."""
    page = render(read_run(run_dir))
    later = "Free some space or make the directory writable; `hotbed report` writes the page later."
    return _write(path or run_dir / "report.html", page, later)


def write_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write one page of several runs, the first of which is the base; RunError that names every folder that is no run."""
    if len(run_dirs) > MOST_RUNS:
        raise RunError(f"{len(run_dirs)} runs were given; a page compares at most {MOST_RUNS}. Leave some out.")
    runs, problems = [], []
    for folder in run_dirs:
        try:
            runs.append(read_run(folder))
        except RunError as error:
            problems.append(str(error))
    if problems:
        raise RunError("\n".join(problems))
    return _write(path, compare(runs), "Choose another place with --out.")


def _write(path: Path, page: str, way_out: str) -> Path:
    try:
        write_file(path, page.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}. {way_out}") from error
    return path
