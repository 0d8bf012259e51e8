"""Raw files in, chunks of columns and bad rows out; chosen by name or by inspecting the file.

    criteo    label, 13 integers, 26 hex strings, tab separated, no header
    csv       a header, then one row a line; any one-character delimiter
    parquet   Parquet, or Arrow (Feather, IPC)
    libsvm    label index:value ...
    lists     user item item ...

Text files may be compressed (.gz, .bz2, .xz, .zst, a .zip of one file).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from hotbed.data.formats.blocks import first_line, open_raw
from hotbed.data.formats.chunk import (
    BadRow,
    Chunk,
    Column,
    Floats,
    Format,
    HashedText,
    Instants,
    Integers,
    Lists,
    Reel,
    Scalar,
    Text,
)
from hotbed.data.formats.criteo import CriteoFormat
from hotbed.data.formats.csv import CsvFormat
from hotbed.data.formats.lines import LINE_FORMATS, LineFormat
from hotbed.data.formats.parquet import ParquetFormat
from hotbed.errors import ConfigError

FORMATS = ("criteo", "csv", "parquet", "libsvm", "lists")

__all__ = [
    "FORMATS",
    "BadRow",
    "Chunk",
    "Column",
    "Floats",
    "Format",
    "HashedText",
    "Instants",
    "Integers",
    "Lists",
    "Reel",
    "Scalar",
    "Text",
    "guess_format",
    "open_format",
]


def open_format(
    name: str,
    *,
    delimiter: str | None = None,
    wanted: Callable[[str], bool] = lambda _: True,
    label_optional: bool = False,
    hashed: bool = False,
    time: str | None = None,
    micros: bool = True,
) -> Format:
    """The reader called `name`. Columns not `wanted` may be left unread.

    `hashed`: strings may be returned as ids. `time` is the column whose dates and times are kept as times;
    `micros`: those of other columns are in microseconds.
    """
    if name == "criteo":
        return CriteoFormat("optional" if label_optional else "required", hashed)
    if name == "csv":
        return CsvFormat(delimiter)
    if name == "parquet":
        return ParquetFormat(wanted, time, micros=micros)
    if name in LINE_FORMATS:
        return LineFormat(name)
    raise ConfigError(f"format {name!r} is unknown. The formats are: {', '.join(FORMATS)}.")


def guess_format(path: Path) -> str:
    """Guess the format from the suffix and the first line."""
    suffixes = {suffix.lower() for suffix in path.suffixes}
    if suffixes & {".parquet", ".pq", ".arrow", ".feather", ".ipc"}:
        return "parquet"
    if suffixes & {".libsvm", ".svm", ".svmlight", ".libfm"}:
        return "libsvm"
    with open_raw(path) as raw:
        if raw.read(6).startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
            return "parquet"
    line = first_line(path)
    fields = line.split(b"\t")
    if len(fields) in (39, 40) and all(re.fullmatch(rb"-?\d*", field) for field in fields[:13]):
        return "criteo"
    if re.fullmatch(rb"[-+.\deE]+([ \t]+[^:\s,]+:[^:\s,]+)+\s*(#.*)?", line):
        return "libsvm"
    if re.fullmatch(rb"\d+( \d+)+ ?", line):
        return "lists"
    return "csv"
