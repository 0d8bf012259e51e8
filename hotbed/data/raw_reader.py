"""Raw files in, batches out, by the schema and counts of a dataset or a saved model; used by `hotbed predict`.

A raw row gets the same numbers and rows as in `prepare`, because both use `encode.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from hotbed.data.dataset import read_counts
from hotbed.data.encode import EncodedRows, encode, raw_column, time_of
from hotbed.data.formats import Chunk, Format, guess_format, open_format
from hotbed.data.formats.parquet import has_micros, stored_types
from hotbed.data.prepare.quarantine import MaxBad, Quarantine
from hotbed.data.schema import IdFeature, Schema
from hotbed.data.times import TimeColumn
from hotbed.data.values import Bags, LabelReader, Target, Targets, standardise
from hotbed.data.vocabulary import Numbering
from hotbed.errors import FormatError, SchemaError
from hotbed.files import path_of
from hotbed.types import Batch, Jagged

RowsOf = Callable[[IdFeature, np.ndarray], np.ndarray]  # the rows of 64-bit ids of a feature


class RawBatch(NamedTuple):
    """A batch, and the file and lines of its samples."""

    batch: Batch
    file: str
    lines: np.ndarray  # int64 [B]


class RawReader:
    """Batches of raw files, by the schema.json and counts/ of a dataset or model directory.

    The columns of labels may be absent or empty; such labels are NaN. Bad rows are left out and counted in `quarantine`;
    too many of them raise FormatError.
    """

    def __init__(
        self,
        directory: str | Path,
        paths: Sequence[str | Path],
        *,
        batch_size: int = 4096,
        format: str | None = None,
        max_bad: str = "1%",
        rows_of: RowsOf | None = None,
        time: TimeColumn | None = None,
        needs_labels: bool = False,
    ) -> None:
        """`rows_of` maps the ids of a feature to rows, if the caller has loaded the vocabularies already.

        `time`: a column whose times are read, too. `needs_labels`: a row without a label or a weight is bad.
        """
        self._time, self._needs_labels = time, needs_labels
        self._directory = path_of(directory)
        self.schema = Schema.load(self._directory)
        self._paths = [path_of(path) for path in paths]
        self._batch_size = batch_size
        raw = self.schema.notes.get("raw", {})
        self._raw = raw if isinstance(raw, dict) else {}
        name = format or self.schema.raw_format
        if not name:
            raise SchemaError(
                f"{self._directory / 'schema.json'} does not define the format of raw rows (raw_format is empty). "
                "Name the format: criteo, csv, parquet, libsvm or lists."
            )
        self._wanted = [spec.name for spec in self.schema.dense] + [raw_column(one) for one in self.schema.features]
        if time is not None:
            self._wanted.append(time.name)
        self._targets = [Target(task.name, task.kind) for task in self.schema.tasks]
        if needs_labels and self.schema.weight:
            self._targets.append(Target(self.schema.weight, "weight"))
        self._labels = [self.schema.label, *(target.name for target in self._targets)]
        self._format = self._open(name)
        self._any_format = format is None
        tables = self.schema.tables.items() if rows_of is None else ()
        numbered = {name: one for name, (one, *_) in tables if one.mode == "vocabulary"}
        self._numberings = {name: _load_numbering(self._directory, one) for name, one in numbered.items()}
        self.rows_of = rows_of or self._numbered
        positive = self._raw.get("positive")
        means = f", a label of {positive!r} means 1" if positive is not None else ""
        self._advice = f"Rows are read as those of the training data ({name}{means})."
        self._max_bad = MaxBad.parse(max_bad)
        self.quarantine = self.new_quarantine()

    def __iter__(self) -> Iterator[Batch]:
        return (located.batch for located in self.located())

    def new_quarantine(self) -> Quarantine:
        """Counts bad rows, with the limit and the messages of this reader."""
        return Quarantine(self._max_bad, advice=self._advice)

    def located(self) -> Iterator[RawBatch]:
        """Batches with the file and line of every sample. A batch never spans two chunks of a file."""
        for path in self._paths:
            for chunk in self.format_of(path).chunks(path):
                encoded = self.encode(chunk, path)
                self.quarantine.add(encoded.bad, len(encoded.lines))
                for start in range(0, len(encoded.lines), self._batch_size):
                    stop = min(start + self._batch_size, len(encoded.lines))
                    yield RawBatch(
                        batch_of(encoded, self.schema, self.rows_of, start, stop), str(path), encoded.lines[start:stop]
                    )
        self.quarantine.check()

    def _open(self, name: str) -> Format:
        return open_format(
            name,
            delimiter=self._raw.get("delimiter"),
            wanted={*self._labels, *self._wanted}.__contains__,
            label_optional=not self._needs_labels,
            time=self.time_name,
            micros=has_micros(self.schema.notes),
        )

    def format_of(self, path: Path) -> Format:
        """The format of the training data; a model trained on text also reads Parquet and Arrow if they mean the same."""
        if not self._any_format or self._format.name == "parquet" or guess_format(path) != "parquet":
            return self._format
        self.check_types(stored_types(path), path)
        return self._open("parquet")

    @property
    def time_name(self) -> str | None:
        """The time column, or the one that features are made of."""
        return self._time.name if self._time else time_of(self.schema.features)

    @property
    def columns(self) -> list[str]:
        """The columns that a raw row must have."""
        return list(dict.fromkeys([*self._labels, *self._wanted] if self._needs_labels else self._wanted))

    def is_wanted(self, column: str) -> bool:
        """Whether it is read."""
        return column in self._labels or column in self._wanted

    def check_types(self, types: Mapping[str, pa.DataType], path: Path) -> None:
        """For a model that was trained on text: a FormatError for types that text can spell in several ways.

        These are dates and times, and 2.0 or true as ids.
        """
        strings = {raw_column(one) for one in self.schema.features if one.source == "string"}
        unlike = [
            f"{name} ({kind})"
            for name, kind in types.items()
            if self._format.name != "parquet"
            and name in self._wanted
            and name != self.time_name
            and (pa.types.is_temporal(kind) or (name in strings and _many_spellings(kind)))
        ]
        if unlike:
            raise FormatError(
                f"{path}: the model was trained on {self._format.name} files, where {', '.join(unlike)} is text, and its "
                "spelling is not known. Write it as the same text, or score a file in the format of the training data."
            )

    def encode(self, chunk: Chunk, path: Path) -> EncodedRows:
        """The good rows of a chunk."""
        schema = self.schema
        absent = [name for name in self.columns if name not in chunk.columns]
        if absent:
            raise FormatError(
                f"{path} has no column {', '.join(absent)}, which the model needs. Its columns are: "
                f"{', '.join([*chunk.columns, *chunk.unread])}."
            )
        label = None
        if schema.label in chunk.columns:
            label = LabelReader(
                schema.label,
                positive=self._raw.get("positive"),
                negative=self._raw.get("negative"),
                signed=self._format.name == "libsvm",
                optional=not self._needs_labels,
            )
        targets = Targets(self._targets, optional=not self._needs_labels)
        return encode(chunk, label, schema.dense, schema.features, self._time, targets)

    def _numbered(self, feature: IdFeature, ids: np.ndarray) -> np.ndarray:
        """Row numbers for a vocabulary (0 for the unknown), the ids themselves otherwise; int64."""
        numbering = self._numberings.get(feature.table)
        return ids.copy() if numbering is None else numbering.find(ids).astype(np.int64) + 1


def batch_of(encoded: EncodedRows, schema: Schema, rows_of: RowsOf, start: int, stop: int) -> Batch:
    """Rows start .. stop - 1 as the model reads them; `rows_of` makes rows of the 64-bit ids of a feature."""
    dense = [standardise(values[start:stop], spec) for values, spec in zip(encoded.dense, schema.dense)]
    targets = [torch.from_numpy(values[start:stop].astype(np.float32)) for values in encoded.dense[len(dense) :]]
    tasks = targets[: len(schema.tasks)]
    single: list[np.ndarray] = []
    bags: dict[str, Jagged] = {}
    for feature, ids in zip(schema.features, encoded.ids):
        if isinstance(ids, Bags):
            offsets = ids.offsets[start : stop + 1]
            rows = rows_of(feature, ids.ids[offsets[0] : offsets[-1]])
            bags[feature.name] = Jagged(torch.from_numpy(rows), torch.from_numpy(offsets - offsets[0]))
        else:
            single.append(rows_of(feature, ids[start:stop]))
    size = stop - start
    return Batch(
        labels=torch.from_numpy(encoded.labels[start:stop].copy()),
        dense=torch.from_numpy(np.stack(dense, axis=1) if dense else np.zeros((size, 0), dtype=np.float32)),
        ids=torch.from_numpy(np.stack(single, axis=1) if single else np.zeros((size, 0), dtype=np.int64)),
        bags=bags,
        targets=torch.stack(tasks, dim=1) if tasks else None,
        weights=next(iter(targets[len(tasks) :]), None),
    )


def read_vocabulary(directory: Path, feature: IdFeature) -> np.ndarray:
    """The ids of a vocabulary, most frequent first: int64 [rows - 1]."""
    path = directory / "counts" / f"{feature.table}.parquet"
    ids = read_counts(path).ids
    if len(ids) + 1 != feature.rows:
        raise SchemaError(
            f"{path} holds {len(ids):,} ids; schema.json expects {feature.rows - 1:,}. They do not belong together: "
            "run `hotbed prepare` again, or restore the file."
        )
    return ids


def _many_spellings(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _load_numbering(directory: Path, feature: IdFeature) -> Numbering:
    ids = read_vocabulary(directory, feature)
    numbering = Numbering()
    numbering.add(ids, np.zeros(len(ids), dtype=np.bool_))
    if len(ids) != len(numbering):
        raise SchemaError(
            f"{directory / 'counts' / feature.table}.parquet lists an id twice. Run `hotbed prepare` again."
        )
    return numbering
