"""Checkpoint in, its weights out, a row group at a time: little memory, and nothing of what training alone needs.

checkpoint/read.py reads whole files, some at once, because a run that resumes wants all of them soon. Here a server goes on
scoring within its budget: a file is read once for its checksum, in pieces, and then group by group, ids and weights alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.files import checksum
from hotbed.checkpoint.row_file import COLUMNS_KEY, TABLES_KEY
from hotbed.checkpoint.types import RowPart
from hotbed.errors import RunError

_TYPES = {str(one): one for one in (torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16)}
_WANTED = {"id": "id", "vector": "weight", "row": "row", "shared": "shared"}  # the last two of dynamic ids


def weights_of(entry: Entry) -> Iterator[RowPart]:
    """The rows in the files of one checkpoint, each file held against its checksum before its first row."""
    for name, mark in entry.manifest.files.items():
        if not name.startswith("rows/"):
            continue
        path = entry.folder / name
        try:
            if path.stat().st_size != mark.bytes or checksum(path) != mark.crc32:
                raise RunError(f"{path} is damaged: its content does not fit its checksum.")
            yield from _groups(path)
        except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, IndexError) as error:
            raise RunError(f"{path} holds no rows of hotbed ({type(error).__name__}: {error}).") from error


def _groups(path: Path) -> Iterator[RowPart]:
    footer: Any = pq.read_metadata(path)
    tables = json.loads(footer.metadata[TABLES_KEY])
    columns = list(enumerate(json.loads(footer.metadata[COLUMNS_KEY]), 1))  # the first column says the table
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for number, table in enumerate(tables):
            group = footer.row_group(number)
            found = {
                _WANTED[name]: _column(handle, group.column(place), group.num_rows, width, _TYPES[dtype])
                for place, (name, width, dtype) in columns
                if name in _WANTED
            }
            ids = found.pop("id")
            if "weight" in found:  # else the rows are in the files of an ssd
                yield RowPart(table, ids, found)
    finally:
        os.close(handle)


def _column(handle: int, chunk: Any, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """The last bytes of a page are its numbers."""
    size = count * max(width, 1) * dtype.itemsize
    flat = torch.empty(size, dtype=torch.uint8, device="cpu")
    start, done = chunk.data_page_offset + chunk.total_compressed_size - size, 0
    while done < size:
        got = os.preadv(handle, [flat.numpy().data[done:]], start + done)
        if not got:
            raise ValueError(f"it ends after {start + done} bytes")
        done += got
    numbers = flat.view(dtype)
    return numbers.view(count, width) if width else numbers
