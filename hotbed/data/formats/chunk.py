"""The output of every format: bounded chunks of raw columns, and the rows that could not be read.

Text is stored as spans of one buffer, so that a column of a text file and an Arrow string array look the same, and no Python
object is created per value. An empty span is a missing value.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

MAX_SHOWN = 500  # characters of a bad row that are kept


class Text(NamedTuple):
    """n strings: value i is data[starts[i]:ends[i]]."""

    data: np.ndarray  # uint8
    starts: np.ndarray  # int64 [n]
    ends: np.ndarray  # int64 [n]

    def string(self, i: int) -> str:
        return bytes(self.data[self.starts[i] : self.ends[i]]).decode(errors="replace")


class Integers(NamedTuple):
    """n integers, some of them missing."""

    values: np.ndarray  # int64 [n]
    missing: np.ndarray  # bool [n]


class Unsigned(Integers):
    """Integers from 0 to 2**64 - 1, stored as the int64 of the same bits."""

    @property
    def numbers(self) -> np.ndarray:
        """Uint64 [n]."""
        return self.values.view(np.uint64)


class Floats(NamedTuple):
    """n numbers; NaN is missing."""

    values: np.ndarray  # float64 [n]


class HashedText(NamedTuple):
    """n strings, given by their 64-bit ids (data/hash.py)."""

    ids: np.ndarray  # int64 [n]


class Instants(NamedTuple):
    """n points in time, some of them missing; only for the time column."""

    micros: np.ndarray  # int64 [n], since 1970
    missing: np.ndarray  # bool [n]


class Lists(NamedTuple):
    """n bags: row i owns values[offsets[i]:offsets[i + 1]]."""

    offsets: np.ndarray  # int64 [n + 1], starts at 0
    values: Text | Integers | Floats


Scalar = Text | Integers | Floats
Column = Scalar | Lists | HashedText | Instants

NOT_UTF8 = "not UTF-8"  # why a row is bad
OPEN_QUOTE = "a quote is not closed on its line"


def to_utf8(file: str) -> str:
    """How to convert a file of another encoding."""
    return (
        f"Convert it: iconv -f latin1 -t utf-8 {shlex.quote(file)} > utf8.csv (use its actual encoding: latin1, cp1252, "
        "gbk, shift_jis; decompress the file first)."
    )


class Reel(NamedTuple):
    """Part of a file that can be read independently: bytes of text, or row groups. Lines and rows are counted from 1."""

    begin: int = 0
    end: int | None = None  # None: to the end of the file
    first_line: int = 1
    num_bytes: int = 0  # on disk, of the whole reel


WHOLE = Reel()
REEL_BYTES = 64 << 20  # of text, or of decompressed columns


class BadRow(NamedTuple):
    """A row that cannot become a sample. `reason` is one of few; `text` shows the row."""

    file: str
    line: int  # from 1; the row number for Parquet and Arrow
    reason: str
    text: str


@dataclass(frozen=True)
class Chunk:
    """Rows of one file, in file order, without the bad ones."""

    file: str
    columns: dict[str, Column]
    lines: np.ndarray  # int64 [n], from 1
    show: Callable[[int], str]  # row -> its raw text, for the quarantine
    bad: list[BadRow]
    bytes_read: int  # on disk, from the start of the reel to the end of this chunk
    unread: tuple[str, ...] = ()  # columns of the file that were not read


class Format(Protocol):
    """Turns a path into chunks. `typed`: text columns hold strings; otherwise text may also hold numbers (CSV).

    The reels of a file are contiguous: together they hold every row once, in order.
    """

    name: str
    typed: bool

    def reels(self, path: Path) -> Iterator[Reel]: ...

    def chunks(self, path: Path, reel: Reel = WHOLE) -> Iterator[Chunk]: ...


class Faults:
    """Which of n rows are bad and why; the first reason found is kept."""

    def __init__(self, n: int) -> None:
        self._codes = np.zeros(n, dtype=np.int32)
        self._reasons = [""]

    def mark(self, rows: np.ndarray, reason: str) -> None:
        """`rows` (bool [n]) are bad for this reason."""
        fresh = rows & (self._codes == 0)
        if fresh.any():
            self._codes[fresh] = len(self._reasons)
            self._reasons.append(reason)

    @property
    def good(self) -> np.ndarray:
        good: np.ndarray = self._codes == 0
        return good

    @property
    def any(self) -> bool:
        return len(self._reasons) > 1

    def bad_rows(self, file: str, lines: np.ndarray, show: Callable[[int], str]) -> list[BadRow]:
        return [
            BadRow(file, int(lines[i]), self._reasons[self._codes[i]], shorten(show(int(i))))
            for i in np.flatnonzero(self._codes)
        ]


def take(column: Column, keep: np.ndarray) -> Column:
    """The rows where `keep` (bool [n]) is true."""
    if isinstance(column, Text):
        return Text(column.data, column.starts[keep], column.ends[keep])
    if isinstance(column, Integers):
        return type(column)(column.values[keep], column.missing[keep])
    if isinstance(column, Floats):
        return Floats(column.values[keep])
    if isinstance(column, HashedText):
        return HashedText(column.ids[keep])
    if isinstance(column, Instants):
        return Instants(column.micros[keep], column.missing[keep])
    lengths = np.diff(column.offsets)
    values = take(column.values, np.repeat(keep, lengths))
    assert not isinstance(values, Lists | HashedText | Instants)
    return Lists(offsets_of(lengths[keep]), values)


def num_values(column: Column) -> int:
    """n, the number of rows of a column."""
    if isinstance(column, Text):
        return len(column.starts)
    if isinstance(column, Lists):
        return len(column.offsets) - 1
    return len(column[0])


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Running sum from 0: int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def shorten(text: str) -> str:
    """A row's text as the quarantine keeps it."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + f"... ({len(text)} characters)"
