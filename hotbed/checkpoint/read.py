"""Loads the rows of a chain of checkpoints into a sink: all of them, or none.

Manifests, the presence and size of every file, and whether the tables fit are checked first. Then every file of rows is read
once and compared with its checksum before one of its rows is used. When one fails, the sink starts over, so that no table is
left half loaded. A few threads read files ahead while rows go into the sink.

`parts_of`: one Parquet file of rows -> RowParts. The whole file is read and compared with its checksum before its first row is
used. Columns are views into the bytes read: the numbers of a page are its end (row_file.py), so nothing is decoded.

Files are read past the page cache where the system allows it (O_DIRECT). A row is read once; through the cache that takes 0.4
s of processor time per GB from the disk, past it 0.05 s. Files that are in the cache are read from the disk again.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.chain import Entry, chain_of
from hotbed.checkpoint.files import checksum, read_tensors
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.row_file import COLUMNS_KEY, TABLES_KEY, Column, FileMark
from hotbed.checkpoint.types import Sink
from hotbed.checkpoint.write import GONE, REST
from hotbed.errors import HotbedError, RunError
from hotbed.host.pages import in_pages, zeros
from hotbed.host.threads import run_ahead
from hotbed.store.ssd import frozen_items
from hotbed.types import RowPart, TableShape

TYPES = {str(one): one for one in (torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16)}
_PIECE = 4 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it, not every file system does
THREADS = 2
Report = Callable[[int], None]  # called with the number of bytes that were read


def check_sizes(chain: Sequence[Entry]) -> None:
    """A RunError unless every file of every checkpoint is there and as long as it should be."""
    for folder, manifest in chain:
        sizes = {name: mark.bytes for name, mark in manifest.files.items()} | manifest.linked
        for name, size in sizes.items():
            try:
                found = (folder / name).stat().st_size
            except OSError as error:
                raise RunError(f"{folder} is damaged: {name} cannot be read ({error.strerror or error}).") from error
            if found != size:
                raise RunError(f"{folder} is damaged: {name} has {found} bytes, its manifest says {size}.")


def load_rows(
    entry: Entry, sink: Sink, report: Report = lambda _: None, load_rest: Callable[[], None] = lambda: None
) -> None:
    """Load the rows of a checkpoint into tables of the same shape; `load_rest` loads the rest before they can be used."""
    chain = chain_of(entry)
    check_sizes(chain)
    refuse_misfits(entry, sink.tables)
    rest = tensors_of(entry, REST)
    with filling(sink):
        for part in replay(chain, sink, report):
            sink.add(part)
        sink.rest(rest)
        load_rest()


@contextmanager
def filling(sink: Sink) -> Iterator[None]:
    """Fill the sink with all rows, or with none."""
    try:
        sink.begin()
        yield
        sink.end()
    except (HotbedError, OSError):
        sink.begin()
        sink.end()
        raise


def replay(chain: Sequence[Entry], sink: Sink, report: Report) -> Iterator[RowPart]:
    """The rows of every checkpoint, oldest first; frozen folders and forgotten rows go into the sink in order."""
    for entry in chain:
        for group, folder in entry.frozen.items():
            sink.adopt(group, folder)
        for table, ids in gone_of(entry):
            sink.gone(table, ids)
        yield from rows_of(entry, report)


def rows_of(entry: Entry, report: Report = lambda _: None) -> Iterator[RowPart]:
    """The rows in the files of one checkpoint; a part is valid until the next is requested."""
    marks = [(entry.folder / name, mark) for name, mark in entry.manifest.files.items() if name.startswith("rows/")]
    largest = max((mark.bytes for _, mark in marks), default=0)
    rooms = [new_room(largest) for _ in range(THREADS + 1)]  # used again: fresh memory costs more than reading
    tasks = [
        (path, mark, rooms[n % len(rooms)]) for n, (path, mark) in enumerate(marks)
    ]  # one is free when it is taken again

    def read(task: tuple[Path, FileMark, NDArray[np.uint8]]) -> tuple[Path, NDArray[np.uint8]]:
        return task[0], read_whole(*task)

    with closing(run_ahead(read, tasks, threads=THREADS, ahead=THREADS, name="checkpoint")) as files:
        for path, content in files:
            for part in parts_of(path, content):
                yield placed(part, entry)
            report(len(content))


def placed(part: RowPart, entry: Entry) -> RowPart:
    """Rows of a checkpoint, with the columns that its rank has of them."""
    shape = entry.manifest.tables.get(part.table)
    return part if shape is None or shape.columns is None else part._replace(first_column=shape.columns[0])


def gone_of(entry: Entry) -> Iterator[tuple[str, Tensor]]:
    """(table, ids) forgotten since the parent."""
    mark = entry.manifest.files.get(GONE)
    if mark is not None:
        path = entry.folder / GONE
        for part in parts_of(path, read_whole(path, mark)):
            yield part.table, part.ids


def tensors_of(entry: Entry, stem: str) -> dict[str, Tensor]:
    """The tensors of one small file, checked."""
    name = f"{stem}.safetensors"
    path, mark = entry.folder / name, entry.manifest.files.get(name)
    if mark is None:
        return {}
    try:
        fits = checksum(path) == mark.crc32
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not fits:
        raise RunError(f"{entry.folder} is damaged: the content of {name} does not match its checksum.")
    return read_tensors(path)


def refuse_misfits(entry: Entry, tables: Mapping[str, TableShape], *, any_rank: bool = False) -> None:
    """A RunError unless the tables are those that were saved; with `any_rank`, whatever ranks have of them."""
    saved = entry.manifest.tables
    if any_rank:
        saved, tables = (
            {name: replace(shape, owner=None, columns=None) for name, shape in shapes.items()}
            for shapes in (saved, tables)
        )
    wrong = [f"it has no table {name!r}" for name in tables if name not in saved]
    wrong += [f"its table {name!r} is not wanted" for name in saved if name not in tables]
    for name, shape in tables.items():
        if name in saved and saved[name] != shape:
            pairs = differences(saved[name], shape).items()
            wrong.append(f"table {name!r} has " + ", ".join(f"{what} {old}, not {new}" for what, (old, new) in pairs))
    if wrong:
        raise RunError(
            f"{entry.folder} does not fit this run: {'; '.join(wrong[:5])}{' ...' if len(wrong) > 5 else ''}. "
            "Build the same tables, or carry over what fits with --warm-start (hotbed.checkpoint.warm_start)."
        )


def refuse_slices(entries: Sequence[Entry], what: str) -> None:
    """A RunError where ranks have columns of rows, for a reader of whole ones."""
    sliced = [name for name, shape in entries[0].manifest.tables.items() if shape.columns is not None]
    if sliced:
        raise RunError(
            f"{entries[0].folder} has rows by column, some columns of each rank (tables {', '.join(sliced)}), and {what} reads "
            "whole rows. `hotbed export` joins them; so does a run of one process that resumes."
        )


def differences(one: TableShape, other: TableShape) -> dict[str, tuple[object, object]]:
    """Every field in which two shapes differ."""
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in TableShape.__dataclass_fields__}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def problems_of(folder: Path, report: Report = lambda _: None) -> list[str]:
    """Problems of one checkpoint: in its manifest, its chain, its own files."""
    try:
        entry = Entry(folder, read_manifest(folder))
    except RunError as error:
        return [str(error)]
    problems = []
    for check in (lambda: chain_of(entry), lambda: check_sizes([entry])):
        try:
            check()
        except RunError as error:
            problems.append(str(error))
    return problems + _damaged_files(entry, report) + _damaged_segments(entry, report)


def _damaged_files(entry: Entry, report: Report) -> list[str]:
    problems, rows = [], Counter[str]()
    for name, mark in entry.manifest.files.items():
        path = entry.folder / name
        try:
            if name.startswith("rows/"):
                for part in parts_of(path, read_whole(path, mark)):
                    rows[part.table] += part.ids.shape[0]
            elif path.suffix == ".parquet":
                list(gone_of(entry))
            else:
                tensors_of(entry, path.stem)
        except RunError as error:
            problems.append(str(error))
        report(mark.bytes)
    if not problems and rows != Counter(entry.manifest.rows):
        problems.append(f"{entry.folder} holds {rows.total():,} rows, its manifest says {entry.manifest.num_rows:,}.")
    return problems


def _damaged_segments(entry: Entry, report: Report) -> list[str]:
    """Ssd segments have a checksum in every record."""
    problems = []
    for folder in entry.frozen.values():
        try:
            for _, records in frozen_items(folder):
                report(records.nbytes)
        except (HotbedError, OSError) as error:
            problems.append(str(error))
    return problems


def new_room(size: int) -> NDArray[np.uint8]:
    """Memory for a file of `size` bytes, in whole pages, as reading past the cache needs it."""
    return zeros((in_pages(size),), np.uint8)


def read_whole(path: Path, mark: FileMark, room: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """The bytes of a file, in `room` (`new_room`) if given; a RunError names a file that differs from its mark."""
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
        raise RunError(f"{path} is damaged: its content does not match its checksum.")
    return room[:size]


def _read_into(room: memoryview, path: Path, size: int, flags: int) -> int:
    """Fill the room with a file's bytes; their checksum, computed piece by piece while a piece is in the cache."""
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
    """The rows of a file whose bytes were read; the tensors are views into them."""
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
