"""Criteo's click logs: label, 13 integers (I1..I13), 26 hex strings (C1..C26), tab separated, no header.

The layout is strict, because there is no header: a row is bad if an integer is not an integer or needs more than 64 bits, or
if a categorical is not 1 to 16 hex digits (usually a shifted or truncated row). Empty means missing. A hex value becomes an id
like any string, so the same log stored as Parquet strings gets the same ids.

`label="optional"` also accepts Criteo's test files, whose rows start at I1. `hashed` returns categoricals as ids, which is
several times as fast.

`read_common_rows` reads numbers and ids in one pass over the bytes: 500 MB/s a core, four times as fast as column by column.
It reads lines of the common form: any label, 13 decimal integers of up to 18 digits, 26 values of up to 16 hex digits. All
other lines are listed as odd, and read column by column or refused. Integers are those of parse_numbers.py and ids those of
hash.py, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.formats.blocks import TextBlock, count_newlines, first_line, read_blocks, text_reels
from hotbed.data.formats.chunk import WHOLE, BadRow, Chunk, Column, Faults, HashedText, Integers, Reel, Text, take
from hotbed.data.formats.parse_numbers import MISSING, NOT_A_NUMBER, TOO_LARGE, hex_codes, parse_integers
from hotbed.data.formats.split import SplitRows, show_span, split_block
from hotbed.data.hash import MISSING_ID, hash_span, hash_spans, hash_word, load_word
from hotbed.errors import FormatError
from hotbed.host.jit import njit

NUM_INTEGERS, NUM_HEX = 13, 26
_NEWLINE, _RETURN, _TAB, _MINUS = 10, 13, 9, 45
_HIGH = np.uint64(0x8080808080808080)
LABEL = "label"
INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORICALS = tuple(f"C{i}" for i in range(1, 27))


class CriteoFormat:
    name = "criteo"
    typed = True

    def __init__(self, label: Literal["required", "optional"] = "required", hashed: bool = False) -> None:
        self._label_optional = label == "optional"
        self._hashed = hashed

    def reels(self, path: Path) -> Iterator[Reel]:
        return text_reels(path)

    def chunks(self, path: Path, reel: Reel = WHOLE) -> Iterator[Chunk]:
        head = first_line(path)
        if not head:
            raise FormatError(f"{path} is empty: no rows to read.")
        names: tuple[str, ...] = (LABEL, *INTEGERS, *CATEGORICALS)
        if self._label_optional and head.count(b"\t") == len(names) - 2:
            names = names[1:]
        for block in read_blocks(path, reel=reel):
            if self._hashed and len(names) == 40:
                yield _common_chunk(block, path)
            else:
                yield _any_chunk(block, path, names)


def _any_chunk(block: TextBlock, path: Path, names: tuple[str, ...]) -> Chunk:
    """Rows of every form, column by column; categoricals stay text."""
    data = block.data
    rows = split_block(block, str(path), len(names), "\t", quote=False)
    lines, begins, ends, bad = rows.lines, rows.begins, rows.ends, rows.bad
    columns, faults = _read_columns(rows, names)
    if faults.any:
        bad = sorted(
            bad + faults.bad_rows(str(path), lines, partial(show_span, data, begins, ends)), key=lambda row: row.line
        )
        keep = faults.good
        columns = {name: take(column, keep) for name, column in columns.items()}
        lines, begins, ends = lines[keep], begins[keep], ends[keep]
    return Chunk(str(path), columns, lines, partial(show_span, data, begins, ends), bad, block.bytes_read)


def _common_chunk(block: TextBlock, path: Path) -> Chunk:
    """Rows of the common form in one pass, the odd lines of the block by `_any_chunk`; categoricals become ids."""
    data = block.data
    rows = read_common_rows(data, block.first_line)
    columns: dict[str, Column] = {LABEL: Text(data, *rows.labels)}
    columns |= {name: Integers(rows.integers[i], rows.missing[i]) for i, name in enumerate(INTEGERS)}
    columns |= {name: HashedText(rows.ids[i]) for i, name in enumerate(CATEGORICALS)}
    lines, begins, ends = rows.lines
    bad: list[BadRow] = []
    if rows.odd.shape[1]:
        text = b"".join(data[begin:end].tobytes() + b"\r\n" for begin, end in rows.odd[1:].T)
        odd_data = np.frombuffer(text, dtype=np.uint8).copy()
        odd = _any_chunk(TextBlock(odd_data, 1, 0), path, (LABEL, *INTEGERS, *CATEGORICALS))
        bad = [row._replace(line=int(rows.odd[0, row.line - 1])) for row in odd.bad]
        if len(odd.lines):
            spans = rows.odd[:, odd.lines - 1]
            order = np.argsort(np.concatenate([lines, spans[0]]))
            columns = {name: _join(columns[name], odd.columns[name], order) for name in columns}
            lines, begins, ends = np.concatenate([rows.lines, spans], axis=1)[:, order]
    return Chunk(str(path), columns, lines, partial(show_span, data, begins, ends), bad, block.bytes_read)


def _join(common: Column, odd: Column, order: np.ndarray) -> Column:
    """The rows of both in `order`."""
    if isinstance(common, Integers) and isinstance(odd, Integers):
        return Integers(
            np.concatenate([common.values, odd.values])[order], np.concatenate([common.missing, odd.missing])[order]
        )
    assert isinstance(odd, Text)
    if isinstance(common, HashedText):
        return HashedText(np.concatenate([common.ids, hash_spans(*odd)])[order])
    assert isinstance(common, Text)
    starts = np.concatenate([common.starts, len(common.data) + odd.starts])[order]
    ends = np.concatenate([common.ends, len(common.data) + odd.ends])[order]
    return Text(np.concatenate([common.data, odd.data]), starts, ends)


def _read_columns(rows: SplitRows, names: tuple[str, ...]) -> tuple[dict[str, Column], Faults]:
    columns: dict[str, Column] = {}
    faults = Faults(len(rows.lines))
    for name, text in zip(names, rows.text):
        if name in INTEGERS:
            columns[name] = _integers(name, text, faults)
        else:
            columns[name] = text
            if name != LABEL:
                _mark(name, "not hex", hex_codes(text), faults)
    return columns, faults


def _integers(name: str, text: Text, faults: Faults) -> Integers:
    values, codes = parse_integers(text)
    _mark(name, "not an integer", codes, faults)
    return Integers(values, codes == MISSING)


def _mark(name: str, fault: str, codes: np.ndarray, faults: Faults) -> None:
    if codes.max(initial=0) >= NOT_A_NUMBER:
        faults.mark(codes == NOT_A_NUMBER, f"{name} is {fault}")
        faults.mark(codes == TOO_LARGE, f"{name} needs more than 64 bits")


def _from(byte: int) -> np.uint64:
    """Added to eight bytes below 128, it sets the high bit of those that are at least `byte`."""
    return np.uint64(0x0101010101010101 * (0x80 - byte))


_FROM_0, _FROM_COLON = _from(0x30), _from(0x3A)
_FROM_UPPER_A, _FROM_UPPER_G = _from(0x41), _from(0x47)
_FROM_A, _FROM_G = _from(0x61), _from(0x67)


class CommonRows(NamedTuple):
    """n lines of the common form, and the spans of the other lines."""

    labels: NDArray[np.int64]  # [2, n]: spans of the label
    integers: NDArray[np.int64]  # [13, n]
    missing: NDArray[np.bool_]  # [13, n]
    ids: NDArray[np.int64]  # [26, n]
    lines: NDArray[np.int64]  # [3, n]: number, begin, end
    odd: NDArray[np.int64]  # [3, k]: number, begin, end


def read_common_rows(data: NDArray[np.uint8], first_line: int) -> CommonRows:
    most = int(count_newlines(data)) + 1
    rows = CommonRows(
        labels=np.empty((2, most), dtype=np.int64),
        integers=np.empty((NUM_INTEGERS, most), dtype=np.int64),
        missing=np.empty((NUM_INTEGERS, most), dtype=np.bool_),
        ids=np.empty((NUM_HEX, most), dtype=np.int64),
        lines=np.empty((3, most), dtype=np.int64),
        odd=np.empty((3, most), dtype=np.int64),
    )
    n, num_odd = _read(data, first_line, *rows)
    return CommonRows(
        rows.labels[:, :n],
        rows.integers[:, :n],
        rows.missing[:, :n],
        rows.ids[:, :n],
        rows.lines[:, :n],
        rows.odd[:, :num_odd],
    )


@njit(nogil=True, cache=True)
def _read(
    data: NDArray[np.uint8],
    first_line: int,
    labels: NDArray[np.int64],
    integers: NDArray[np.int64],
    missing: NDArray[np.bool_],
    ids: NDArray[np.int64],
    lines: NDArray[np.int64],
    odd: NDArray[np.int64],
) -> tuple[int, int]:
    """(rows of the common form, odd lines)."""
    size = len(data)
    row = num_odd = 0
    line = first_line
    begin = 0
    while begin < size:  # ends: begin moves past the end of the line
        end = _read_label(data, begin, labels, row)
        if end >= 0:
            end = _read_integers(data, end, integers, missing, row)
        if end >= 0:
            end = _read_hex(data, end, ids, row)
        common = end >= 0
        if not common:
            end = begin
            while end < size and data[end] != _NEWLINE:
                end += 1
        stop = end - 1 if end > begin and data[end - 1] == _RETURN else end
        if common:
            lines[0, row], lines[1, row], lines[2, row] = line, begin, stop
            row += 1
        elif stop > begin:
            odd[0, num_odd], odd[1, num_odd], odd[2, num_odd] = line, begin, stop
            num_odd += 1
        begin = end + 1
        line += 1
    return row, num_odd


@njit(nogil=True, inline="always")
def _read_label(data: NDArray[np.uint8], at: int, labels: NDArray[np.int64], row: int) -> int:
    """The position after the label and its tab, or -1."""
    size = len(data)
    labels[0, row] = at
    while at < size and 32 <= data[at] < 127:
        at += 1
    labels[1, row] = at
    return at + 1 if at < size and data[at] == _TAB else -1


@njit(nogil=True, inline="always")
def _read_integers(
    data: NDArray[np.uint8], at: int, integers: NDArray[np.int64], missing: NDArray[np.bool_], row: int
) -> int:
    """The position after 13 integers and their tabs, or -1."""
    size = len(data)
    for column in range(NUM_INTEGERS):
        sign = 1
        if at < size and data[at] == _MINUS:
            sign = -1
            at += 1
        first = at
        total = np.int64(0)
        while at < size:
            digit = np.int64(data[at]) - 48
            if digit < 0 or digit > 9:
                break
            total = total * 10 + digit
            at += 1
        if at >= size or data[at] != _TAB or at - first > 18 or (sign < 0 and at == first):
            return -1
        integers[column, row] = sign * total
        missing[column, row] = at == first
        at += 1
    return at


@njit(nogil=True, inline="always")
def _read_hex(data: NDArray[np.uint8], at: int, ids: NDArray[np.int64], row: int) -> int:
    """The end of the line after 26 hex values, or -1."""
    size = len(data)
    for column in range(NUM_HEX):
        last = column == NUM_HEX - 1
        if at + 8 < size and _ends(data[at + 8], last):
            word = load_word(data, at)
            if _is_hex_word(word):
                ids[column, row] = hash_word(word)
                at += 9
                continue
        first = at
        while at < size and _is_hex(data[at]):
            at += 1
        if at - first > 16 or not (_ends(data[at], last) if at < size else last):
            return -1
        ids[column, row] = hash_span(data, first, at) if at > first else MISSING_ID
        at += 1
    at -= 1
    if at < size and data[at] == _RETURN:
        at += 1
        if at < size and data[at] != _NEWLINE:
            return -1
    return at


@njit(nogil=True, inline="always")
def _ends(byte: int, last: bool) -> bool:
    """Whether a value may end here; the last value of a line ends at the line break."""
    return byte in (_NEWLINE, _RETURN) if last else byte == _TAB


@njit(nogil=True, inline="always")
def _is_hex_word(word: np.uint64) -> bool:
    """Whether all of eight bytes are hex digits."""
    digit = (word + _FROM_0) & ~(word + _FROM_COLON)
    upper = (word + _FROM_UPPER_A) & ~(word + _FROM_UPPER_G)
    lower = (word + _FROM_A) & ~(word + _FROM_G)
    return bool((word & _HIGH) == 0 and ((digit | upper | lower) & _HIGH) == _HIGH)


@njit(nogil=True, inline="always")
def _is_hex(byte: int) -> bool:
    return 48 <= byte <= 57 or 97 <= byte <= 102 or 65 <= byte <= 70
