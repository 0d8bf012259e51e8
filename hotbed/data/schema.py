"""The content of a dataset directory: columns, tables, splits, as stored in `schema.json`.

    DIR/schema.json                 this file's Schema
    DIR/train/part-00000.arrow      label (float32), dense columns (float32), id columns (int32 or int64), bag columns (list)
    DIR/valid/..., DIR/test/...     the same columns; a split may be absent
    DIR/counts/<table>.parquet      columns id (int64), count (int64); train split only, most frequent first
    DIR/quarantine.jsonl            one line per rejected row: file, line, reason, text

Ids on disk. `vocabulary` features hold row numbers: row 0 is "unknown" (not in train, or rarer there than min_count),
row 1 + k is the k-th line of the counts file. `hash` features hold the raw 64-bit id; the table takes it modulo its rows
(the hashing trick, chosen by the user). `direct` features hold integers that already are row numbers. `raw` features hold
the raw 64-bit id for tables of dynamic ids; their `rows` is 0.

Tables. A feature has a table of its own name, or reads that of another feature (`shares`): one vocabulary and one row for an id
in either column. Features of one table are neighbours, so tables and features have one order.

Counts. Every count in a counts file is exact. Where `counting` is "sketch", a feature had more distinct ids than `prepare` had
memory for: its file lists exactly the ids of train that occur more than `count_error` times (and min_count times), the
others share row 0, and `distinct` is an estimate.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from hotbed.errors import RemoteError, SchemaError
from hotbed.host.atomic import write_file

FORMAT_VERSION = 2  # 1: rows in Parquet files, which are still read
SOURCES = ("string", "integer", "bucket")
KEEPS = ("last", "first")
TASK_KINDS = ("binary", "regression")
IdMode = Literal["vocabulary", "hash", "direct", "raw"]
Counting = Literal["exact", "sketch"]
CLOCK_PARTS = ("hour", "weekday")
STATISTICS = ("counting", "count_error", "distinct_estimate", "lookups", "unlisted_lookups")


@dataclass(frozen=True)
class DenseColumn:
    """One number per sample, already transformed on disk; `transform` says how, so that raw rows can be scored later."""

    name: str
    transform: str = "none"  # "none" or "log" (sign(x) * log1p(|x|)), then missing -> 0
    mean: float = 0.0  # subtracted after the transform
    scale: float = 1.0  # divided by after that


@dataclass(frozen=True)
class IdFeature:
    """One id per sample, or a bag of them (`multi`), or an ordered bag of limited `length`: a sequence."""

    name: str
    rows: int  # rows its table needs
    mode: IdMode = "vocabulary"
    multi: bool = False
    # how raw text becomes a 64-bit id: "string" (stable hash), "integer", "bucket" (log buckets), "hour:UNIT" or "weekday:UNIT"
    # (of a time in that unit, see times.py)
    source: str = "string"
    separator: str = ""  # between the values of a multi-valued raw column
    distinct: int = 0  # distinct raw ids of its table in train; `distinct_estimate` if they were too many to count
    counting: Counting = "exact"  # "sketch": too many distinct ids for the memory given, see `count_error`
    count_error: int = 0  # an id that occurs at most this often in train may be absent from the counts file
    distinct_estimate: int = 0  # HyperLogLog of the ids of train, standard error 0.41 %; 0: not known
    lookups: int = 0  # ids in train, repetitions included; 0: not known
    unlisted_lookups: int = 0  # those of ids that are not in the counts file; row 0 of a vocabulary has them
    length: int = 0  # of a sequence: the most ids of a sample, in order; 0: a bag, or one id
    keep: str = "last"  # which ids of a longer sequence are kept, "last" or "first"
    shares: str = ""  # the feature whose table it reads; empty: it has its own

    @property
    def table(self) -> str:
        """The table that it reads."""
        return self.shares or self.name


@dataclass(frozen=True)
class Task:
    """A further label: a column of 0 and 1, or of numbers to predict."""

    name: str
    kind: str = "binary"  # "binary" (log loss) or "regression" (squared error)


class ClockSource(NamedTuple):
    """The source of a feature that is made of a time."""

    part: str  # hour or weekday
    unit: str  # of the time: as in `--time COLUMN:UNIT`


def clock_of(source: str) -> ClockSource | None:
    """The parts of `hour:UNIT` or `weekday:UNIT`; None for other sources."""
    part, colon, unit = source.partition(":")
    return ClockSource(part, unit) if colon and part in CLOCK_PARTS else None


@dataclass(frozen=True)
class Split:
    """The files of one split, in reading order, with their row counts."""

    files: tuple[str, ...]  # relative to the dataset directory
    file_rows: tuple[int, ...]
    positives: int = 0

    @property
    def rows(self) -> int:
        return sum(self.file_rows)


@dataclass(frozen=True)
class Schema:
    """Everything that a reader of the dataset needs to know."""

    label: str
    dense: tuple[DenseColumn, ...]
    features: tuple[IdFeature, ...]
    splits: dict[str, Split]
    raw_format: str = (
        ""  # the reader that parsed the raw files ("criteo", "csv", ...), so that raw rows can be scored later
    )
    best_auc: dict[str, float] = field(default_factory=dict)  # split -> best possible AUC, where the generator knows it
    notes: dict[str, Any] = field(default_factory=dict)  # provenance: source files, bad rows, generator settings
    tasks: tuple[Task, ...] = ()  # further labels, float32 columns
    weight: str = ""  # the float32 column that says how much a sample counts; empty: all count the same
    format_version: int = FORMAT_VERSION

    @property
    def labels(self) -> tuple[Task, ...]:
        """All labels: that of `--label`, then the further ones."""
        return (Task(self.label), *self.tasks)

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns of further labels, then that of weights."""
        return (*(task.name for task in self.tasks), *([self.weight] if self.weight else []))

    @property
    def tables(self) -> dict[str, tuple[IdFeature, ...]]:
        """The features of every table, in one order of both."""
        return features_by_table(self.features)

    def save(self, directory: Path) -> None:
        """Write schema.json atomically."""
        write_file(directory / "schema.json", json.dumps(self._plain(), indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Schema:
        """Read and check schema.json; anything wrong is a SchemaError."""
        path = directory / "schema.json"
        if not path.is_file():
            raise SchemaError(
                f"{directory} is not a hotbed dataset: it has no schema.json. `hotbed prepare RAW... --out DIR` writes one."
            )
        try:
            raw = json.loads(path.read_text())
            version = raw["format_version"]
            if version > FORMAT_VERSION:
                raise SchemaError(
                    f"{path} has format version {version}; this hotbed reads up to {FORMAT_VERSION}. Update hotbed."
                )
            schema = cls(
                **{
                    **raw,
                    "dense": tuple(DenseColumn(**column) for column in raw["dense"]),
                    "features": tuple(IdFeature(**feature) for feature in raw["features"]),
                    "tasks": tuple(Task(**task) for task in raw.get("tasks", ())),
                    "splits": {
                        name: Split(tuple(split["files"]), tuple(split["file_rows"]), split["positives"])
                        for name, split in raw["splits"].items()
                    },
                }
            )
            schema._check()
            return schema
        except RemoteError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
            raise SchemaError(
                f"{path} is damaged ({type(error).__name__}: {error}). Run `hotbed prepare` again."
            ) from error

    def identity(self) -> dict[str, Any]:
        """What identifies a dataset: without provenance and statistics, which older datasets lack."""
        known = dataclasses.replace(self, notes={})._plain()
        for feature in known["features"]:
            for name in STATISTICS:
                del feature[name]
        return known

    def _plain(self) -> dict[str, Any]:
        """For JSON; what only some datasets have is left out of the others, which older versions read."""
        plain = dataclasses.asdict(self)
        for feature in plain["features"]:
            if not feature["length"]:
                del feature["length"], feature["keep"]
            if not feature["shares"]:
                del feature["shares"]
        for name in ("tasks", "weight"):
            if not plain[name]:
                del plain[name]
        return plain

    def _check(self) -> None:
        """Raise a ValueError for values that are impossible."""
        names = [self.label, *(one.name for one in self.dense), *(one.name for one in self.features), *self.targets]
        _demand(all(isinstance(name, str) and name for name in names), f"has names {names}")
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        _demand(not twice, f"names {', '.join(twice)} more than once")
        for one in self.dense:
            _demand(one.transform in ("none", "log") and math.isfinite(one.mean), f"{one}")
            _demand(math.isfinite(one.scale) and one.scale != 0, f"{one}")
        for feature in self.features:
            _demand(type(feature.rows) is int and feature.rows >= 0 and type(feature.multi) is bool, f"{feature}")
            _demand("/" not in feature.name, f"{feature}")  # it is also a file name
            _demand(feature.mode in get_args(IdMode), f"{feature}")
            _demand(feature.source in SOURCES or clock_of(feature.source) is not None, f"{feature}")
            _demand(feature.counting in get_args(Counting), f"{feature}")
            _demand(type(feature.length) is int and feature.length >= 0 and feature.keep in KEEPS, f"{feature}")
            _demand(feature.multi or not feature.length, f"{feature}")
            numbers = (getattr(feature, name) for name in ("distinct", *STATISTICS[1:]))
            _demand(all(type(number) is int and number >= 0 for number in numbers), f"{feature}")
        _check_tables(self.features)
        _demand(all(task.kind in TASK_KINDS for task in self.tasks), f"has tasks {self.tasks}")
        for name, split in self.splits.items():
            _demand(all(isinstance(file, str) for file in split.files), f"{split}")
            _demand(all(type(rows) is int and rows >= 0 for rows in split.file_rows), f"{split}")
            files, counts = len(split.files), len(split.file_rows)
            _demand(files == counts, f"split {name} lists {files} files and {counts} row counts")
        _demand(isinstance(self.notes, dict) and isinstance(self.best_auc, dict), "notes or best_auc is not a mapping")


def features_by_table(features: Iterable[IdFeature]) -> dict[str, tuple[IdFeature, ...]]:
    """The features of every table; tables in the order of their first features."""
    found: dict[str, tuple[IdFeature, ...]] = {}
    for feature in features:
        found[feature.table] = (*found.get(feature.table, ()), feature)
    return found


def _check_tables(features: Sequence[IdFeature]) -> None:
    tables = features_by_table(features)
    in_order = [feature for of_table in tables.values() for feature in of_table]
    _demand(in_order == list(features), "does not have features of one table side by side")
    for name, of_table in tables.items():
        _demand(
            any(one.name == name for one in of_table), f"has no feature {name}, whose table {of_table[0].name} shares"
        )
        _demand(len({(one.mode, one.rows, one.source) for one in of_table}) == 1, f"has different ids in table {name}")


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what[:200])
