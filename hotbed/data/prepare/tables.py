"""Tables in memory and Arrow datasets in, chunks of columns out.

A pyarrow Table or RecordBatch, a pandas DataFrame, or a pyarrow.dataset.Dataset of any number of files. A data frame is
turned to Arrow some rows at a time, so no second copy of it is held; pandas itself is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.data.formats.chunk import WHOLE, Chunk, Reel
from hotbed.data.formats.parquet import CHUNK_ROWS, read_columns, reading_arrow, shown_row
from hotbed.errors import FormatError

_REEL_ROWS = 4 * CHUNK_ROWS


def is_table(data: object) -> bool:
    return isinstance(data, pa.Table | pa.RecordBatch) or _is_frame(data) or _is_dataset(data)


def _is_frame(data: object) -> bool:
    return type(data).__module__.partition(".")[0] == "pandas" and type(data).__name__ == "DataFrame"


def _is_dataset(data: object) -> bool:
    return type(data).__module__.startswith("pyarrow._dataset") and hasattr(data, "get_fragments")


class TableFormat:
    """Reads one table; the path of its source is its name in messages."""

    name = "parquet"  # raw rows to score later come as Parquet or Arrow
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
