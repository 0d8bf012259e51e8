"""The first chunk of a file and the user's options in; label, number columns and id features out.

The content of a column that the user does not name decides: integers and floats are numbers, other text and strings are
ids, lists are bags. A text column (CSV) holds numbers if nine tenths of its values are numbers; a stray word in it is
then a bad row. Integer numbers follow `integers`: "log" (a number, log-scaled), "bucket" (an id feature of log buckets,
named COLUMN_bucket) or "both", unless they look like ids (guess.py). `*` in `ids` or `dense` means every column not named
elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hotbed.data.encode import BUCKET_SUFFIX, raw_column
from hotbed.data.formats import Chunk, Column, Floats, HashedText, Instants, Integers, Lists, Text
from hotbed.data.formats.csv import no_header_hint
from hotbed.data.formats.parse_numbers import MISSING, OK, TOO_LARGE, parse_floats, parse_integers
from hotbed.data.prepare.guess import IdGuess, guess_id, is_named_id
from hotbed.data.schema import CLOCK_PARTS, KEEPS, TASK_KINDS, DenseColumn, IdFeature, features_by_table
from hotbed.data.times import TimeColumn
from hotbed.data.values import LabelThreshold, Target
from hotbed.errors import ConfigError, FormatError

Kind = Literal["integer", "float", "string", "list"]
LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y")
INTEGER_MODES = ("log", "bucket", "both")
EVERY_OTHER = "*"
MOSTLY = 0.9


class SequenceOption(NamedTuple):
    """A column that is an ordered list: history:|:50, or history:|:50:first to keep the first 50 instead of the last."""

    name: str
    separator: str  # "" for list columns
    length: int
    keep: str = "last"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for an IdFeature."""
        return {"separator": self.separator, "length": self.length, "keep": self.keep}

    @classmethod
    def parse(cls, text: str) -> SequenceOption:
        found = re.fullmatch(r"(.+?):(.?):(\d+)(?::(\w+))?", text)
        keep = found[4] or "last" if found else ""
        if found is None or int(found[3]) < 1 or keep not in KEEPS:
            raise ConfigError(
                f"--sequence {text!r} is not COLUMN:SEPARATOR:LENGTH with a length of 1 or more, such as 'history:|:50' (the "
                "last 50 values are kept) or 'history:|:50:first'; a column of lists has no separator: 'history::50'."
            )
        return cls(found[1], found[2], int(found[3]), keep)


@dataclass(frozen=True)
class LayoutOptions:
    """The options of the user about columns."""

    label: str | None = None
    dense: Sequence[str] = ()
    ids: Sequence[str] = ()
    multi: Mapping[str, str] = field(default_factory=dict)  # column -> separator ("" for list columns)
    sequences: Mapping[str, SequenceOption] = field(default_factory=dict)
    drop: Sequence[str] = ()
    integers: str = "log"
    clock: TimeColumn | None = None
    targets: Sequence[Target] = ()  # further labels, and the weight
    time_features: Sequence[str] = ()  # made of the time column: hour, weekday
    share: Mapping[str, str] = field(default_factory=dict)  # feature -> the feature whose table it reads

    @property
    def time(self) -> str | None:
        """The name of the time column."""
        return None if self.clock is None else self.clock.name

    @classmethod
    def parse(
        cls,
        *,
        label: str | None = None,
        positive: str | None = None,
        dense: Sequence[str] = (),
        ids: Sequence[str] = (),
        multi: Mapping[str, str] | None = None,
        sequence: Sequence[str] = (),
        task: Sequence[str] = (),
        weight: str | None = None,
        drop: Sequence[str] = (),
        integers: str = "log",
        time_column: str | None = None,
        time_features: Sequence[str] = (),
        share: Mapping[str, str] | None = None,
    ) -> LayoutOptions:
        """From the arguments of `prepare`."""
        return cls(
            _label_of(label, positive),
            tuple(dense),
            tuple(ids),
            dict(multi or {}),
            {one.name: one for one in map(SequenceOption.parse, sequence)},
            tuple(drop),
            integers,
            None if time_column is None else TimeColumn.parse(time_column),
            parse_targets(task, weight),
            tuple(time_features),
            dict(share or {}),
        )


