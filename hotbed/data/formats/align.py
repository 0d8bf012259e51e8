"""Files whose columns differ in, chunks with the same columns out; and partition columns, which are in no file.

Rules, for Parquet and Arrow files of one dataset:

- The dataset has every column that some file has. Where a file lacks one, its values are missing there.
- Integers of any width are one type, floats and decimals another; where both occur, all are read as floats.
- A column without a type (all null) takes that of the other files. Any other difference is an error when the file is read.
- Ids that are text in one file and floats, booleans or times in another are an error (`mixed`): 1.0 and true have more than one
  spelling as text, so one id would become two. Integers have one, and are read like text.

`unify` reads the footers and finds the columns; `AlignedFormat` reads one file that way. A text file has no types, so all text
files of a dataset need the same columns (layout.py), but they too can have partition columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from hotbed.data.formats.chunk import (
    WHOLE,
    Chunk,
    Column,
    Floats,
    Format,
    Integers,
    Lists,
    Reel,
    Scalar,
    Text,
    Unsigned,
)
from hotbed.data.formats.parquet import schema_of
from hotbed.host.threads import run_ahead

_FOOTERS_AT_ONCE = 8
Kind = Literal["integer", "float", "text", "time", "none", "other"]


class ColumnKind(NamedTuple):
    """What a column holds, single or in lists."""

    kind: Kind
    is_list: bool = False


class MixedTypes(NamedTuple):
    """The types of a column whose values in two files cannot be compared as ids."""

    first: str  # how the first file has it
    where: str  # both types, and the files


class UnifiedColumns(NamedTuple):
    """The columns of all files."""

    kinds: dict[str, ColumnKind]
    lacking: dict[str, list[str]]  # column -> files that lack it
    mixed: dict[str, MixedTypes]


NO_COLUMNS = UnifiedColumns({}, {}, {})


def unify(paths: Sequence[Path]) -> UnifiedColumns:
    """The columns of Parquet and Arrow files, from their footers."""
    schemas = list(run_ahead(schema_of, paths, threads=_FOOTERS_AT_ONCE, ahead=_FOOTERS_AT_ONCE))
    found = [{field.name: _kind(field.type) for field in schema} for schema in schemas]
    kinds: dict[str, ColumnKind] = {}
    for of_file in found:
        for name, kind in of_file.items():
            if name not in kinds or kinds[name].kind == "none":
                kinds[name] = kind
            elif kind.kind != "none":
                kinds[name] = _joined(kinds[name], kind)
    lacking = {
        name: [str(path) for path, of_file in zip(paths, found) if of_file.get(name, ColumnKind("none")).kind == "none"]
        for name in kinds
    }
    return UnifiedColumns(kinds, {name: files for name, files in lacking.items() if files}, _mixed(paths, schemas))


def _mixed(paths: Sequence[Path], schemas: Sequence[pa.Schema]) -> dict[str, MixedTypes]:
    first: dict[str, dict[str, str]] = {}  # column -> spelling -> where
    for path, schema in zip(paths, schemas):
        for field in schema:
            first.setdefault(field.name, {}).setdefault(_spelling(field.type), f"{field.type} in {path}")
    clashes = [{"text", other} for other in ("float", "boolean", "time")]
    clashes += [{"time", other} for other in ("integer", "float", "boolean")]
    found: dict[str, MixedTypes] = {}
    for name, places in first.items():
        for pair in clashes:
            if pair <= places.keys():
                where = " and ".join(places[one] for one in sorted(pair))
                found.setdefault(name, MixedTypes(next(iter(places)), where))
    return found


def _spelling(kind: pa.DataType) -> str:
    """How a value would be written as text: its kind, or boolean."""
    while hasattr(kind, "value_type") and not pa.types.is_map(kind):
        kind = kind.value_type
    return "boolean" if pa.types.is_boolean(kind) else _kind(kind).kind


def _kind(kind: pa.DataType) -> ColumnKind:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return ColumnKind(_kind(kind.value_type).kind, True)
    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    if types.is_null(kind):
        return ColumnKind("none")
    if types.is_floating(kind) or types.is_decimal(kind):
        return ColumnKind("float")
    if types.is_integer(kind) or types.is_boolean(kind):
        return ColumnKind("integer")
    if types.is_temporal(kind):
        return ColumnKind("time")
    if any(check(kind) for check in (types.is_nested, types.is_map)):
        return ColumnKind("other")
    return ColumnKind("text")


def _joined(one: ColumnKind, other: ColumnKind) -> ColumnKind:
    """The kind of a column that has these in two files; of kinds that do not fit, the first, which reading then reports."""
    if one.is_list == other.is_list and (one.kind == "none" or {one.kind, other.kind} == {"integer", "float"}):
        return other if one.kind == "none" else ColumnKind("float", one.is_list)
    return one


class AlignedFormat:
    """One file as if it had the columns of all files, and those of its folders."""

    def __init__(
        self,
        inner: Format,
        kinds: Mapping[str, ColumnKind],
        partition: Mapping[str, str | int | None],
        wanted: frozenset[str],
    ) -> None:
        """`kinds`: of all files, empty for text; `partition`: this file's values; `wanted`: of both, what is to be read."""
        self.name, self.typed = inner.name, inner.typed
        self._inner, self._partition = inner, partition
        self._kinds = {name: kind for name, kind in kinds.items() if name in wanted and name not in partition}
        self._wanted = wanted

    def reels(self, path: Path) -> Iterator[Reel]:
        return self._inner.reels(path)

    def chunks(self, path: Path, reel: Reel = WHOLE) -> Iterator[Chunk]:
        for chunk in self._inner.chunks(path, reel):
            rows = len(chunk.lines)
            columns: dict[str, Column] = {}
            for name in [*self._kinds, *(one for one in chunk.columns if one not in self._kinds)]:
                if name not in self._partition:
                    columns[name] = _aligned(chunk.columns.get(name), self._kinds.get(name), rows)
            columns |= {name: _constant(value, rows) for name, value in self._partition.items() if name in self._wanted}
            unread = [name for name in self._partition if name not in self._wanted]
            yield replace(chunk, columns=columns, unread=tuple(dict.fromkeys((*chunk.unread, *unread))))


