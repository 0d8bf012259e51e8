"""A dataset directory in, a checked Dataset out: the schema, and where every row group lies.

Opening reads schema.json and the footer of every file of rows (a millisecond each), never the rows. A file that is missing,
truncated, or differs from the schema in columns, types or row counts is found before a run starts. Files of rows are Arrow
files (arrow_file.py), or Parquet, which hotbed 0.1 wrote; "row group" also names the record batch of an Arrow file.

`hot_rows`: the most frequent rows of a dataset, which may fill a cache before the first step. They come from the counts files
that `prepare` wrote, so only one line per distinct id is read. Ids that `min_count` left out of a vocabulary share row 0, which
is not counted.

`describe`: rows, positives, distinct ids and their skew, as a dict for JSON. All figures are exact: they come from the counts
files, which `prepare` made from every row of the train split, without ids that `min_count` or its memory limit left out.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotbed.data.arrow_file import SUFFIX, BatchPlace, read_index
from hotbed.data.schema import IdFeature, Schema
from hotbed.data.workspace import recover
from hotbed.errors import RemoteError, SchemaError, reason_of
from hotbed.files import RemotePath, path_of, readable

TOP_SHARE = 0.015  # of the ids; what the published caches hold on the device
CURVE_POINTS = 64
STATIC_SHARE = 0.9  # of the slots; the rest is for other rows (Criteo, 1.5 %: 0.75 misses 3 % more, 1.0 1 % more)
AGAIN = "Run `hotbed prepare` again, or restore the file."


class ArrowBatch(NamedTuple):
    """A record batch of an Arrow file."""

    place: BatchPlace
    schema: pa.Schema  # of its file


class RowGroup(NamedTuple):
    """The smallest part of a split that can be read independently."""

    file: Path
    number: int  # within its file
    rows: int
    stamp: tuple[int, int] | None = None  # of the file, when it was opened
    batch: ArrowBatch | None = None  # of an Arrow file; None for Parquet


class HotRows(NamedTuple):
    """Rows that are in the cache before the first step."""

    keys: NDArray[np.int64]  # ascending
    uses: NDArray[np.int64]  # of each in the train split

    def only(self, which: NDArray[Any]) -> HotRows:
        """The rows that `which` selects."""
        return HotRows(self.keys[which], self.uses[which])


class FeatureCounts(NamedTuple):
    """How often each id of a table occurs in the train split, most frequent first."""

    ids: NDArray[np.int64]  # the raw 64-bit ids
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class Dataset:
    """An open dataset directory."""

    path: Path
    schema: Schema
    row_groups: dict[str, tuple[RowGroup, ...]]  # split -> in reading order

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Read the schema and check every file against it."""
        directory = path_of(path)
        recover(directory)
        schema = Schema.load(directory)
        expected = _expected_types(schema)
        if isinstance(directory, RemotePath):
            _read_footers(directory, schema)
        row_groups = {
            name: tuple(
                group
                for file, rows in zip(split.files, split.file_rows, strict=True)
                for group in _row_groups(directory / file, rows, expected)
            )
            for name, split in schema.splits.items()
        }
        return cls(directory, schema, row_groups)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies a dataset by columns, splits, id lists, and the footers (sizes and ranges) of all files of rows."""
        digest = hashlib.sha256(json.dumps(self.schema.identity(), sort_keys=True).encode())
        for table in self.schema.tables:
            path = self.path / "counts" / f"{table}.parquet"
            if path.is_file():
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        for split in self.schema.splits.values():
            for name in split.files:
                digest.update(_footer(self.path / name))
        return digest.hexdigest()[:16]

    def split(self, name: str) -> tuple[RowGroup, ...]:
        """The row groups of a split."""
        if name not in self.row_groups:
            known = ", ".join(self.row_groups) or "none"
            raise SchemaError(f"{self.path} has no split {name!r}; its splits are: {known}. Choose one of them.")
        return self.row_groups[name]

    def feature(self, name: str) -> IdFeature:
        """The id feature of that name."""
        for feature in self.schema.features:
            if feature.name == name:
                return feature
        known = ", ".join(feature.name for feature in self.schema.features)
        raise SchemaError(f"{self.path} has no id feature {name!r}; its features are: {known}.")

    def counts(self, feature: str) -> FeatureCounts:
        """The counts file of a feature's table."""
        return read_counts(self.path / "counts" / f"{self.feature(feature).table}.parquet")


