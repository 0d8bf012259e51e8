"""One Parquet file of rows in, RowParts out.

The whole file is read and held against its checksum before the first row leaves it. Columns are views into what was read:
the numbers of a page are its end (row_file.py), so nothing is decoded.

Files are read past the page cache where the system has that (O_DIRECT): a row is read once, and the way through the cache
takes 0.4 s of processor time for a GB from the disk, this one 0.05 s. Files that are in the cache come from the disk again.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.row_file import COLUMNS_KEY, TABLES_KEY, Column, FileMark
from hotbed.checkpoint.types import RowPart
from hotbed.errors import RunError
from hotbed.host.pages import in_pages, zeros

TYPES = {str(one): one for one in (torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16)}
_PIECE = 4 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it, not every file system does


def new_room(size: int) -> NDArray[np.uint8]:
    """Memory for a file of so many bytes, in whole pages, as reading past the cache wants it."""
    return zeros((in_pages(size),), np.uint8)


def read_whole(path: Path, mark: FileMark, room: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """The bytes of a file that is as its mark says, in `room` (`new_room`) if there is one; else a RunError that names it."""
    try:
        size = path.stat().st_size
        if size != mark.bytes:
            raise RunError(f"{path} is damaged: it has {size} bytes, its manifest says {mark.bytes}.")
        room = new_room(size) if room is None else room[: in_pages(size)]
        try:
            crc = _read_into(room.data, path, size, _DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL or not _DIRECT:
                raise
            crc = _read_into(room.data, path, size, 0)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error
    if crc != mark.crc32:
        raise RunError(f"{path} is damaged: its content does not fit its checksum.")
    return room[:size]


def _read_into(room: memoryview, path: Path, size: int, flags: int) -> int:
    """Fill the room with a file's bytes; their checksum, taken piece by piece while a piece is near."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        done = crc = 0
        while done < size:
            count = min(os.preadv(handle, [room[done : done + _PIECE]], done), size - done)
            if not count:
                raise RunError(f"{path} is damaged: it ends after {done} of {size} bytes.")
            crc = zlib.crc32(room[done : done + count], crc)
            done += count
        return crc
    finally:
        os.close(handle)


def parts_of(path: Path, content: NDArray[np.uint8]) -> Iterator[RowPart]:
    """The rows of a file whose bytes are at hand; the tensors are views into them."""
    try:
        footer: Any = pq.read_metadata(pa.BufferReader(pa.py_buffer(content)))
        tables = json.loads(footer.metadata[TABLES_KEY])
        columns = [Column(name, width, TYPES[dtype]) for name, width, dtype in json.loads(footer.metadata[COLUMNS_KEY])]
        for number, table in enumerate(tables):
            group = footer.row_group(number)
            tensors = {
                column.name: _column(content, group.column(place), column, group.num_rows)
                for place, column in enumerate(columns, 1)
            }
            ids = tensors.pop("id")
            yield RowPart(table, ids, {"weight" if name == "vector" else name: one for name, one in tensors.items()})
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, IndexError) as error:
        raise RunError(f"{path} holds no rows of hotbed ({type(error).__name__}: {error}).") from error


def _column(content: NDArray[np.uint8], chunk: Any, column: Column, count: int) -> Tensor:
    """The last bytes of a page are its numbers."""
    stop = chunk.data_page_offset + chunk.total_compressed_size
    size = count * max(column.width, 1) * column.dtype.itemsize
    flat = torch.from_numpy(content[stop - size : stop]).view(column.dtype)
    if column.width:
        return flat.view(count, column.width)
    return flat if column.dtype == torch.int64 else flat.view(count, 1)