def _label_of(label: str | None, positive: str | None) -> str | None:
    """The label column; `rating>=4` names it too."""
    threshold = None if positive is None else LabelThreshold.parse(positive)
    if threshold is None or not threshold.column:
        return label
    if label not in (None, threshold.column):
        raise ConfigError(
            f"--positive {positive} is a condition on {threshold.column}, but --label is {label}. Leave out one of the names."
        )
    return threshold.column


def parse_targets(tasks: Sequence[str], weight: str | None) -> tuple[Target, ...]:
    """--task like, --task watched:regression and --weight COLUMN."""
    found = []
    for text in tasks:
        name, _, kind = text.rpartition(":") if text.rpartition(":")[2] in TASK_KINDS else (text, "", "binary")
        if not name:
            raise ConfigError(f"--task {text!r} is not COLUMN, COLUMN:binary or COLUMN:regression.")
        found.append(Target(name, kind))
    return (*found, *([Target(weight, "weight")] if weight else []))


class ColumnLayout(NamedTuple):
    """The use of the raw columns. Rows, means and scales are not known yet."""

    label: str
    dense: tuple[DenseColumn, ...]
    features: tuple[IdFeature, ...]
    time: str | None = None
    targets: tuple[Target, ...] = ()
    guesses: tuple[tuple[str, IdGuess], ...] = ()  # integer columns that look like ids

    @property
    def numbers(self) -> tuple[DenseColumn, ...]:
        """The columns of numbers as they are stored: dense ones, then targets."""
        return (*self.dense, *(DenseColumn(target.name) for target in self.targets))

    def check_columns(self, chunk: Chunk) -> None:
        """A FormatError if a file lacks a column of the first file; additional columns are ignored."""
        used = [
            self.label,
            *([self.time] if self.time else []),
            *(spec.name for spec in self.numbers),
            *(raw_column(feature) for feature in self.features),
        ]
        absent = [name for name in dict.fromkeys(used) if name not in chunk.columns]
        if absent:
            raise FormatError(
                f"{chunk.file} lacks {', '.join(absent)}, which the first file has; its columns are "
                f"{', '.join(chunk.columns)}. All files of a dataset need the same columns."
            )


def choose_layout(chunk: Chunk, options: LayoutOptions, typed: bool, guessing: bool = False) -> ColumnLayout:
    """Decide the use of every column; one ConfigError lists all contradictions.

    `guessing`: the columns have names that a person gave, which tell ids from quantities.
    """
    label = _label(chunk, options)
    mistakes = _mistakes(chunk, options, label)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    dense: list[DenseColumn] = []
    features: list[IdFeature] = []
    guesses: dict[str, IdGuess] = {}
    for name, column in chunk.columns.items():
        if name in (label, options.time, *(target.name for target in options.targets)) or name in options.drop:
            continue
        kind = _kind(column, typed)
        if guessing and not _is_named(name, options) and (kind == "integer" or (kind == "float" and is_named_id(name))):
            values = _integers(column) if kind == "integer" else _whole_numbers(cast(Text | Floats, column))
            guess = guess_id(name, values, padded=_is_padded(column))
            guesses |= {name: guess} if guess is not None else {}
        part = _part(name, kind, options)
        if part == "dense" and name in guesses and guesses[name].is_certain:
            part = "id"
        if part == "multi":
            source = "integer" if isinstance(column, Lists) and isinstance(column.values, Integers) else "string"
            ordered = options.sequences.get(name) or SequenceOption(name, options.multi.get(name, ""), 0)
            features.append(IdFeature(name, 0, multi=True, source=source, **ordered.settings))
        elif part == "id":
            features.append(IdFeature(name, 0, source="integer" if isinstance(column, Integers) else "string"))
        elif kind != "integer":
            dense.append(DenseColumn(name))
        else:
            if options.integers in ("log", "both"):
                dense.append(DenseColumn(name, transform="log"))
            if options.integers in ("bucket", "both"):
                features.append(IdFeature(name + BUCKET_SUFFIX, 0, source="bucket"))
    if options.clock is not None:
        clock = options.clock
        features += [IdFeature(f"{clock.name}_{one}", 0, source=f"{one}:{clock.unit}") for one in options.time_features]
    _check_names(label, dense, features)
    features = share_tables(features, options.share)
    return ColumnLayout(
        label, tuple(dense), tuple(features), options.time, tuple(options.targets), tuple(guesses.items())
    )