def read_counts(path: Path) -> FeatureCounts:
    """A counts file, checked."""
    if not path.is_file():
        raise SchemaError(f"{path} does not exist. {AGAIN}")
    try:
        table = pq.read_table(readable(path), columns=["id", "count"])
    except RemoteError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise SchemaError(f"{path} cannot be read ({reason_of(error)}). {AGAIN}") from error
    if table.column_names != ["id", "count"] or any(kind != pa.int64() for kind in table.schema.types):
        raise SchemaError(f"{path} must have the int64 columns id and count; it has {_columns(table.schema)}. {AGAIN}")
    if table["id"].null_count or table["count"].null_count:
        raise SchemaError(f"{path} has empty entries. {AGAIN}")
    return FeatureCounts(table["id"].to_numpy(), table["count"].to_numpy())


def _expected_types(schema: Schema) -> dict[str, tuple[pa.DataType, ...]]:
    """Column -> the types it may have in a file."""
    ids = (pa.int32(), pa.int64())
    bags = tuple(kind(value) for kind in (pa.list_, pa.large_list) for value in ids)
    return {
        schema.label: (pa.float32(),),
        **{column.name: (pa.float32(),) for column in schema.dense},
        **dict.fromkeys(schema.targets, (pa.float32(),)),
        **{feature.name: bags if feature.multi else ids for feature in schema.features},
    }


def _read_footers(directory: RemotePath, schema: Schema) -> None:
    """Have the sizes of all files, and the last block of each, here before they are read one by one."""
    sizes = {str(path): stat.st_size for path, stat in directory.entries(recursive=True) if stat is not None}
    files = [directory / file for split in schema.splits.values() for file in split.files]
    for file in files:
        if (size := sizes.get(str(file), 0)) > 0:
            file.content().fetch_ahead(size - 1, size)


def _row_groups(file: Path, rows: int, expected: dict[str, tuple[pa.DataType, ...]]) -> list[RowGroup]:
    """Check one file of rows by its footer."""
    if not file.is_file():
        raise SchemaError(f"{file} does not exist although schema.json lists it. {AGAIN}")
    is_arrow = file.suffix == SUFFIX
    try:
        columns, groups = _arrow_groups(file) if is_arrow else _parquet_groups(file)
    except RemoteError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        kind = "Arrow" if is_arrow else "Parquet"
        raise SchemaError(f"{file} is not a readable {kind} file ({reason_of(error)}). {AGAIN}") from error
    for name, types in expected.items():
        if columns.get_field_index(name) < 0:
            raise SchemaError(f"{file} has no column {name!r}; it has {_columns(columns)}. {AGAIN}")
        kind = columns.field(name).type
        if not any(_same_type(kind, allowed) for allowed in types):
            allowed_names = " or ".join(str(allowed) for allowed in types)
            raise SchemaError(f"{file}: column {name!r} has type {kind}; it must be {allowed_names}. {AGAIN}")
    found = sum(group.rows for group in groups)
    if found != rows:
        raise SchemaError(f"{file} holds {found:,} rows; schema.json says {rows:,}. {AGAIN}")
    return [group for group in groups if group.rows]


def _arrow_groups(file: Path) -> tuple[pa.Schema, list[RowGroup]]:
    stamp, index = stamp_of(file), read_index(file)
    if index.name not in ("", here := f"{file.parent.name}/{file.name}"):
        raise ValueError(f"it was written as {index.name} and is now {here}")
    places = enumerate(index.places)
    return index.schema, [RowGroup(file, i, one.rows, stamp, ArrowBatch(one, index.schema)) for i, one in places]


def _parquet_groups(file: Path) -> tuple[pa.Schema, list[RowGroup]]:
    stamp = stamp_of(file)
    with pq.ParquetFile(readable(file)) as parquet:
        metadata, columns = parquet.metadata, parquet.schema_arrow
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return columns, [RowGroup(file, number, size, stamp) for number, size in enumerate(sizes)]


