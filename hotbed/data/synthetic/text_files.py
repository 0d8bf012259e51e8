"""Text files of a click log: one file, or a folder with a file for every day.

In: a log and a range of rows. Out: files that appear whole or not at all, drawn and rendered by several threads, a chunk of
16 MB each. A folder remembers what it is made of; a job that was killed goes on after the last day it finished.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotbed.data.synthetic.generate import ClickLog
from hotbed.data.synthetic.shape import Shape
from hotbed.data.synthetic.shapes import SHAPES
from hotbed.data.synthetic.text import header, render
from hotbed.errors import ConfigError, DataError
from hotbed.host.ahead import run_ahead
from hotbed.host.atomic import put, write_file

CHUNK = 1 << 16
SAMPLE = 1000  # rows that tell how long lines are
SETTINGS = ".made-of.json"

Report = Callable[[int], None]  # rows done since the last report


def write_tsv(path: str | Path, start: int, stop: int, seed: int = 0, threads: int = 2) -> int:
    """Write rows start .. stop - 1 of the seed's Criteo-like log as text; returns the number of bytes."""
    return write_text(path, ClickLog(SHAPES["criteo-like"], seed), start, stop, threads=threads)


def write_text(
    path: str | Path, log: ClickLog, start: int, stop: int, *, threads: int = 2, report: Report | None = None
) -> int:
    """Write rows start .. stop - 1 of a log as text; returns the number of bytes."""
    check_text(log.shape)
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    _check_room(path.parent, log, stop - start)
    ranges = [(low, min(low + CHUNK, stop)) for low in range(start, stop, CHUNK)]

    def draw(pair: tuple[int, int]) -> tuple[int, NDArray[np.uint8]]:
        return pair[1] - pair[0], render(log.shape, log.rows(*pair), pair[0])

    try:
        with partial.open("wb") as file:
            written = file.write(header(log.shape))
            for rows, text in run_ahead(draw, ranges, threads=threads, ahead=threads):
                written += file.write(text.data)
                if report is not None:
                    report(rows)
        put(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error
    return written


def write_days(
    folder: str | Path, log: ClickLog, num_rows: int, *, threads: int = 2, report: Report | None = None
) -> list[Path]:
    """Write the first `num_rows` rows, a file for every day, in order; days that are there already are kept."""
    check_text(log.shape)
    folder = Path(folder)
    _settle(folder, log, num_rows)
    suffix = "tsv" if log.shape.text == "criteo" else "csv"
    starts = range(0, num_rows, log.rows_per_day)
    _check_room(folder, log, num_rows - log.rows_per_day * len(list(folder.glob("day_*"))))
    width = max(2, len(str(len(starts) - 1)))  # by name is by day
    files = []
    for day, start in enumerate(starts):
        path, stop = folder / f"day_{day:0{width}d}.{suffix}", min(start + log.rows_per_day, num_rows)
        if not path.exists():
            write_text(path, log, start, stop, threads=threads, report=report)
        elif report is not None:
            report(stop - start)
        files.append(path)
    return files


def check_text(shape: Shape) -> None:
    """A ConfigError for a log whose text no reader knows."""
    if not shape.text:
        raise ConfigError(
            f"{shape.name} has bags, for which there is no raw text. Make a dataset directory: --out DIR."
        )


def _check_room(folder: Path, log: ClickLog, num_rows: int) -> None:
    """A DataError before anything is written where the disk cannot take the text."""
    if not folder.is_dir():
        return  # opening the file says so
    rows = log.rows(0, SAMPLE)
    needed, free = len(render(log.shape, rows, 0)) / SAMPLE * num_rows, shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{folder} has {free / 1e9:,.1f} GB free; the text of {num_rows:,} rows takes {needed / 1e9:,.1f} GB. "
            "Write it to another disk, or make fewer rows."
        )


def _settle(folder: Path, log: ClickLog, num_rows: int) -> None:
    """Note what the folder is made of, or see that it is made of just that."""
    known = {
        "name": log.shape.name,
        "generation": log.shape.generation,
        "seed": log.seed,
        "rows": num_rows,
        "rows_per_day": log.rows_per_day,
    }
    note = folder / SETTINGS
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; the text of several days needs a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = json.loads(note.read_text()) if note.is_file() else None
        if found is None and any(folder.iterdir()):
            raise ConfigError(f"{folder} holds other files. Choose a new or an empty folder for the text.")
        if found is not None and found != known:
            differing = ", ".join(
                f"{key} {found.get(key)!r}, not {known[key]!r}" for key in known if found.get(key) != known[key]
            )
            raise ConfigError(
                f"{folder} holds the text of another log ({differing}). Choose another folder, or empty it."
            )
        if found is None:
            write_file(note, json.dumps(known))
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{folder} cannot hold the text: {error}.") from error
