"""Text files of a click log: one file, or a folder with a file for every day.

In: a log and a range of rows. Out: files that are renamed into place when complete, generated and rendered by several threads
in chunks of 16 MB. A folder records its settings; a killed job resumes after the last finished day.

`render`: rows of a click log in, bytes rendered by Numba out, as Criteo's text (tab-separated: label, integers, ids as 8 hex
digits, empty where missing) or as Avazu's (CSV with a header: row number, label, hour as YYMMDDHH, ids as 8 hex digits). An
id's name is a bijection of its number within the column, so two ids of a column never share a name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotbed.data.formats.chunk import Text
from hotbed.data.hash import MISSING_ID as MISSING_HASH
from hotbed.data.hash import hash_text
from hotbed.data.synthetic.generate import ClickLog, ClickRows
from hotbed.data.synthetic.kernels import MISSING_ID, MISSING_INTEGER
from hotbed.data.synthetic.shapes import SHAPES, Shape
from hotbed.errors import ConfigError, DataError, without_room
from hotbed.host.atomic import put, write_file
from hotbed.host.jit import njit
from hotbed.host.threads import run_ahead

NAME = 8  # bytes of an id's name
FIRST_HOUR = 14102100  # 2014-10-21, midnight
_DIGITS = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint8).reshape(256, 2)
CHUNK = 1 << 16
SAMPLE = 1000  # rows to estimate the length of lines
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
    """Write the first `num_rows` rows, one file per day, in order; existing days are kept."""
    check_text(log.shape)
    folder = Path(folder)
    _check_folder(folder, log, num_rows)
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
    """Raise a ConfigError for a log that has no text format."""
    if not shape.text:
        raise ConfigError(
            f"{shape.name} has bags, for which there is no text format. Write a dataset directory: --out DIR."
        )


def _check_room(folder: Path, log: ClickLog, num_rows: int) -> None:
    """Raise a DataError before anything is written if the disk is too small."""
    if not folder.is_dir():
        return  # opening the file reports it
    rows = log.rows(0, SAMPLE)
    needed, free = len(render(log.shape, rows, 0)) / SAMPLE * num_rows, shutil.disk_usage(folder).free
    if needed > free:
        raise without_room(
            DataError,
            f"{folder} has {free / 1e9:,.1f} GB free; the text of {num_rows:,} rows takes {needed / 1e9:,.1f} GB. "
            "Write it to another disk, or generate fewer rows.",
        )


def _check_folder(folder: Path, log: ClickLog, num_rows: int) -> None:
    """Record the settings of the folder, or check that they are the same."""
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


def header(shape: Shape) -> bytes:
    """The header line, if the format has one."""
    return (
        b"" if shape.text == "criteo" else ",".join(["id", shape.label, *(c.name for c in shape.ids)]).encode() + b"\n"
    )


def render(shape: Shape, rows: ClickRows, first: int) -> NDArray[np.uint8]:
    """The rows as text, one line each; `first` is the number of the first one."""
    num_rows, clock = len(rows.labels), np.asarray([column.clock for column in shape.ids])
    if shape.text == "criteo":
        longest = 2 + 12 * len(shape.integers) + (NAME + 1) * len(shape.ids)  # integers have up to 11 characters
        out = np.empty(num_rows * longest, dtype=np.uint8)
        return out[: _render_criteo(rows.labels, rows.integers, rows.ids, out)]
    out = np.empty(num_rows * (20 + 3 + (NAME + 1) * len(shape.ids)), dtype=np.uint8)
    return out[: _render_avazu(rows.labels, rows.ids, clock, first, out)]


def raw_ids(shape: Shape, column: int, ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """The 64-bit ids that these ids of a column get when their text is read; int64 [n]."""
    names = np.empty((len(ids), NAME), dtype=np.uint8)
    _names(column, shape.ids[column].clock, ids, names)
    starts = np.arange(0, NAME * len(ids), NAME, dtype=np.int64)
    hashes = hash_text(Text(names.reshape(-1), starts, starts + NAME))
    return np.asarray(np.where(ids == MISSING_ID, MISSING_HASH, hashes))


@njit(nogil=True, inline="always")
def _name(column: int, id_: np.int64 | int) -> np.uint32:
    """A bijection of 32-bit numbers for every column: odd multiplications and shifts."""
    mask = np.uint64(0xFFFFFFFF)
    word = (np.uint64(id_) + np.uint64(0x9E3779B9) * np.uint64(column + 1)) & mask
    word = ((word ^ (word >> np.uint64(16))) * np.uint64(0x7FEB352D)) & mask
    word = ((word ^ (word >> np.uint64(15))) * np.uint64(0x846CA68B)) & mask
    return np.uint32(word ^ (word >> np.uint64(16)))


@njit(nogil=True, inline="always")
def _put_name(column: int, id_: np.int64 | int, out: NDArray[np.uint8], at: int) -> None:
    name = _name(column, id_)
    for place in range(4):
        byte = (name >> np.uint32(24 - 8 * place)) & np.uint32(255)
        out[at + 2 * place] = _DIGITS[byte, 0]
        out[at + 2 * place + 1] = _DIGITS[byte, 1]


@njit(nogil=True, inline="always")
def _put_hour(hour: np.int64 | int, out: NDArray[np.uint8], at: int) -> None:
    _put_integer(FIRST_HOUR + 100 * (hour // 24) + hour % 24, out, at)


@njit(nogil=True, cache=True)
def _names(column: int, clock: bool, ids: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
    for i in range(len(ids)):
        if clock:
            _put_hour(np.int64(ids[i]), out[i], 0)
        else:
            _put_name(column, np.int64(ids[i]), out[i], 0)


@njit(nogil=True, inline="always")
def _put_integer(value: np.int64 | int, out: NDArray[np.uint8], at: int) -> int:
    """Write the decimal digits; returns the position after them."""
    if value < 0:
        out[at] = 45
        at += 1
        value = -value
    power = 1
    while power <= value // 10:
        power *= 10
    while power > 0:
        out[at] = 48 + value // power % 10
        at += 1
        power //= 10
    return at


@njit(nogil=True, cache=True)
def _render_criteo(
    labels: NDArray[np.float32], integers: NDArray[np.int32], ids: NDArray[np.int32], out: NDArray[np.uint8]
) -> int:
    at = 0
    for row in range(len(labels)):
        out[at] = 49 if labels[row] > 0.5 else 48
        at += 1
        for column in range(integers.shape[0]):
            out[at] = 9
            at += 1
            if integers[column, row] != MISSING_INTEGER:
                at = _put_integer(np.int64(integers[column, row]), out, at)
        for column in range(ids.shape[0]):
            out[at] = 9
            at += 1
            if ids[column, row] != MISSING_ID:
                _put_name(column, np.int64(ids[column, row]), out, at)
                at += NAME
        out[at] = 10
        at += 1
    return at


@njit(nogil=True, cache=True)
def _render_avazu(
    labels: NDArray[np.float32], ids: NDArray[np.int32], clock: NDArray[np.bool_], first: int, out: NDArray[np.uint8]
) -> int:
    at = 0
    for row in range(len(labels)):
        at = _put_integer(np.int64(first + row), out, at)
        out[at] = 44
        out[at + 1] = 49 if labels[row] > 0.5 else 48
        at += 2
        for column in range(ids.shape[0]):
            out[at] = 44
            if clock[column]:
                _put_hour(np.int64(ids[column, row]), out, at + 1)
            else:
                _put_name(column, np.int64(ids[column, row]), out, at + 1)
            at += NAME + 1
        out[at] = 10
        at += 1
    return at
