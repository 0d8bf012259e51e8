"""Writes rows to a Parquet file at the speed of the disk.

    table  dictionary     id  int64     vector  list of dim numbers     <state>  list of dim numbers, or one     ...

Every row group holds rows of one table, and each of its columns is one page: levels that are the same for all rows, then the
numbers as they are in memory, aligned to 64 bytes. pyarrow's writer builds levels value by value and took 1 s for 0.5 GB of
such lists on one busy core, this one about 0.35 s. Reading decodes nothing, because the numbers are the end of the page.
fp16 stays half precision; Parquet has no bf16, so such a vector is 2 * dim bytes. Nothing is compressed: trained weights do
not shrink.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hotbed.ops.records import as_numpy
from hotbed.store.ssd.segments import start_writing_out
from hotbed.types import RowPart

Kind = Literal["byte", "int", "long", "text", "struct"]
_CODES: dict[Kind, int] = {"byte": 3, "int": 5, "long": 6, "text": 8, "struct": 12}
_LIST = 9
_TRUE, _FALSE = 1, 2
GROUP_BYTES = 8 << 20  # of a row group
TABLES_KEY = b"hotbed:tables"  # JSON: the table of every row group
COLUMNS_KEY = b"hotbed:columns"  # JSON: name, width and type of every column but the first
_MAGIC = b"PAR1"
_ALIGNED = 64
_INT64, _FLOAT, _DOUBLE, _TEXT, _FIXED = 2, 4, 5, 6, 7
_PLAIN, _RLE, _RLE_DICTIONARY = 0, 3, 8
_REQUIRED, _REPEATED = 0, 2
_PHYSICAL = {
    torch.int64: (_INT64, 0),
    torch.float32: (_FLOAT, 0),
    torch.float64: (_DOUBLE, 0),
    torch.float16: (_FIXED, 2),
}
_ARROW = {
    torch.int64: pa.int64(),
    torch.float32: pa.float32(),
    torch.float64: pa.float64(),
    torch.float16: pa.float16(),
}


class FileMark(NamedTuple):
    """Size and checksum of a file, for a manifest."""

    bytes: int
    crc32: int


class Column(NamedTuple):
    """The layout of one column in the file."""

    name: str
    width: int  # values a row; 0: one value, no list
    dtype: torch.dtype

    @property
    def packed(self) -> bool:
        """Whether a whole vector is one value of 2 * width bytes."""
        return self.dtype == torch.bfloat16

    @property
    def physical(self) -> tuple[int, int]:
        """(Parquet's type, bytes of a value if the type does not say)."""
        if self.packed:
            return _FIXED, 2 * max(self.width, 1)
        return _PHYSICAL[self.dtype]

    @property
    def arrow(self) -> Any:
        """The column's type in Arrow."""
        if self.packed:
            return pa.binary(2 * max(self.width, 1))
        one = _ARROW[self.dtype]
        return pa.list_(pa.field("element", one, nullable=False), self.width) if self.is_list else one

    @property
    def is_list(self) -> bool:
        return self.width > 0 and not self.packed

    @property
    def path(self) -> list[bytes]:
        name = self.name.encode()
        return [name, b"list", b"element"] if self.is_list else [name]


def columns_of(part: RowPart) -> tuple[Column, ...]:
    """The layout of a file that can hold the part: a state of one column is a number, weights are always a list."""
    columns = [Column("id", 0, torch.int64)]
    for name, tensor in part.columns.items():
        known = tensor.dtype in _PHYSICAL or tensor.dtype == torch.bfloat16
        assert known, f"column {name} of table {part.table} is {tensor.dtype}; whole numbers must be int64"
        flat = tensor.dim() == 1 or (tensor.shape[1] == 1 and name != "weight")
        columns.append(Column(_in_file(name), 0 if flat else tensor.shape[1], tensor.dtype))
    return tuple(columns)


def split_parts(parts: Iterable[RowPart]) -> Iterator[RowPart]:
    """The same rows in parts of at most a row group; empty ones are left out."""
    for part in parts:
        count = part.ids.shape[0]
        step = max(1, GROUP_BYTES * count // max(part.num_bytes, 1))
        for start in range(0, count, step):
            stop = min(start + step, count)
            columns = {name: column[start:stop] for name, column in part.columns.items()}
            yield RowPart(part.table, part.ids[start:stop], columns)


class CopyBuffer:
    """Memory that is reused for every part: fresh pages would cost more than the copy into them."""

    def __init__(self) -> None:
        self._bytes: dict[str, Tensor] = {}

    def copy(self, part: RowPart) -> RowPart:
        """The part, contiguous, valid until the next call."""
        columns = {name: self._copied(name, column) for name, column in part.columns.items()}
        return RowPart(part.table, self._copied("", part.ids), columns)

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        room = self._bytes.get(name)
        if room is None or room.shape[0] < size:
            room = self._bytes[name] = torch.empty(size, dtype=torch.uint8, device="cpu")
        out = room[:size].view(tensor.dtype).view(tensor.shape)
        # numpy copies in this thread; torch would use the threads of training
        np.copyto(as_numpy(out), as_numpy(tensor.detach()))
        return out


class RowFile:
    """An open file of rows that have the same columns."""

    def __init__(self, path: Path, columns: tuple[Column, ...]) -> None:
        self.path = path
        self.columns = columns
        self.num_rows = 0
        self.position = 0
        self._crc = 0
        self._groups: list[bytes] = []
        self._tables: list[str] = []
        self._file = path.open("wb")
        try:
            self._write(_MAGIC)
        except BaseException:
            self.abandon()
            raise

    def add(self, part: RowPart) -> None:
        """Append rows as one row group; `split_parts` gives parts of the right size."""
        count, start = part.ids.shape[0], self.position
        tensors = {"id": part.ids} | {_in_file(name): tensor for name, tensor in part.columns.items()}
        chunks = [self._table_chunk(part.table, count)]
        chunks += [self._chunk(column, tensors[column.name], count) for column in self.columns]
        self._groups.append(
            struct(
                Field(1, "struct", [chunk for chunk, _ in chunks]),
                Field(2, "long", sum(size for _, size in chunks)),
                Field(3, "long", count),
            )
        )
        self._tables.append(part.table)
        self.num_rows += count
        self._file.flush()
        start_writing_out(self._file.fileno(), start, self.position - start)

    def close(self) -> FileMark:
        """Write the footer and flush the file to the disk."""
        footer = self._footer()
        self._write(footer + len(footer).to_bytes(4, "little") + _MAGIC)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileMark(self.position, self._crc)

    def abandon(self) -> None:
        """Close without a footer; the caller removes the file."""
        with suppress(OSError):  # the file is discarded anyway
            self._file.close()

    def _chunk(self, column: Column, tensor: Tensor, count: int) -> tuple[bytes, int]:
        """Write one column of a group as one page."""
        values = count * column.width if column.is_list else count
        levels = _levels(count, column.width) if column.is_list else b""
        content = _bytes_of(tensor)
        size = len(levels) + len(content)
        inner = struct(*(Field(n, "int", v) for n, v in ((1, values), (2, _PLAIN), (3, _RLE), (4, _RLE))))
        header = struct(
            Field(1, "int", 0), Field(2, "int", size), Field(3, "int", size), Field(5, "struct", inner)
        )  # 0: a data page
        self._write(bytes(-(self.position + len(header) + len(levels)) % _ALIGNED))
        start = self.position
        for piece in (header, levels, content):
            self._write(piece)
        return _chunk_of(column.physical[0], column.path, values, self.position - start, start)

    def _table_chunk(self, table: str, count: int) -> tuple[bytes, int]:
        """The name of the table once, and a run of `count` references to it."""
        name = table.encode()
        start = self.position
        content = len(name).to_bytes(4, "little") + name
        inner = struct(Field(1, "int", 1), Field(2, "int", _PLAIN))
        sizes = (Field(2, "int", len(content)), Field(3, "int", len(content)))
        self._write(struct(Field(1, "int", 2), *sizes, Field(7, "struct", inner)) + content)  # 2: a dictionary page
        data = self.position
        content = b"\1" + varint(count << 1) + b"\0"
        inner = struct(*(Field(n, "int", v) for n, v in ((1, count), (2, _RLE_DICTIONARY), (3, _RLE), (4, _RLE))))
        sizes = (Field(2, "int", len(content)), Field(3, "int", len(content)))
        self._write(struct(Field(1, "int", 0), *sizes, Field(5, "struct", inner)) + content)
        return _chunk_of(_TEXT, [b"table"], count, self.position - start, data, start)

    def _footer(self) -> bytes:
        fields = [pa.field("table", pa.dictionary(pa.int32(), pa.string()), nullable=False)]
        fields += [pa.field(column.name, column.arrow, nullable=False) for column in self.columns]
        known = {b"ARROW:schema": base64.b64encode(pa.schema(fields).serialize().to_pybytes())}
        known[TABLES_KEY] = json.dumps(self._tables).encode()
        known[COLUMNS_KEY] = json.dumps([(one.name, one.width, str(one.dtype)) for one in self.columns]).encode()
        elements = [struct(Field(4, "text", b"schema"), Field(5, "int", len(self.columns) + 1))]
        text = (Field(6, "int", 0), Field(10, "struct", struct(Field(1, "struct", struct()))))
        elements.append(struct(Field(1, "int", _TEXT), Field(3, "int", _REQUIRED), Field(4, "text", b"table"), *text))
        for column in self.columns:
            elements += _schema_of(column)
        return struct(
            Field(1, "int", 2),
            Field(2, "struct", elements),
            Field(3, "long", self.num_rows),
            Field(4, "struct", self._groups),
            Field(5, "struct", [struct(Field(1, "text", key), Field(2, "text", one)) for key, one in known.items()]),
            Field(6, "text", b"hotbed"),
        )

    def _write(self, content: bytes | memoryview) -> None:
        if len(content):
            self._file.write(content)
            self._crc = zlib.crc32(content, self._crc)
            self.position += len(content)


def _in_file(name: str) -> str:
    """The weights are called vector in files."""
    return "vector" if name == "weight" else name


def _chunk_of(
    kind: int, path: list[bytes], values: int, size: int, data: int, dictionary: int | None = None
) -> tuple[bytes, int]:
    """A column chunk as the footer describes it, and its size."""
    encodings = [_PLAIN, _RLE] if dictionary is None else [_PLAIN, _RLE, _RLE_DICTIONARY]
    meta = struct(
        Field(1, "int", kind),
        Field(2, "int", encodings),
        Field(3, "text", path),
        Field(4, "int", 0),  # not compressed
        Field(5, "long", values),
        Field(6, "long", size),
        Field(7, "long", size),
        Field(9, "long", data),
        *([] if dictionary is None else [Field(11, "long", dictionary)]),
    )
    return struct(Field(2, "long", data if dictionary is None else dictionary), Field(3, "struct", meta)), size


def _schema_of(column: Column) -> list[bytes]:
    """The column in Parquet's schema; a list is three levels deep."""
    kind, length = column.physical
    fields = [Field(1, "int", kind), *([Field(2, "int", length)] if length else [])]
    half = [Field(10, "struct", struct(Field(15, "struct", struct())))] if column.dtype == torch.float16 else []
    if not column.is_list:
        return [struct(*fields, Field(3, "int", _REQUIRED), Field(4, "text", column.name.encode()), *half)]
    as_list = (Field(6, "int", 3), Field(10, "struct", struct(Field(3, "struct", struct()))))
    return [
        struct(Field(3, "int", _REQUIRED), Field(4, "text", column.name.encode()), Field(5, "int", 1), *as_list),
        struct(Field(3, "int", _REPEATED), Field(4, "text", b"list"), Field(5, "int", 1)),
        struct(*fields, Field(3, "int", _REQUIRED), Field(4, "text", b"element"), *half),
    ]


@lru_cache(maxsize=16)
def _levels(count: int, width: int) -> bytes:
    """Repetition levels (0 where a row begins, else 1) and definition levels (all 1) of `count` lists of `width` values."""
    if width == 1:
        repetition = varint(count << 1) + b"\0"
    else:
        groups = -(-count * width // 8)
        eight_rows = np.ones((8, width), dtype=np.uint8)
        eight_rows[:, 0] = 0
        pattern = np.packbits(eight_rows.reshape(-1), bitorder="little").tobytes()  # `width` bytes
        repetition = varint(groups << 1 | 1) + (pattern * -(-groups // width))[:groups]
    definition = varint((count * width) << 1) + b"\1"
    return b"".join(len(one).to_bytes(4, "little") + one for one in (repetition, definition))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The numbers in row order; strided records are copied."""
    whole = tensor.detach().contiguous()
    return whole.view(-1).view(torch.uint8).numpy().data


class Field(NamedTuple):
    """One field of a struct; a list of values makes it a list, True or False a boolean."""

    number: int
    kind: Kind
    value: int | bytes | Sequence[int | bytes]


def varint(number: int) -> bytes:
    """An unsigned number, seven bits a byte."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def struct(*fields: Field) -> bytes:
    """An encoded struct; field numbers ascend."""
    out, last = bytearray(), 0
    for number, kind, value in fields:
        if isinstance(value, bool):
            code = _TRUE if value else _FALSE
        else:
            code = _CODES[kind] if isinstance(value, int | bytes) else _LIST
        out.append((number - last) << 4 | code)
        last = number
        if isinstance(value, int | bytes):
            out += b"" if isinstance(value, bool) else _value(kind, value)
        else:
            size = len(value)
            out += bytes([min(size, 15) << 4 | _CODES[kind]]) + (varint(size) if size >= 15 else b"")
            for one in value:
                out += _value(kind, one)
    return bytes(out) + b"\0"


def _value(kind: Kind, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value if kind == "struct" else varint(len(value)) + value
    return bytes([value]) if kind == "byte" else varint(value << 1 if value >= 0 else (-value << 1) - 1)
