"""Parquet and Arrow (Feather, IPC file or stream): typed columns in, the same columns out, 65,536 rows at a time.

Integers and booleans are integers (unsigned 64-bit ones are `Unsigned`), as are dates and times, in microseconds. Floats and
decimals are numbers, strings and binary are text, dictionaries are decoded, lists are bags. Null, NaN and the empty string are
missing. Other types (structs, maps, lists of lists) are refused with their name; drop such columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hotbed.data.formats.blocks import open_raw
from hotbed.data.formats.chunk import (
    REEL_BYTES,
    WHOLE,
    Chunk,
    Column,
    Floats,
    Instants,
    Integers,
    Lists,
    Reel,
    Scalar,
    Text,
    Unsigned,
)
from hotbed.errors import FormatError, RemoteError, reason_of
from hotbed.files.path import size_of

CHUNK_ROWS = 1 << 16


class ParquetFormat:
    name = "parquet"
    typed = True

    def __init__(
        self, wanted: Callable[[str], bool] = lambda _: True, time: str | None = None, *, micros: bool = True
    ) -> None:
        """`micros` as in `read_columns`."""
        self._wants = wanted  # column name -> read it?
        self._time, self._micros = time, micros

    def reels(self, path: Path) -> Iterator[Reel]:
        """Row groups of Parquet, about REEL_BYTES decompressed; an Arrow file is one reel."""
        with open_raw(path) as raw:
            size = size_of(raw)
            if not _is_parquet(raw):
                yield Reel(num_bytes=size)
                return
            with reading_arrow(path):
                metadata = pq.ParquetFile(raw).metadata
        if metadata.num_rows == 0:
            yield Reel(num_bytes=size)
            return
        begin = first = rows = unpacked = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            rows, unpacked = rows + group.num_rows, unpacked + group.total_byte_size
            if unpacked >= REEL_BYTES or number == metadata.num_row_groups - 1:
                yield Reel(begin, number + 1, first + 1, size * rows // metadata.num_rows)
                begin, first, rows, unpacked = number + 1, first + rows, 0, 0

    def chunks(self, path: Path, reel: Reel = WHOLE) -> Iterator[Chunk]:
        with open_raw(path) as raw:
            size = reel.num_bytes or path.stat().st_size
            done = 0
            batches = self._batches(raw, path, reel)
            while True:
                with reading_arrow(path):
                    found = next(batches, None)
                if found is None:
                    return
                batch, total, unread = found
                columns = read_columns(batch, path, self._time, micros=self._micros)
                first = reel.first_line + done
                lines = np.arange(first, first + batch.num_rows, dtype=np.int64)
                done += batch.num_rows

                def show(i: int, batch: pa.RecordBatch = batch) -> str:
                    return shown_row(batch, i)

                read = size if total is None else size * done // max(total, 1)
                yield Chunk(str(path), columns, lines, show, [], read, unread)

    def _batches(
        self, raw: BinaryIO, path: Path, reel: Reel
    ) -> Iterator[tuple[pa.RecordBatch, int | None, tuple[str, ...]]]:
        """Record batches of at most CHUNK_ROWS rows, the rows of the whole reel if known, and columns left unread."""
        if _is_parquet(raw):
            file = pq.ParquetFile(raw)
            names, unread = self._wanted(file.schema_arrow.names, path)
            end = file.metadata.num_row_groups if reel.end is None else reel.end
            groups = list(range(reel.begin, end))
            total = sum(file.metadata.row_group(i).num_rows for i in groups)
            for batch in file.iter_batches(CHUNK_ROWS, row_groups=groups, columns=names, use_threads=False):
                yield batch.select(names), total, unread
            return
        reader = _open_arrow(raw)
        if isinstance(reader, pa.RecordBatchFileReader):
            stored = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            stored = iter(reader)
        names, unread = self._wanted(reader.schema.names, path)
        for batch in stored:
            batch.validate(full=True)
            for start in range(0, batch.num_rows, CHUNK_ROWS):
                yield batch.slice(start, CHUNK_ROWS).select(names), None, unread

    def _wanted(self, names: list[str], path: Path) -> tuple[list[str], tuple[str, ...]]:
        """The columns to read, and the others."""
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FormatError(f"{path} names {', '.join(twice)} more than once. Column names must differ.")
        wanted = [name for name in names if self._wants(name)]
        return wanted, tuple(name for name in names if name not in wanted)


def _open_arrow(raw: BinaryIO) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    whole_file = raw.read(6) == b"ARROW1"
    raw.seek(0)
    return pa.ipc.open_file(raw) if whole_file else pa.ipc.open_stream(raw)


def stored_types(path: Path) -> dict[str, pa.DataType]:
    """The types of the columns of a Parquet or Arrow file; for lists and dictionaries, of their values."""
    types = {}
    for field in schema_of(path):
        kind = field.type
        while not pa.types.is_map(kind) and getattr(kind, "value_type", None) is not None:
            kind = kind.value_type
        types[field.name] = kind
    return types


def schema_of(path: Path) -> pa.Schema:
    """The schema of a Parquet or Arrow file."""
    with open_raw(path) as raw, reading_arrow(path):
        return pq.ParquetFile(raw).schema_arrow if _is_parquet(raw) else _open_arrow(raw).schema


def shown_row(batch: pa.RecordBatch, row: int) -> str:
    """A row as text; a time outside Python's calendar is shown as a number."""
    found = {}
    for name, column in zip(batch.schema.names, batch.columns):
        value = column[row]
        try:
            found[name] = value.as_py()
        except (OverflowError, ValueError):
            found[name] = value.value if hasattr(value, "value") else str(value)
    return str(found)


