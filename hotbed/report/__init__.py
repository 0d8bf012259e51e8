"""A run directory in, one self-contained page out: what was asked, how it learned, how good it is, what the data is like.

A run with a cache also shows what the cache did, one over an ssd what the tiers did, and one with dynamic ids what became of
them. The page is written from files alone, so it can be written again at any
time, on any machine, also for a run that was cut off. It loads nothing from anywhere and holds no time stamp: equal run
directories give equal pages.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hotbed.errors import RunError
from hotbed.report.page import render
from hotbed.report.read import read_run

__all__ = ["write_report"]


def write_report(run_dir: Path) -> Path:
    """Write run_dir/report.html in one step and return its path; RunError when run_dir is not a run."""
    page = render(read_run(run_dir)).encode("utf-8", "replace")
    path, temporary = run_dir / "report.html", run_dir / "report.html.tmp"
    try:
        temporary.write_bytes(page)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise RunError(
            f"{path} cannot be written: {error.strerror}. Free some space or make the directory writable; "
            "`hotbed report` writes the page later."
        ) from error
    return path
