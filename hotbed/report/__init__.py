"""A run directory in, one self-contained page out: settings, learning curves, metrics and the data.

A run with a cache also shows what the cache did, a run over an ssd what the tiers did, and a run with dynamic ids how many ids
came and went. Several directories in, one page that compares them. Pages are made from files only, so they can be written
again at any time, on any machine, even for a run that was interrupted. They load nothing and hold no time stamp: equal run
directories give equal pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotbed.errors import RunError
from hotbed.host.atomic import write_file
from hotbed.report.compare import MOST_RUNS, compare
from hotbed.report.read import read_run
from hotbed.report.sections import render

__all__ = ["read_run", "write_comparison", "write_report"]


def write_report(run_dir: Path, path: Path | None = None) -> Path:
    """Write run_dir/report.html, or `path`, atomically and return its path; RunError if run_dir is not a run."""
    page = render(read_run(run_dir))
    later = "Free some space or make the directory writable; `hotbed report` writes the page later."
    return _write(path or run_dir / "report.html", page, later)


def write_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write one page that compares runs with the first one; a RunError names every folder that is not a run."""
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
