"""Raw columns in, a Batch out, by the schema of a model: values become the numbers and rows they were in training.

Columns come as a mapping from names to lists, arrays or Arrow arrays, as a pandas DataFrame, or as a list of rows. Everything
goes through data/encode.py, as for `hotbed prepare` and `hotbed predict`; a value that cannot be read is an error here,
because every sample gets a score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hotbed.data.encode import encode, raw_column, time_of
from hotbed.data.formats import Chunk
from hotbed.data.formats.parquet import has_micros, read_columns
from hotbed.data.raw_reader import batch_of
from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import FormatError, reason_of
from hotbed.scorer.id_map import IdMap
from hotbed.types import Batch

_HERE = Path("the columns given")


class ColumnEncoder:
    """Encodes raw columns for one model."""

    def __init__(self, schema: Schema, vocabularies: Mapping[str, IdMap]) -> None:
        """`vocabularies`: those of tables."""
        self.schema, self._vocabularies = schema, vocabularies
        names = [one.name for one in schema.dense] + [raw_column(one) for one in schema.features]
        self.names = list(dict.fromkeys(names))
        self._time = time_of(schema.features)

    def batch(self, columns: Any) -> Batch:
        """All samples of the columns; labels are NaN."""
        table = self._typed(as_record_batch(columns, self.names))
        chunk = Chunk(
            str(_HERE),
            read_columns(table, _HERE, self._time, micros=has_micros(self.schema.notes)),
            np.arange(table.num_rows),
            lambda i: _shown(table, i),
            [],
            0,
        )
        encoded = encode(chunk, None, self.schema.dense, self.schema.features)
        if encoded.bad:
            first = encoded.bad[0]
            more = f"; {len(encoded.bad) - 1:,} more rows have faults" if len(encoded.bad) > 1 else ""
            raise FormatError(f"row {first.line} cannot be scored: {first.reason}{more}.")
        return batch_of(encoded, self.schema, self.rows_of, 0, len(encoded.lines))

    def _typed(self, table: pa.RecordBatch) -> pa.RecordBatch:
        """The same columns; a column of bags that are all empty still has the type of bags."""
        for feature in (one for one in self.schema.features if one.multi):
            place = table.schema.names.index(raw_column(feature))
            table = table.set_column(place, raw_column(feature), as_bags(table.column(place), feature))
        return table

    def rows_of(self, feature: IdFeature, ids: np.ndarray) -> np.ndarray:
        """Row numbers for a vocabulary (0 for the unknown), the ids themselves otherwise; int64."""
        vocabulary = self._vocabularies.get(feature.table)
        return ids if vocabulary is None else vocabulary.find(np.ascontiguousarray(ids)) + 1


def as_record_batch(columns: Any, names: Sequence[str]) -> pa.RecordBatch:
    """The columns `names` of a mapping, a DataFrame, an Arrow table or a list of rows."""
    if isinstance(columns, pa.RecordBatch | pa.Table) or hasattr(columns, "__dataframe__") or hasattr(columns, "iloc"):
        return _of_frame(columns, names)
    if isinstance(columns, Mapping):
        _refuse_absent(list(columns), names)
        return _batch_of({name: _array(name, columns[name]) for name in names})
    if isinstance(columns, Sequence) and all(isinstance(row, Mapping) for row in columns):
        _refuse_absent(list({name: None for row in columns for name in row}) if columns else names, names)
        return _batch_of({name: _array(name, [row.get(name) for row in columns]) for name in names})
    raise FormatError(
        f"columns must be a mapping of names to values, a DataFrame, an Arrow table or a list of rows, "
        f"not {type(columns).__name__}."
    )


def as_bags(array: pa.Array, feature: IdFeature) -> pa.Array:
    """A column of bags; one of nothing but nulls and empty lists has no value type, so it gets one."""
    if pa.types.is_null(array.type):
        return pa.array([None] * len(array), pa.string() if feature.separator else pa.list_(pa.string()))
    return array.cast(pa.list_(pa.string())) if array.type == pa.list_(pa.null()) else array


def _of_frame(frame: Any, names: Sequence[str]) -> pa.RecordBatch:
    given = frame.schema.names if isinstance(frame, pa.RecordBatch | pa.Table) else [str(one) for one in frame.columns]
    _refuse_absent(given, names)
    if isinstance(frame, pa.RecordBatch | pa.Table):
        return _batch_of({name: _array(name, frame.column(name)) for name in names})
    return _batch_of({name: _array(name, frame[name]) for name in names})


def _batch_of(arrays: dict[str, Any]) -> pa.RecordBatch:
    lengths = {name: len(one) for name, one in arrays.items()}
    if len(set(lengths.values())) > 1:
        first = next(iter(lengths))
        other = next(name for name, length in lengths.items() if length != lengths[first])
        raise FormatError(
            f"columns have different lengths: {first} has {lengths[first]:,} values, {other} {lengths[other]:,}."
        )
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _array(name: str, values: Any) -> Any:
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise FormatError(f"column {name} must hold one value for each sample, not {values!r:.60}.")
    try:
        if isinstance(values, pa.ChunkedArray):
            return values.combine_chunks()
        if isinstance(values, torch.Tensor):
            values = values.numpy()
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, UnicodeError) as error:
        raise FormatError(f"column {name} holds values of different kinds: {reason_of(error)}") from error


def _refuse_absent(given: Sequence[str], names: Sequence[str]) -> None:
    absent = [name for name in names if name not in given]
    if absent:
        raise FormatError(f"there is no column {', '.join(absent)}; the model reads {', '.join(names)}.")


def _shown(table: pa.RecordBatch, row: int) -> str:
    return str(table.slice(row, 1).to_pylist()[0])