def share_tables(features: Sequence[IdFeature], share: Mapping[str, str]) -> list[IdFeature]:
    """The features, with those of one table side by side; one ConfigError lists all that cannot share."""
    known = {one.name: one for one in features}
    mistakes = []
    for name, owner in share.items():
        option = f"--share {name}={owner}"
        for one in (name, owner):
            if one not in known:
                mistakes.append(f"{option}: {one} is not a column of ids. They are: {', '.join(known)}.")
        if name == owner or owner in share:
            mistakes.append(f"{option}: {owner} must have a table of its own; name the same one for all that share it.")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    shared = [replace(one, shares=share.get(one.name, "")) for one in features]
    return [one for of_table in features_by_table(shared).values() for one in _alike(of_table)]


def _alike(features: Sequence[IdFeature]) -> list[IdFeature]:
    """Features of one table, whose raw values become ids in one way."""
    sources = {one.source for one in features}
    if len(sources) == 1:
        return list(features)
    if sources == {"integer", "string"}:  # 7 and "7" are the same id as text
        return [replace(one, source="string") for one in features]
    table, names = features[0].table, ", ".join(f"{one.name} ({one.source})" for one in features)
    raise ConfigError(
        f"--share: the values of {names} become ids in different ways, so they cannot share table {table}."
    )


def _label(chunk: Chunk, options: LayoutOptions) -> str:
    known = ", ".join(chunk.columns)
    if options.label is not None:
        if options.label not in chunk.columns:
            raise ConfigError(f"{chunk.file} has no label column {options.label!r}. Its columns are: {known}.")
        return options.label
    for name in LABEL_NAMES:
        if name in chunk.columns:
            return name
    raise ConfigError(
        f"{chunk.file}: which column is the label? None is called {', '.join(LABEL_NAMES)}. "
        f"Name it with --label; the columns are: {known}.{no_header_hint(list(chunk.columns), chunk.file)}"
    )


def _mistakes(chunk: Chunk, options: LayoutOptions, label: str) -> list[str]:
    mistakes = []
    if options.integers not in INTEGER_MODES:
        mistakes.append(f"--integers {options.integers!r} is not one of {', '.join(INTEGER_MODES)}.")
    if EVERY_OTHER in options.dense and EVERY_OTHER in options.ids:
        mistakes.append("--dense and --ids cannot both take every other column (*).")
    unknown = [one for one in options.time_features if one not in CLOCK_PARTS]
    if unknown:
        mistakes.append(f"--time-features {', '.join(unknown)}: there are {', '.join(CLOCK_PARTS)}.")
    if options.time_features and options.time is None:
        mistakes.append(f"--time-features {', '.join(options.time_features)} needs a time column: --time COLUMN.")
    part_of: dict[str, str] = {label: "--label"}
    there = [*chunk.columns, *chunk.unread]
    for option, names in (
        ("--time", [options.time] if options.time else []),
        ("--dense", options.dense),
        ("--ids", options.ids),
        ("--multi", options.multi),
        ("--sequence", options.sequences),
        ("--drop", options.drop),
        ("--task", [target.name for target in options.targets if target.kind != "weight"]),
        ("--weight", [target.name for target in options.targets if target.kind == "weight"]),
    ):
        for name in names:
            if name == EVERY_OTHER and option in ("--dense", "--ids"):
                continue
            if name not in there:
                mistakes.append(f"{option} {name}: no such column. The columns are: {', '.join(there)}.")
            if part_of.setdefault(name, option) != option:
                mistakes.append(f"column {name} is in both {part_of[name]} and {option}. It can have only one use.")
    separators = [("--multi", *pair) for pair in options.multi.items()]
    separators += [("--sequence", name, one.separator) for name, one in options.sequences.items()]
    for option, name, separator in separators:
        if len(separator) > 1 or not separator.isascii():
            mistakes.append(f"{option} {name}: the separator {separator!r} is not one plain character such as | or ;.")
    return mistakes


