"""A file of ids -> a trace: the log of any other system, replayed without a dataset directory.

.npy       integers [N], one lookup each, or [N, F], one line per sample with one id of F features
.parquet   every integer column is a feature; lists are bags

Every feature has a table of its own. Ids are 64-bit integers, negative ones are padding. Rows are the distinct ids, so a share
of the rows is a share of those that occur. The whole file is in memory while it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotbed.data.dataset import Dataset, HotRows, hot_rows, hottest
from hotbed.errors import ConfigError, SchemaError
from hotbed.forecast.trace import Trace, read_trace, rows_of, trace_of

Ints = NDArray[np.int64]
SUFFIXES = (".npy", ".parquet")


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
    return TraceSource(trace, [one.name for one in dataset.schema.features], ends, lambda size: hot_rows(dataset, size))


def hottest_of(trace: Trace, num_rows: int) -> HotRows:
    """The most frequent rows of a trace, by its own counts."""
    keys, place = np.unique(trace.keys, return_inverse=True)
    return hottest(keys, np.bincount(place, weights=trace.counts).astype(np.int64), num_rows)