def stamp_of(file: Path) -> tuple[int, int]:
    """Size and time of the last change: they differ if the file was replaced or written to."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _footer(file: Path) -> bytes:
    """The index of an Arrow file, or the footer of a Parquet file, which ends with: footer, its length (4 bytes), PAR1."""
    if file.suffix == SUFFIX:
        return read_index(file).content
    with file.open("rb") as bytes_of:
        bytes_of.seek(-8, os.SEEK_END)
        length = int.from_bytes(bytes_of.read(4), "little")
        bytes_of.seek(-8 - length, os.SEEK_END)
        return bytes_of.read(length)


def _same_type(kind: pa.DataType, allowed: pa.DataType) -> bool:
    """Equal, ignoring the name of a list's item."""
    if pa.types.is_list(allowed) or pa.types.is_large_list(allowed):
        return type(kind) is type(allowed) and bool(kind.value_type == allowed.value_type)
    return bool(kind == allowed)


def _columns(schema: pa.Schema) -> str:
    shown = [f"{field.name} ({field.type})" for field in list(schema)[:50]]
    return ", ".join(shown) + (f" and {len(schema) - 50} more" if len(schema) > 50 else "")


def num_warm(num_slots: int, policy: str, warmup: float) -> int:
    """Slots that are filled before the first step; a static cache keeps what is in them, so it always has some."""
    return int(num_slots * (STATIC_SHARE if policy == "static" and not warmup else warmup))


def hot_rows(dataset: Dataset, num_rows: int) -> HotRows:
    """The most frequent rows."""
    keys, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    base = 0
    for name, (feature, *_) in dataset.schema.tables.items():
        rows, times = count_rows(feature, dataset.counts(name))
        keys.append(base + rows)
        counts.append(times)
        base += rows.shape[0] if feature.mode == "raw" else feature.rows
    every, times = np.concatenate(keys), np.concatenate(counts)
    return hottest(every, times, num_rows)


def hottest(keys: NDArray[np.int64], uses: NDArray[np.int64], num_rows: int) -> HotRows:
    """The rows with the most uses, of distinct keys."""
    chosen = np.argsort(-uses, kind="stable")[:num_rows]
    return HotRows(keys, uses).only(chosen[np.argsort(keys[chosen])])


def count_rows(feature: IdFeature, counts: FeatureCounts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(rows of the feature's table, uses of each), for rows that are used."""
    if feature.mode == "vocabulary":  # row 1 + k is the k-th line
        listed = min(counts.ids.shape[0], feature.rows - 1)
        return np.arange(1, 1 + listed, dtype=np.int64), counts.counts[:listed]
    if feature.mode == "raw":  # row k is the k-th line
        return np.arange(counts.ids.shape[0], dtype=np.int64), counts.counts
    rows, place = np.unique(counts.ids % feature.rows, return_inverse=True)
    times = np.zeros(rows.shape[0], dtype=np.int64)
    np.add.at(times, place, counts.counts)
    return rows, times


def describe(dataset: Dataset) -> dict[str, Any]:
    """Sizes of the splits, and the skew of every table and of all of them together."""
    schema = dataset.schema
    splits = {
        name: {"rows": split.rows, "positive_rate": split.positives / split.rows if split.rows else None}
        for name, split in sorted(schema.splits.items(), key=lambda item: _place(item[0]))
    }
    counts = {name: dataset.counts(name).counts for name in schema.tables}
    rows = {name: one.distinct if one.mode == "raw" else one.rows for name, (one, *_) in schema.tables.items()}
    features = [{"name": name, "rows": rows[name], **skew(counts[name])} for name in rows]
    together = np.concatenate([np.zeros(0, dtype=np.int64), *counts.values()])
    total = {"name": "total", "rows": sum(rows.values()), **skew(together)}
    return {"splits": splits, "features": features, "total": total}


def skew(counts: NDArray[np.int64]) -> dict[str, Any]:
    """How unevenly the lookups in `counts` (one entry per distinct id) are distributed over ids."""
    falling = np.sort(counts)[::-1]
    reached = np.cumsum(falling)
    lookups = int(reached[-1]) if len(reached) else 0
    if not lookups:
        return {"distinct": len(falling), "lookups": 0, "top_share": None, "curve": []}
    top = int(np.ceil(len(falling) * TOP_SHARE))
    places = np.unique(np.round(np.geomspace(1, len(falling), CURVE_POINTS)).astype(np.int64))
    return {
        "distinct": len(falling),
        "lookups": lookups,
        "top_share": int(reached[top - 1]) / lookups,
        "curve": [[int(place) / len(falling), int(reached[place - 1]) / lookups] for place in places],
    }


def _place(split: str) -> tuple[int, str]:
    """The usual splits in their usual order, then others by name."""
    usual = ("train", "valid", "test")
    return (usual.index(split) if split in usual else len(usual), split)
