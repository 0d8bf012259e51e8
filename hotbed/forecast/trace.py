"""Batches -> a trace: the distinct keys of every batch, in the order of training, without rows, labels or gradients.

Keys are those of training (tables in schema order), so a cache makes the same decisions for a trace as in training. A trace of
Criteo-Kaggle at batch 16,384 takes 0.9 MB per batch; `max_batches` limits it.

A file of ids, the log of any other system, is a source of batches too:

.npy       integers [N], one lookup each, or [N, F], one line per sample with one id of F features
.parquet   every integer column is a feature; lists are bags

Every feature has a table of its own. Ids are 64-bit integers, negative ones are padding. Rows are the distinct ids, so a share
of the rows is a share of those that occur. The whole file is in memory while it is read.

Shapes: N batches, E distinct keys of all batches, batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotbed.data.dataset import Dataset, HotRows, hot_rows, hottest
from hotbed.data.loader.loader import Loader
from hotbed.data.schema import IdFeature
from hotbed.data.vocabulary import Numbering
from hotbed.errors import ConfigError, SchemaError
from hotbed.types import Batch

Ints = NDArray[np.int64]
SUFFIXES = (".npy", ".parquet")


class Trace(NamedTuple):
    """The lookups of every batch."""

    keys: NDArray[np.int64]  # [E], ascending within a batch
    counts: NDArray[np.int32]  # [E], lookups of each
    offsets: NDArray[np.int64]  # [N + 1]; batch n owns keys[offsets[n]:offsets[n + 1]]
    num_rows: int  # of all tables

    @property
    def num_batches(self) -> int:
        return int(self.offsets.shape[0]) - 1

    @property
    def most_keys(self) -> int:
        """Distinct keys of the largest batch: the least number of slots for the trace."""
        return int(np.diff(self.offsets).max(initial=0))

    @property
    def num_lookups(self) -> int:
        return int(self.counts.sum(dtype=np.int64))

    def distinct(self) -> NDArray[np.int64]:
        """Every key that occurs, ascending."""
        return np.unique(self.keys)

    def batch(self, number: int) -> NDArray[np.int64]:
        """The distinct keys of a batch."""
        return self.keys[self.offsets[number] : self.offsets[number + 1]]


def trace_of(lookups: Iterable[NDArray[np.int64]], num_rows: int) -> Trace:
    """A trace from the lookups of each batch, as keys; negative keys are padding."""
    keys, counts, offsets = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [0]
    for batch in lookups:
        found, times = np.unique(batch, return_counts=True)
        wanted = found >= 0
        keys.append(found[wanted].astype(np.int64, copy=False))
        counts.append(times[wanted].astype(np.int32))
        offsets.append(offsets[-1] + int(wanted.sum()))
    return Trace(np.concatenate(keys), np.concatenate(counts), np.array(offsets, dtype=np.int64), num_rows)


def read_trace(
    dataset: Dataset,
    *,
    batch_size: int,
    split: str = "train",
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    max_batches: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Trace:
    """An epoch of a split, as a run with the same batch size, seed and shuffling reads it."""
    if max_batches is not None and max_batches < 1:
        raise ConfigError(f"max_batches is {max_batches}; a trace needs at least 1.")
    if not dataset.schema.features:
        raise SchemaError(f"{dataset.path} has no id features, so there is nothing to look up.")
    loader = Loader(dataset, split, batch_size=batch_size, shuffle=shuffle, seed=seed)
    total = min(len(loader), max_batches or len(loader))
    keys_of = _Keys(dataset)

    def lookups() -> Iterable[NDArray[np.int64]]:
        with closing(loader.id_batches(epoch)) as batches:
            for done, batch in enumerate(islice(batches, total), start=1):
                yield keys_of(batch)
                progress(done, total)

    return trace_of(lookups(), keys_of.num_rows)


def rows_of(dataset: Dataset, raw: Mapping[str, int] | None = None) -> list[int]:
    """Rows of every table, in the order of the keys; of raw ids those of train, whose number may be known already."""
    return [
        (raw[name] if raw is not None else int(dataset.counts(name).ids.shape[0])) if one.mode == "raw" else one.rows
        for name, (one, *_) in dataset.schema.tables.items()
    ]


class _Keys:
    """Ids -> keys, as a group of all tables numbers them; raw ids of train by their frequency."""

    def __init__(self, dataset: Dataset) -> None:
        self._features = dataset.schema.features
        tables = dataset.schema.tables
        self._numberings = {name: _numbering(dataset, name) for name, (one, *_) in tables.items() if one.mode == "raw"}
        rows = rows_of(dataset, {name: len(numbering) for name, numbering in self._numberings.items()})
        self._base_of = dict(zip(tables, np.cumsum([0, *rows[:-1]], dtype=np.int64), strict=True))
        self.num_rows = sum(rows)

    def __call__(self, batch: Batch) -> NDArray[np.int64]:
        ids, column = batch.ids.numpy(), 0
        parts = []
        for feature in self._features:
            if feature.multi:
                values = batch.bags[feature.name].values.numpy()
            else:
                values, column = ids[:, column], column + 1
            parts.append(self._base_of[feature.table] + self._rows(feature, values))
        return np.concatenate(parts)

    def _rows(self, feature: IdFeature, values: NDArray[np.int64]) -> NDArray[np.int64]:
        if feature.mode == "hash":
            return values % feature.rows
        if feature.mode != "raw":
            return values
        rows = self._numberings[feature.table].find(np.ascontiguousarray(values)).astype(np.int64)
        if (rows < 0).any():
            unknown = int(values[np.argmax(rows < 0)])
            raise SchemaError(
                f"id {unknown} of feature {feature.name!r} is not in the train split, so it has no row to be simulated; "
                "read --split train."
            )
        return rows


def _numbering(dataset: Dataset, table: str) -> Numbering:
    ids = dataset.counts(table).ids
    numbering = Numbering()
    numbering.add(ids, np.zeros(ids.shape[0], dtype=np.bool_))
    return numbering


class FileColumn(NamedTuple):
    """The ids of one feature."""

    name: str
    values: Ints  # [V], of all samples
    offsets: Ints  # [N + 1]; sample n has values[offsets[n]:offsets[n + 1]]


class TraceSource(NamedTuple):
    """A trace, and what a simulation has to know of its tables."""

    trace: Trace
    names: list[str]  # of the tables
    ends: list[int]  # keys of table f are below ends[f]
    hot: Callable[[int], HotRows]  # the most frequent rows, up to a number


def from_file(path: Path, batch_size: int, max_batches: int | None = None) -> TraceSource:
    """Batches of a file of ids, in its order; its most frequent ids are those that occur most in it."""
    columns = _npy(path) if path.suffix == ".npy" else _parquet(path)
    num_samples = columns[0].offsets.shape[0] - 1 if columns else 0
    if not num_samples:
        raise SchemaError(f"{path} holds no ids, so there is nothing to look up.")
    numbered, ends = [], []
    base = 0
    for column in columns:
        wanted = column.values >= 0
        distinct, place = np.unique(column.values[wanted], return_inverse=True)
        keys = np.full(column.values.shape[0], -1, dtype=np.int64)
        keys[wanted] = base + place
        base += int(distinct.shape[0])
        numbered.append(column._replace(values=keys))
        ends.append(base)
    num_batches = -(-num_samples // batch_size)

    def lookups() -> Iterator[Ints]:
        for number in range(min(num_batches, max_batches or num_batches)):
            first, end = number * batch_size, min((number + 1) * batch_size, num_samples)
            yield np.concatenate([one.values[one.offsets[first] : one.offsets[end]] for one in numbered])

    trace = trace_of(lookups(), max(base, 1))
    return TraceSource(trace, [column.name for column in columns], ends, lambda size: hottest_of(trace, size))


def _npy(path: Path) -> list[FileColumn]:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SchemaError(f"{path} is not a readable .npy file ({str(error).partition(chr(10))[0]}).") from error
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise SchemaError(f"{path} must hold integers [N] or [N, F]; it holds {ids.dtype} {list(ids.shape)}.")
    matrix = ids if ids.ndim == 2 else ids[:, None]
    offsets = np.arange(matrix.shape[0] + 1, dtype=np.int64)
    return [FileColumn(f"f{f}", matrix[:, f].astype(np.int64), offsets) for f in range(matrix.shape[1])]


def _parquet(path: Path) -> list[FileColumn]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise SchemaError(f"{path} is not a readable Parquet file ({str(error).partition(chr(10))[0]}).") from error
    columns = []
    for name in table.column_names:
        column = table[name].combine_chunks()
        column = column.chunk(0) if isinstance(column, pa.ChunkedArray) and column.num_chunks else column
        kind = column.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if pa.types.is_integer(kind.value_type if is_list else kind) and table.num_rows:
            columns.append(_column(name, column, is_list))
    if table.num_rows and not columns:
        found = ", ".join(f"{field.name} ({field.type})" for field in list(table.schema)[:20])
        raise SchemaError(f"{path} has no integer column to take ids from; it has {found}.")
    return columns


def _column(name: str, column: pa.Array, is_list: bool) -> FileColumn:
    if not is_list:
        values = column.fill_null(-1).cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)
        return FileColumn(name, values, np.arange(len(column) + 1, dtype=np.int64))
    lengths = np.nan_to_num(column.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    values = column.flatten().fill_null(-1).cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)
    return FileColumn(name, values, np.concatenate([[0], np.cumsum(lengths)]))


def check_suffix(path: Path) -> None:
    """A ConfigError for a file that this module cannot read."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{path} is not a file of ids: give a .npy or .parquet file, or a dataset directory "
            "(`hotbed prepare RAW... --out DIR` writes one)."
        )


def from_dataset(dataset: Dataset, **options: Any) -> TraceSource:
    """The batches of a split; `options` are those of read_trace."""
    trace = read_trace(dataset, **options)
    rows = rows_of(dataset)
    ends = np.cumsum(rows).tolist()
    return TraceSource(trace, list(dataset.schema.tables), ends, lambda size: hot_rows(dataset, size))


def hottest_of(trace: Trace, num_rows: int) -> HotRows:
    """The most frequent rows of a trace, by its own counts."""
    keys, place = np.unique(trace.keys, return_inverse=True)
    return hottest(keys, np.bincount(place, weights=trace.counts).astype(np.int64), num_rows)