def _aligned(column: Column | None, kind: ColumnKind | None, rows: int) -> Column:
    """The column as all files have it."""
    if kind is None:
        assert column is not None, "a column of the chunk"
        return column
    if column is None or (isinstance(column, Integers) and kind.kind != "integer" and bool(column.missing.all())):
        values = _missing(kind.kind, 0 if kind.is_list else rows)
        return Lists(np.zeros(rows + 1, dtype=np.int64), values) if kind.is_list else values
    if kind.kind == "float":
        if isinstance(column, Lists):
            return Lists(column.offsets, _floats(column.values))
        if isinstance(column, Integers):
            return _floats(column)
    return column


def _floats(values: Scalar) -> Scalar:
    if not isinstance(values, Integers):
        return values
    numbers = values.numbers if isinstance(values, Unsigned) else values.values
    return Floats(np.where(values.missing, np.nan, numbers.astype(np.float64)))


def _missing(kind: Kind, rows: int) -> Scalar:
    if kind == "float":
        return Floats(np.full(rows, np.nan))
    if kind == "text":
        return Text(np.zeros(0, dtype=np.uint8), np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64))
    return Integers(np.zeros(rows, dtype=np.int64), np.ones(rows, dtype=np.bool_))


def _constant(value: str | int | None, rows: int) -> Scalar:
    """A column with one value; the strings share their bytes."""
    if isinstance(value, int):
        return Integers(np.full(rows, value, dtype=np.int64), np.zeros(rows, dtype=np.bool_))
    data = np.frombuffer((value or "").encode(), dtype=np.uint8)
    return Text(data.copy(), np.zeros(rows, dtype=np.int64), np.full(rows, len(data), dtype=np.int64))


def partition_values(partitions: Sequence[Mapping[str, str | None]]) -> list[dict[str, str | int | None]]:
    """The values of every file, for the columns of any; integers where all values of a column are, so that 07 stays text."""
    names = list(dict.fromkeys(name for one in partitions for name in one))
    whole = {
        name
        for name in names
        if all(value is None or (value == str(_integer(value))) for one in partitions for value in [one.get(name)])
        and all(one.get(name) is not None for one in partitions)
    }
    return [
        {name: _integer(value) if (value := one.get(name)) is not None and name in whole else value for name in names}
        for one in partitions
    ]


def _integer(text: str) -> int | None:
    try:
        found = int(text)
    except ValueError:
        return None
    return found if -(2**63) <= found < 2**63 else None