_A_DAY = {"day": 1, "s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_MOST_DAYS = 10_000_000  # more overflow microseconds, or nearly
_BEFORE, _AFTER = -(2**62), 2**62  # microseconds that represent them


def _is_parquet(raw: BinaryIO) -> bool:
    """Whether the first bytes are those of Parquet; an empty file counts as damaged Parquet."""
    magic = raw.read(4)
    raw.seek(0)
    return magic == b"PAR1" or not magic


@contextmanager
def reading_arrow(path: Path) -> Iterator[None]:
    """Turn Arrow's errors into FormatErrors that name the file."""
    try:
        yield
    except RemoteError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"{path} is not Parquet or Arrow, or is damaged or truncated: {reason_of(error)}") from error


def read_columns(batch: pa.RecordBatch, path: Path, time: str | None, *, micros: bool = True) -> dict[str, Column]:
    """The columns of a batch; the one called `time` as points in time if its type says so.

    `micros`: other dates and times in microseconds, whatever the unit of the file; else in that unit, as in older datasets.
    """
    columns: dict[str, Column] = {}
    for name, array in zip(batch.schema.names, batch.columns):
        if name == time and pa.types.is_temporal(array.type):
            columns[name] = _instants(array, path)
        else:
            columns[name] = _column(array, name, path, micros)
    return columns


def has_micros(notes: Mapping[str, Any]) -> bool:
    """Whether a dataset with these notes was prepared with dates and times in microseconds."""
    raw = notes.get("raw")
    return isinstance(raw, dict) and "times" in raw


def _instants(array: pa.Array, path: Path) -> Instants:
    if not (pa.types.is_timestamp(array.type) or pa.types.is_date(array.type)):
        raise FormatError(f"{path}: the time column has type {array.type}, which is not a date or a point in time.")
    micros = pc.cast(pc.cast(array, pa.timestamp("us"), safe=False), pa.int64())
    missing = pc.is_null(array).to_numpy(zero_copy_only=False)
    found = pc.fill_null(micros, 0).to_numpy(zero_copy_only=False)
    whole = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())  # in the unit of the column
    days = pc.fill_null(whole, 0).to_numpy(zero_copy_only=False) / _A_DAY[_unit(array.type)]
    return Instants(np.where(np.abs(days) < _MOST_DAYS, found, np.where(days < 0, _BEFORE, _AFTER)), missing)


def _unit(kind: pa.DataType) -> str:
    if pa.types.is_date(kind):
        return "day" if kind.bit_width == 32 else "ms"
    return str(kind.unit)


def _column(array: pa.Array, name: str, path: Path, micros: bool) -> Column:
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        values = pc.list_flatten(array)
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = np.zeros(len(array) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Lists(offsets, _scalar(values, name, path, micros))
    return _scalar(array, name, path, micros)


def _scalar(array: pa.Array, name: str, path: Path, micros: bool) -> Scalar:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _scalar(array.dictionary_decode(), name, path, micros)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return Floats(pc.cast(array, pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64))
    missing = pc.is_null(array).to_numpy(zero_copy_only=False)
    if pa.types.is_null(kind):
        return Integers(np.zeros(len(array), dtype=np.int64), missing)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return text_of_strings(array)
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_large_binary(kind) or _is_view(kind):
        return text_of_strings(pc.cast(array, pa.binary()))
    if pa.types.is_large_string(kind):
        return text_of_strings(pc.cast(array, pa.string()))
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        array = pc.cast(array.view(pa.int32() if kind.bit_width == 32 else pa.int64()), pa.int64())
        values = pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.int64)
        return Integers(_micros(values, _unit(kind)) if micros else values, missing)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        filled = pc.fill_null(array, False if pa.types.is_boolean(kind) else 0)
        values = filled.to_numpy(zero_copy_only=False).astype(np.int64)
        return (Unsigned if pa.types.is_uint64(kind) else Integers)(values, missing)
    raise FormatError(
        f"{path}: column {name} has type {kind}, which hotbed cannot turn into numbers or ids. Leave it out: --drop {name}"
    )


def _micros(values: np.ndarray, unit: str) -> np.ndarray:
    """Microseconds; those beyond 64 bits are cut off there."""
    if unit == "ns":
        return np.asarray(values // 1000)
    factor = _A_DAY["us"] // _A_DAY[unit]
    most = (2**63 - 1) // factor
    micros: np.ndarray = np.clip(values, -most, most) * factor
    return micros


def _is_view(kind: pa.DataType) -> bool:
    return any(getattr(pa.types, name, lambda _: False)(kind) for name in ("is_string_view", "is_binary_view"))


def text_of_strings(array: pa.Array) -> Text:
    """Spans over a copy of the bytes this slice uses."""
    n = len(array)
    _, offset_buffer, data_buffer = array.buffers()
    if n == 0 or offset_buffer is None:
        return Text(np.zeros(0, dtype=np.uint8), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64))
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)[array.offset : array.offset + n + 1].astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.zeros(last - first, dtype=np.uint8)
    if last > first:
        data[:] = np.frombuffer(data_buffer, dtype=np.uint8)[first:last]
    starts, ends = offsets[:-1] - first, offsets[1:] - first
    missing = pc.is_null(array).to_numpy(zero_copy_only=False)
    return Text(data, starts, np.where(missing, starts, ends))
