"""The first chunk of a file and the user's wishes in; label, number columns and id features out.

A column the user does not name is sorted by what it holds: integers and floats are numbers, other text and strings are
ids, lists are bags. A text column (CSV) holds numbers if nine tenths of its values are numbers; a stray word in it is
then a bad row. Integer numbers follow `integers`: "log" (a number, log-scaled), "bucket" (an id feature of log buckets,
named COLUMN_bucket) or "both". `*` in `ids` or `dense` stands for every column not named elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from hotbed.data.encoded import BUCKET_SUFFIX, raw_column
from hotbed.data.formats import Chunk, Column, Floats, Hashed, Instants, Integers, Lists
from hotbed.data.formats.numbers import MISSING, OK, TOO_LARGE, parse_floats, parse_integers
from hotbed.data.schema import DenseColumn, IdFeature
from hotbed.errors import ConfigError, FormatError

Kind = Literal["integer", "float", "string", "list"]
LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y")
INTEGER_MODES = ("log", "bucket", "both")
EVERY_OTHER = "*"
MOSTLY = 0.9


@dataclass(frozen=True)
class Wishes:
    """What the user said about columns."""

    label: str | None = None
    dense: Sequence[str] = ()
    ids: Sequence[str] = ()
    multi: Mapping[str, str] = field(default_factory=dict)  # column -> separator ("" for list columns)
    drop: Sequence[str] = ()
    integers: str = "log"
    time: str | None = None


class Layout(NamedTuple):
    """What becomes of the raw columns. Rows, means and scales are not known yet."""

    label: str
    dense: tuple[DenseColumn, ...]
    features: tuple[IdFeature, ...]
    time: str | None = None

    def check_columns(self, chunk: Chunk) -> None:
        """A FormatError if a file lacks a column that the first file has; further columns are ignored."""
        used = [
            self.label,
            *([self.time] if self.time else []),
            *(spec.name for spec in self.dense),
            *(raw_column(feature) for feature in self.features),
        ]
        absent = [name for name in dict.fromkeys(used) if name not in chunk.columns]
        if absent:
            raise FormatError(
                f"{chunk.file} lacks {', '.join(absent)}, which the first file has; its columns are "
                f"{', '.join(chunk.columns)}. All files of a dataset need the same columns."
            )


def choose_layout(chunk: Chunk, wishes: Wishes, typed: bool) -> Layout:
    """Decide every column's part; all contradictions come in one ConfigError."""
    label = _label(chunk, wishes)
    mistakes = _mistakes(chunk, wishes, label)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    dense: list[DenseColumn] = []
    features: list[IdFeature] = []
    for name, column in chunk.columns.items():
        if name in (label, wishes.time) or name in wishes.drop:
            continue
        kind = _kind(column, typed)
        part = _part(name, kind, wishes)
        if part == "multi":
            source = "integer" if isinstance(column, Lists) and isinstance(column.values, Integers) else "string"
            features.append(IdFeature(name, 0, multi=True, source=source, separator=wishes.multi.get(name, "")))
        elif part == "id":
            features.append(IdFeature(name, 0, source="integer" if isinstance(column, Integers) else "string"))
        elif kind != "integer":
            dense.append(DenseColumn(name))
        else:
            if wishes.integers in ("log", "both"):
                dense.append(DenseColumn(name, transform="log"))
            if wishes.integers in ("bucket", "both"):
                features.append(IdFeature(name + BUCKET_SUFFIX, 0, source="bucket"))
    _check_names(label, dense, features)
    return Layout(label, tuple(dense), tuple(features), wishes.time)


def _label(chunk: Chunk, wishes: Wishes) -> str:
    known = ", ".join(chunk.columns)
    if wishes.label is not None:
        if wishes.label not in chunk.columns:
            raise ConfigError(f"{chunk.file} has no label column {wishes.label!r}. Its columns are: {known}.")
        return wishes.label
    for name in LABEL_NAMES:
        if name in chunk.columns:
            return name
    raise ConfigError(
        f"{chunk.file}: which column is the label? None is called {', '.join(LABEL_NAMES)}. "
        f"Name it with --label; the columns are: {known}."
    )


def _mistakes(chunk: Chunk, wishes: Wishes, label: str) -> list[str]:
    mistakes = []
    if wishes.integers not in INTEGER_MODES:
        mistakes.append(f"--integers {wishes.integers!r} is not one of {', '.join(INTEGER_MODES)}.")
    if EVERY_OTHER in wishes.dense and EVERY_OTHER in wishes.ids:
        mistakes.append("--dense and --ids cannot both take every other column (*).")
    part_of: dict[str, str] = {label: "--label"}
    there = [*chunk.columns, *chunk.unread]
    for option, names in (
        ("--time", [wishes.time] if wishes.time else []),
        ("--dense", wishes.dense),
        ("--ids", wishes.ids),
        ("--multi", wishes.multi),
        ("--drop", wishes.drop),
    ):
        for name in names:
            if name == EVERY_OTHER and option in ("--dense", "--ids"):
                continue
            if name not in there:
                mistakes.append(f"{option} {name}: no such column. The columns are: {', '.join(there)}.")
            if part_of.setdefault(name, option) != option:
                mistakes.append(f"column {name} is in both {part_of[name]} and {option}. It can have one part only.")
    for name, separator in wishes.multi.items():
        if len(separator) > 1 or not separator.isascii():
            mistakes.append(f"--multi {name}: the separator {separator!r} is not one plain character such as | or ;.")
    return mistakes


def _kind(column: Column, typed: bool) -> Kind:
    if isinstance(column, Lists):
        return "list"
    if isinstance(column, Integers | Instants):
        return "integer"
    if isinstance(column, Floats):
        return "float"
    if typed or isinstance(column, Hashed):
        return "string"
    integers, floats = parse_integers(column).codes, parse_floats(column).codes
    enough = max(MOSTLY * int(np.count_nonzero(floats != MISSING)), 1)
    if np.count_nonzero(integers == OK) >= enough:
        return "integer"
    if np.count_nonzero((floats == OK) & (integers != TOO_LARGE)) >= enough:
        return "float"
    return "string"  # also integers beyond 64 bits: they are names, not quantities


def _part(name: str, kind: Kind, wishes: Wishes) -> Literal["multi", "id", "dense"]:
    if name in wishes.multi or kind == "list":
        return "multi"
    if name in wishes.ids:
        return "id"
    if name in wishes.dense:
        return "dense"
    if EVERY_OTHER in wishes.ids:
        return "id"
    if EVERY_OTHER in wishes.dense:
        return "dense"
    return "id" if kind == "string" else "dense"


def _check_names(label: str, dense: Sequence[DenseColumn], features: Sequence[IdFeature]) -> None:
    """Names become Parquet columns, and those of features file names."""
    names = [label, *(spec.name for spec in dense), *(feature.name for feature in features)]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(f"column {', '.join(twice)} would be written twice. Rename or --drop one of the raw columns.")
    for feature in features:
        if any(c in feature.name for c in "/\\\0") or feature.name[0] == "." or len(feature.name.encode()) > 200:
            raise ConfigError(f"column {feature.name!r} cannot be the name of a file. Rename it or --drop it.")
    if len(names) == 1:
        raise ConfigError("no column is left to learn from. Name some with --ids or --dense, or drop fewer.")
