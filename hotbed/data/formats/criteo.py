"""Criteo's click logs: label, 13 integers (I1..I13), 26 hex strings (C1..C26), tab separated, no header.

The layout is strict, because it has no header to hold on to: an integer that is no integer or needs more than 64 bits,
and a categorical that is not 1 to 16 hex digits, make a bad row (most often a shifted or cut one). Empty is missing.
A hex value becomes an id as a string does, so the same log stored as Parquet strings gets the same ids.

`label="optional"` also accepts Criteo's test files, whose rows start at I1. `hashed` hands categoricals over as ids, several
times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from hotbed.data.formats.blocks import Block, first_line, read_blocks, text_reels
from hotbed.data.formats.chunk import WHOLE, BadRow, Chunk, Column, Faults, Hashed, Integers, Reel, Text, take
from hotbed.data.formats.criteo_rows import read_common_rows
from hotbed.data.formats.numbers import MISSING, NOT_A_NUMBER, TOO_LARGE, hex_codes, parse_integers
from hotbed.data.formats.split import Rows, show_span, split_block
from hotbed.data.hash_kernels import hash_spans
from hotbed.errors import FormatError

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


def _any_chunk(block: Block, path: Path, names: tuple[str, ...]) -> Chunk:
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


def _common_chunk(block: Block, path: Path) -> Chunk:
    """Rows of the common form in one pass, the odd lines of the block by `_any_chunk`; categoricals become ids."""
    data = block.data
    rows = read_common_rows(data, block.first_line)
    columns: dict[str, Column] = {LABEL: Text(data, *rows.labels)}
    columns |= {name: Integers(rows.integers[i], rows.missing[i]) for i, name in enumerate(INTEGERS)}
    columns |= {name: Hashed(rows.ids[i]) for i, name in enumerate(CATEGORICALS)}
    lines, begins, ends = rows.lines
    bad: list[BadRow] = []
    if rows.odd.shape[1]:
        text = b"".join(data[begin:end].tobytes() + b"\r\n" for begin, end in rows.odd[1:].T)
        odd_data = np.frombuffer(text, dtype=np.uint8).copy()
        odd = _any_chunk(Block(odd_data, 1, 0), path, (LABEL, *INTEGERS, *CATEGORICALS))
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
    if isinstance(common, Hashed):
        return Hashed(np.concatenate([common.ids, hash_spans(*odd)])[order])
    assert isinstance(common, Text)
    starts = np.concatenate([common.starts, len(common.data) + odd.starts])[order]
    ends = np.concatenate([common.ends, len(common.data) + odd.ends])[order]
    return Text(np.concatenate([common.data, odd.data]), starts, ends)


def _read_columns(rows: Rows, names: tuple[str, ...]) -> tuple[dict[str, Column], Faults]:
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
