"""Criteo's click logs: label, 13 integers (I1..I13), 26 hex strings (C1..C26), tab separated, no header.

The layout is strict, because it has no header to hold on to: an integer that is no integer or needs more than 64 bits,
and a categorical that is not 1 to 16 hex digits, make a bad row (most often a shifted or cut one). Empty is missing.
A hex value becomes an id as a string does, so the same log stored as Parquet strings gets the same ids.

`label="optional"` also accepts Criteo's test files, whose rows start at I1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from hotbed.data.formats.blocks import first_line, read_blocks
from hotbed.data.formats.chunk import Chunk, Column, Faults, Integers, Text, take
from hotbed.data.formats.numbers import MISSING, NOT_A_NUMBER, TOO_LARGE, hex_codes, parse_integers
from hotbed.data.formats.split import Rows, show_span, split_block
from hotbed.errors import FormatError

LABEL = "label"
INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORICALS = tuple(f"C{i}" for i in range(1, 27))


class CriteoFormat:
    name = "criteo"
    typed = True

    def __init__(self, label: Literal["required", "optional"] = "required") -> None:
        self._label_optional = label == "optional"

    def chunks(self, path: Path) -> Iterator[Chunk]:
        head = first_line(path)
        if not head:
            raise FormatError(f"{path} is empty: no rows to read.")
        names: tuple[str, ...] = (LABEL, *INTEGERS, *CATEGORICALS)
        if self._label_optional and head.count(b"\t") == len(names) - 2:
            names = names[1:]
        for block in read_blocks(path):
            data = block.data
            rows = split_block(block, str(path), len(names), "\t", quote=False)
            lines, begins, ends, bad = rows.lines, rows.begins, rows.ends, rows.bad
            columns, faults = _read_columns(rows, names)
            if faults.any:
                bad = sorted(
                    bad + faults.bad_rows(str(path), lines, partial(show_span, data, begins, ends)),
                    key=lambda row: row.line,
                )
                keep = faults.good
                columns = {name: take(column, keep) for name, column in columns.items()}
                lines, begins, ends = lines[keep], begins[keep], ends[keep]
            yield Chunk(str(path), columns, lines, partial(show_span, data, begins, ends), bad, block.bytes_read)


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
