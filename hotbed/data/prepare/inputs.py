"""The inputs of `prepare` -> files or tables with their splits.

`train=a.csv` names the split; for a plain path the split rule decides. find_files.py says what a folder or a glob means, local
or in a store. In Python, inputs can also be tables, data frames and Arrow datasets.

`TableFormat`: tables in memory and Arrow datasets in, chunks of columns out: a pyarrow Table or RecordBatch, a pandas
DataFrame, or a pyarrow.dataset.Dataset of any number of files. A data frame is converted to Arrow a few rows at a time, so no
second copy is held; pandas itself is not imported here.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hotbed.data.formats.chunk import WHOLE, Chunk, Reel
from hotbed.data.formats.parquet import CHUNK_ROWS, read_columns, reading_arrow, shown_row
from hotbed.data.prepare.find_files import Partition, find_files
from hotbed.data.prepare.splits import check_split_name
from hotbed.errors import ConfigError, FormatError, RemoteError
from hotbed.files import path_of

_REEL_ROWS = 4 * CHUNK_ROWS
Input = Any  # a path, a table, a data frame, an Arrow dataset, or (split, one of these)


class FileStamp(NamedTuple):
    """Size and time of a file: they show whether it has changed."""

    size: int
    changed: int  # nanoseconds


class RawSource(NamedTuple):
    """One raw file or table; `split` is empty if the split rule decides."""

    split: str
    path: Path  # for a table, its name in messages
    data: Any = None  # the table
    partition: Partition = ()  # columns that its folders name, and their values

    def stamp(self) -> FileStamp:
        return file_stamp(self.path) if self.data is None else FileStamp(0, 0)

    def check_stamp(self, mark: FileStamp) -> None:
        if self.stamp() != mark:
            raise FormatError(
                f"{self.path} changed while it was being read. Wait until it is complete, or copy it first."
            )


def list_sources(inputs: Input | Sequence[Input]) -> list[RawSource]:
    """Every file to read, in order."""
    if isinstance(inputs, str | Path | tuple) or is_table(inputs):
        inputs = [inputs]
    if not inputs:
        raise ConfigError(
            "no raw files were given. Name files or directories: hotbed prepare train=a.csv test=b.csv ..."
        )
    sources: list[RawSource] = []
    for given in inputs:
        split, path = given if isinstance(given, tuple) else _name_split(given)
        if split:
            check_split_name(split)
        if is_table(path):
            sources.append(RawSource(split, Path(f"table {len(sources) + 1}"), path))
        else:
            sources += _expand(split, path_of(path))
    named = [bool(source.split) for source in sources]
    if any(named) and not all(named):
        plain = next(source.path for source in sources if not source.split)
        raise ConfigError(f"{plain} has no split while other inputs do. Write split=path for all of them or for none.")
    return sources


def _name_split(given: Input) -> tuple[str, Input]:
    if is_table(given):
        return "", given
    text = str(given)
    split, equals, path = text.partition("=")
    if isinstance(given, Path) or not equals or "/" in split or os.path.exists(text) or glob.glob(text):
        return "", given
    check_split_name(split)
    return split, path


def _expand(split: str, path: Path) -> list[RawSource]:
    """The files of a path."""
    try:
        found = find_files(path, splits=not split)
        return [RawSource(split or file.split, file.path, partition=file.partition) for file in found]
    except RemoteError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise FormatError(f"{str(path)!r} cannot be read: {error}.") from error


def file_stamp(path: Path) -> FileStamp:
    """Size and time of the last change."""
    try:
        found = path.stat()
    except RemoteError:
        raise
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from error
    return FileStamp(found.st_size, found.st_mtime_ns)


def is_table(data: object) -> bool:
    return isinstance(data, pa.Table | pa.RecordBatch) or _is_frame(data) or _is_dataset(data)


def _is_frame(data: object) -> bool:
    return type(data).__module__.partition(".")[0] == "pandas" and type(data).__name__ == "DataFrame"


def _is_dataset(data: object) -> bool:
    return type(data).__module__.startswith("pyarrow._dataset") and hasattr(data, "get_fragments")


class TableFormat:
    """Reads one table; the path of its source is its name in messages."""

    name = "parquet"  # raw rows to score later are Parquet or Arrow
    typed = True

    def __init__(self, data: Any, wanted: Callable[[str], bool], time: str | None = None) -> None:
        self._data = data
        self._wanted = wanted
        self._time = time

    def reels(self, path: Path) -> Iterator[Reel]:
        """Some rows of a table; a fragment (most often a file) of a dataset."""
        if _is_dataset(self._data):
            line = 1
            for number, fragment in enumerate(self._data.get_fragments()):
                yield Reel(number, number + 1, line)
                with reading_arrow(path):
                    line += fragment.count_rows()
            return
        rows = len(self._data) if not isinstance(self._data, pa.RecordBatch) else self._data.num_rows
        for begin in range(0, max(rows, 1), _REEL_ROWS):
            yield Reel(begin, min(begin + _REEL_ROWS, rows), begin + 1)

    def chunks(self, path: Path, reel: Reel = WHOLE) -> Iterator[Chunk]:
        done = 0
        batches = self._batches(reel)
        while True:
            with reading_arrow(path):
                batch = next(batches, None)
            if batch is None:
                return
            names = batch.schema.names
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise FormatError(f"{path} names {', '.join(twice)} more than once. Column names must differ.")
            unread = tuple(name for name in names if not self._wanted(name))
            batch = batch.select([name for name in names if name not in unread])
            lines = np.arange(reel.first_line + done, reel.first_line + done + batch.num_rows, dtype=np.int64)
            done += batch.num_rows

            def show(i: int, batch: pa.RecordBatch = batch) -> str:
                return shown_row(batch, i)

            yield Chunk(str(path), read_columns(batch, path, self._time), lines, show, [], 0, unread)

    def _batches(self, reel: Reel) -> Iterator[pa.RecordBatch]:
        end = len(self._data) if reel.end is None and not _is_dataset(self._data) else reel.end
        if _is_dataset(self._data):
            fragments = list(self._data.get_fragments())[reel.begin : end]
            for fragment in fragments:
                scanner = fragment.scanner(schema=self._data.schema, batch_size=CHUNK_ROWS, use_threads=False)
                yield from scanner.to_batches()
            return
        for begin in range(reel.begin, end or 0, CHUNK_ROWS):
            stop = min(begin + CHUNK_ROWS, end or 0)
            if _is_frame(self._data):
                piece = pa.Table.from_pandas(self._data.iloc[begin:stop], preserve_index=False)
            else:
                piece = self._data.slice(begin, stop - begin)
                piece = pa.Table.from_batches([piece]) if isinstance(piece, pa.RecordBatch) else piece
            combined = piece.combine_chunks().to_batches(max_chunksize=CHUNK_ROWS)
            yield from combined
