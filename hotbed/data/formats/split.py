"""A block of delimited text in, spans of its values out: one Numba pass over the bytes.

Every line is one row. A quoted value may hold delimiters and doubled quotes but no line break, so a stray quote affects one row
and never the rest of the file; the line numbers of bad rows are exact. Blank lines are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hotbed.data.formats.blocks import TextBlock, first_line, read_blocks
from hotbed.data.formats.chunk import NOT_UTF8, OPEN_QUOTE, BadRow, Reel, Text, shorten
from hotbed.errors import FormatError
from hotbed.host.jit import njit

_NEWLINE, _RETURN = 10, 13
_FEW, _MANY, _OPEN, _AFTER, _NUL, _UTF8 = 1, 2, 3, 4, 5, 6


class SplitRows(NamedTuple):
    """The good rows of a block (columns C, rows n) and where every line lies."""

    text: list[Text]  # C columns of n values
    lines: np.ndarray  # int64 [n]
    begins: np.ndarray  # int64 [n], byte span of each row, for `show`
    ends: np.ndarray  # int64 [n]
    bad: list[BadRow]


def split_lines(path: Path, reel: Reel) -> Iterator[tuple[SplitRows, int]]:
    """The lines of a text file, each as one value, block by block; with the bytes read for each."""
    if not first_line(path):
        raise FormatError(f"{path} is empty: no rows to read.")
    for block in read_blocks(path, reel=reel):
        yield split_block(block, str(path), 1, "\n", quote=False), block.bytes_read


def split_block(block: TextBlock, file: str, num_columns: int, delimiter: str, quote: bool) -> SplitRows:
    """Split every line of `block` into `num_columns` values."""
    data = block.data
    max_rows = int(np.count_nonzero(data == _NEWLINE)) + 1
    starts = np.empty((num_columns, max_rows), dtype=np.int64)
    ends = np.empty((num_columns, max_rows), dtype=np.int64)
    lines = np.empty((3, max_rows), dtype=np.int64)  # number, begin, end of each row's line
    reasons = np.empty(max_rows, dtype=np.uint8)
    has_quotes = quote and bool((data == ord('"')).any())
    unquoted = data.copy() if has_quotes else data  # doubled quotes are removed in place
    quote_byte = ord('"') if has_quotes else -1
    careful = len(data) > 0 and (int(data.max()) >= 128 or int(data.min()) == 0)  # not plain ASCII
    n = _split(unquoted, block.first_line, ord(delimiter), quote_byte, careful, starts, ends, lines, reasons)
    good = reasons[:n] == 0
    bad = [
        BadRow(
            file,
            int(lines[0, i]),
            _reason(int(reasons[i]), num_columns),
            shorten(show_bytes(data[lines[1, i] : lines[2, i]])),
        )
        for i in np.flatnonzero(~good)
    ]
    if bad:
        text = [Text(unquoted, starts[c, :n][good], ends[c, :n][good]) for c in range(num_columns)]
        return SplitRows(text, lines[0, :n][good], lines[1, :n][good], lines[2, :n][good], bad)
    text = [Text(unquoted, starts[c, :n], ends[c, :n]) for c in range(num_columns)]
    return SplitRows(text, lines[0, :n], lines[1, :n], lines[2, :n], bad)


def show_bytes(data: np.ndarray) -> str:
    """Raw bytes as text that can be printed and stored in JSON."""
    return data.tobytes().decode(errors="backslashreplace").replace("\x00", "\\x00")


def show_span(data: np.ndarray, begins: np.ndarray, ends: np.ndarray, row: int) -> str:
    """The raw text of one row."""
    return show_bytes(data[begins[row] : ends[row]])


def _reason(code: int, num_columns: int) -> str:
    return {
        _FEW: f"fewer than {num_columns} columns",
        _MANY: f"more than {num_columns} columns",
        _OPEN: OPEN_QUOTE,
        _AFTER: "text after a closing quote",
        _NUL: "a NUL byte",
        _UTF8: NOT_UTF8,
    }[code]


@njit(nogil=True, cache=True)
def _split(
    data: np.ndarray,
    first_line: int,
    delimiter: int,
    quote: int,
    careful: bool,
    starts: np.ndarray,
    ends: np.ndarray,
    lines: np.ndarray,
    reasons: np.ndarray,
) -> int:
    num_columns = starts.shape[0]
    size = len(data)
    row = 0
    line = first_line
    begin = 0
    while begin < size:  # ends: begin moves past the end of the line
        end = begin
        column = 0
        value = begin
        reason = 0
        if quote < 0:
            while end < size and data[end] != _NEWLINE:
                if data[end] == delimiter:
                    if column < num_columns:
                        starts[column, row] = value
                        ends[column, row] = end
                    column += 1
                    value = end + 1
                end += 1
        else:
            while end < size and data[end] != _NEWLINE:
                end += 1
        stop = end
        if stop > begin and data[stop - 1] == _RETURN:
            stop -= 1
        if stop > begin:
            fault = _check_bytes(data, begin, stop) if careful else 0  # before quotes are removed
            if quote < 0:
                if column < num_columns:
                    starts[column, row] = value
                    ends[column, row] = stop
                column += 1
            else:
                column, reason = _split_quoted(data, begin, stop, delimiter, quote, starts, ends, row)
            if reason == 0 and column != num_columns:
                reason = _FEW if column < num_columns else _MANY
            lines[0, row] = line
            lines[1, row] = begin
            lines[2, row] = stop
            reasons[row] = fault or reason  # bad bytes explain the rest
            row += 1
        begin = end + 1
        line += 1
    return row


@njit(nogil=True, cache=True)
def _split_quoted(
    data: np.ndarray,
    begin: int,
    stop: int,
    delimiter: int,
    quote: int,
    starts: np.ndarray,
    ends: np.ndarray,
    row: int,
) -> tuple[int, int]:
    """Split one line that may hold quoted values; number of columns and a reason (0: good)."""
    num_columns = starts.shape[0]
    column = 0
    position = begin
    while True:  # ends: position passes a value and a delimiter, or the line is over
        value = position
        if position < stop and data[position] == quote:
            value = position + 1
            write = value
            position = value
            while True:  # ends: position grows up to the end of the line
                if position >= stop:
                    return column, _OPEN
                if data[position] == quote:
                    if position + 1 < stop and data[position + 1] == quote:
                        position += 1
                    else:
                        break
                data[write] = data[position]
                write += 1
                position += 1
            position += 1
            if position < stop and data[position] != delimiter:
                return column, _AFTER
            value_end = write
        else:
            while position < stop and data[position] != delimiter:
                position += 1
            value_end = position
        if column < num_columns:
            starts[column, row] = value
            ends[column, row] = value_end
        column += 1
        if position >= stop:
            return column, 0
        position += 1


@njit(nogil=True, cache=True)
def _check_bytes(data: np.ndarray, begin: int, stop: int) -> int:
    for k in range(begin, stop):
        if data[k] == 0:
            return _NUL
    return 0 if _is_utf8(data, begin, stop) else _UTF8


@njit(nogil=True, cache=True)
def _is_utf8(data: np.ndarray, begin: int, end: int) -> bool:
    i = begin
    while i < end:  # ends: i passes one character at least
        lead = data[i]
        if lead < 0x80:
            i += 1
            continue
        if 0xC2 <= lead <= 0xDF:
            more, low, high = 1, 0x80, 0xBF
        elif 0xE0 <= lead <= 0xEF:
            more = 2
            low = 0xA0 if lead == 0xE0 else 0x80  # no overlong forms
            high = 0x9F if lead == 0xED else 0xBF  # no surrogates
        elif 0xF0 <= lead <= 0xF4:
            more = 3
            low = 0x90 if lead == 0xF0 else 0x80
            high = 0x8F if lead == 0xF4 else 0xBF  # nothing above U+10FFFF
        else:
            return False
        if i + more >= end or not low <= data[i + 1] <= high:
            return False
        for k in range(2, more + 1):
            if not 0x80 <= data[i + k] <= 0xBF:
                return False
        i += more + 1
    return True