def _kind(column: Column, typed: bool) -> Kind:
    if isinstance(column, Lists):
        return "list"
    if isinstance(column, Integers | Instants):
        return "integer"
    if isinstance(column, Floats):
        return "float"
    if typed or isinstance(column, HashedText):
        return "string"
    integers, floats = parse_integers(column).codes, parse_floats(column).codes
    enough = max(MOSTLY * int(np.count_nonzero(floats != MISSING)), 1)
    if np.count_nonzero(integers == OK) >= enough:
        return "integer"
    if np.count_nonzero((floats == OK) & (integers != TOO_LARGE)) >= enough:
        return "float"
    return "string"  # also integers beyond 64 bits: they are ids, not quantities


def _integers(column: Column) -> NDArray[np.int64]:
    """The integers of a column, without missing and unreadable values."""
    if isinstance(column, Integers):
        return np.asarray(column.values[~column.missing])
    if not isinstance(column, Text):
        return np.zeros(0, np.int64)
    values, codes = parse_integers(column)
    return np.asarray(values[codes == OK])


def _whole_numbers(column: Text | Floats) -> NDArray[np.int64]:
    """The numbers of a column as integers, also 12.0, without missing and unreadable values; none if one has a fraction."""
    numbers = parse_floats(column).values if isinstance(column, Text) else column.values
    numbers = numbers[~np.isnan(numbers)]
    whole = bool((np.floor(numbers) == numbers).all()) and bool((np.abs(numbers) < 2**53).all())
    return np.asarray(numbers if whole else numbers[:0]).astype(np.int64)


def _is_padded(column: Column) -> bool:
    """Whether some values of text have leading zeros: 00123."""
    if not isinstance(column, Text):
        return False
    long = column.starts + 1 < column.ends
    longer = Text(column.data, column.starts[long], column.ends[long])
    return bool(((longer.data[longer.starts] == ord("0")) & (parse_integers(longer).codes == OK)).any())


def _is_named(name: str, options: LayoutOptions) -> bool:
    """Whether an option says what a column is."""
    every_other = EVERY_OTHER in options.ids or EVERY_OTHER in options.dense
    return every_other or any(name in names for names in (options.dense, options.ids, options.multi))


def _part(name: str, kind: Kind, options: LayoutOptions) -> Literal["multi", "id", "dense"]:
    if name in options.multi or name in options.sequences or kind == "list":
        return "multi"
    if name in options.ids:
        return "id"
    if name in options.dense:
        return "dense"
    if EVERY_OTHER in options.ids:
        return "id"
    if EVERY_OTHER in options.dense:
        return "dense"
    return "id" if kind == "string" else "dense"


def _check_names(label: str, dense: Sequence[DenseColumn], features: Sequence[IdFeature]) -> None:
    """Names become columns of files, and names of features become file names."""
    names = [label, *(spec.name for spec in dense), *(feature.name for feature in features)]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(f"column {', '.join(twice)} would be written twice. Rename or --drop one of the raw columns.")
    for feature in features:
        if any(c in feature.name for c in "/\\\0") or feature.name[0] == "." or len(feature.name.encode()) > 200:
            raise ConfigError(f"column {feature.name!r} cannot be the name of a file. Rename it or --drop it.")
    if len(names) == 1:
        raise ConfigError("no column is left to learn from. Name some with --ids or --dense, or drop fewer.")
