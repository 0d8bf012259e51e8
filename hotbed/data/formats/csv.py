"""CSV with a header: one line per row, values perhaps in double quotes, `,` or another one-character delimiter.

All columns are text; their meaning (label, number, id) is decided by the caller. A quoted value may hold delimiters and doubled
quotes but no line break: an unclosed quote makes only its own line bad.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from hotbed.data.formats.blocks import TextBlock, first_line, read_blocks, text_reels
from hotbed.data.formats.chunk import NOT_UTF8, WHOLE, Chunk, Column, Reel, to_utf8
from hotbed.data.formats.split import show_span, split_block
from hotbed.errors import ConfigError, FormatError

DELIMITERS = ",\t;|"
MAX_COLUMNS = 10_000
_VALUE = re.compile(r"[-+]?\d+(\.\d+)?|\d{4}-\d\d-\d\d.*")  # what is hardly the name of a column


class CsvFormat:
    name = "csv"
    typed = False

    def __init__(self, delimiter: str | None = None) -> None:
        if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\0'):
            replaced = f" Replace it first: {to_one_character(delimiter, 'FILE')}" if len(delimiter) > 1 else ""
            raise ConfigError(f"delimiter {delimiter!r} is not one plain character such as , ; | or a tab.{replaced}")
        self._delimiter = delimiter

    def reels(self, path: Path) -> Iterator[Reel]:
        return text_reels(path)

    def chunks(self, path: Path, reel: Reel = WHOLE) -> Iterator[Chunk]:
        names: list[str] = []
        delimiter = self._delimiter or guess_delimiter(first_line(path))
        if reel.begin:
            names, _ = _header(next(read_blocks(path)), path, delimiter)
        for block in read_blocks(path, reel=reel):
            if not names:
                names, rows_block = _header(block, path, delimiter)
            else:
                rows_block = block
            rows = split_block(rows_block, str(path), len(names), delimiter, quote=True)
            columns: dict[str, Column] = dict(zip(names, rows.text))
            show = partial(show_span, rows_block.data, rows.begins, rows.ends)
            yield Chunk(str(path), columns, rows.lines, show, rows.bad, block.bytes_read)
        if not names:
            raise FormatError(f"{path} is empty: a CSV file needs a header line with the column names.")


def guess_delimiter(header: bytes) -> str:
    """The delimiter that occurs most often in the header; a comma when none does."""
    return max(DELIMITERS, key=lambda delimiter: header.count(delimiter.encode()))


def _header(block: TextBlock, path: Path, delimiter: str) -> tuple[list[str], TextBlock]:
    """Column names, and the rest of the block."""
    data = block.data
    start, line = 0, block.first_line
    while True:  # blank lines before the header
        breaks = np.flatnonzero(data[start:] == ord("\n"))
        end = start + int(breaks[0]) if len(breaks) else len(data)
        text = data[start:end].tobytes().rstrip(b"\r")
        if text or end >= len(data):
            break
        start, line = end + 1, line + 1
    if not text:
        raise FormatError(f"{path} is empty: a CSV file needs a header line with the column names.")
    if text.lstrip().startswith((b"{", b"[{")):
        raise FormatError(f"{path} is JSON, which prepare does not read. {_from_json(path)}")
    num_columns = text.count(delimiter.encode()) + 1
    if num_columns > MAX_COLUMNS:
        raise FormatError(
            f"{path}: the header (line {line}) has {num_columns:,} columns; at most {MAX_COLUMNS:,} are read. "
            "Put values of one kind into one column and read it with --multi, or use libsvm."
        )
    for count in range(num_columns, 0, -1):  # quoted names may hold delimiters
        rows = split_block(TextBlock(data[start:end], line, 0), str(path), count, delimiter, quote=True)
        if not rows.bad or not rows.bad[0].reason.startswith("fewer"):
            break
    if rows.bad:
        way_out = f". {to_utf8(str(path))}" if rows.bad[0].reason == NOT_UTF8 else ""
        raise FormatError(
            f"{path}: the header (line {line}) cannot be read: {rows.bad[0].reason}: {rows.bad[0].text!r}{way_out}"
        )
    if b"\r" in text:
        made = f"tr '\\r' '\\n' < {shlex.quote(str(path))} > lines.csv"
        raise FormatError(f"{path}: its lines end with a carriage return alone. Make newlines of them first: {made}")
    names = [column.string(0).strip() for column in rows.text]
    _check_names(names, path)
    return names, TextBlock(data[end + 1 :], line + 1, block.bytes_read)


def _check_names(names: list[str], path: Path) -> None:
    empty = [str(i + 1) for i, name in enumerate(names) if not name]
    if empty:
        index = (
            " The first one is perhaps the index of a pandas frame, which to_csv(..., index=False) leaves out; to name it "
            f"instead: sed '1s/^/row/' {shlex.quote(str(path))} > named.csv, then --drop row."
        )
        way_out = no_header_hint(names, path) or (index if empty == ["1"] else "")
        raise FormatError(
            f"{path}: column {', '.join(empty)} has no name in the header. Every column needs one.{way_out}"
        )
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise FormatError(
            f"{path}: the header names {', '.join(twice)} more than once. Column names must differ."
            f"{no_header_hint(names, path)}"
        )


def no_header_hint(names: Sequence[str], file: str | Path) -> str:
    """The way out if the first line holds values instead of names; empty if it looks like names."""
    if any("::" in name for name in names):
        return f" Columns are separated by ::. Replace it first: {to_one_character('::', str(file))}"
    if not any(_VALUE.fullmatch(name) for name in names):
        return ""
    return (
        " Is the first line data? A CSV file needs one with names: "
        f"(echo 'a,b,c'; cat {shlex.quote(str(file))}) > named.csv, with your names."
    )


def to_one_character(delimiter: str, file: str) -> str:
    """A command that makes tabs of a delimiter of several characters."""
    return f"sed {shlex.quote(f's/{delimiter}/' + chr(92) + 't/g')} {shlex.quote(file)} > tabs.tsv"


def _from_json(path: Path) -> str:
    code = f"import pyarrow.json as j, pyarrow.parquet as p; p.write_table(j.read_json({str(path)!r}), 'log.parquet')"
    return f"Convert it, one object per line: python -c {shlex.quote(code)}"
