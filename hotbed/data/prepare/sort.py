"""A reader in, the same reader out, except that the rows of a small file are sorted by time.

`prepare` reads a file once, in bounded memory, and a time column must be in order. Logs for a first try are small and often
are not, so a file of up to SMALL_FILE is read completely and sorted; rows with equal times keep their order. A file that is
in order already, or is larger, is passed through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotbed.data.formats.chunk import (
    REEL_BYTES,
    WHOLE,
    Chunk,
    Column,
    Faults,
    Floats,
    Format,
    HashedText,
    Instants,
    Integers,
    Lists,
    Reel,
    Text,
    num_values,
)
from hotbed.data.times import TimeColumn, read_times

SMALL_FILE = REEL_BYTES  # of text


class SortedFormat:
    """Sorts the rows of small files by time."""

    def __init__(self, inner: Format, time: TimeColumn, say: Callable[[str], None]) -> None:
        self.name, self.typed = inner.name, inner.typed
        self._inner, self._time, self._say = inner, time, say
        self._said: set[Path] = set()

    def reels(self, path: Path) -> Iterator[Reel]:
        return self._inner.reels(path)

    def chunks(self, path: Path, reel: Reel = WHOLE) -> Iterator[Chunk]:
        source = self._inner.chunks(path, reel)
        if len(list(self._inner.reels(path))) > 1:
            yield from source
            return
        chunks, num_bytes, latest, in_order = [], 0, -(2**63), True
        for chunk in source:
            chunks.append(chunk)
            if self._time.name not in chunk.columns:
                break
            times = self._times(chunk)
            if len(times):
                in_order = in_order and int(times[0]) >= latest and bool((times[1:] >= times[:-1]).all())
                latest = int(times[-1])
            num_bytes += _num_bytes(chunk)
            if num_bytes > SMALL_FILE:
                break
        if in_order or num_bytes > SMALL_FILE:
            yield from chain(chunks, source)
            return
        if path not in self._said:  # files are read twice
            self._said.add(path)
            self._say(f"{path}: rows are not in the order of {self._time.name}; they are sorted by it")
        yield from self._sorted(chunks)

    def _times(self, chunk: Chunk) -> NDArray[np.int64]:
        """Rows without a time stay behind the row before; they are bad, and reported later."""
        faults = Faults(len(chunk.lines))
        times = read_times(chunk.columns[self._time.name], self._time, faults)
        return np.maximum.accumulate(np.where(faults.good, times, -(2**63))) if faults.any else times

    def _sorted(self, chunks: list[Chunk]) -> Iterator[Chunk]:
        """Chunks of the same sizes; bad rows stay with the chunk they came with."""
        order = np.argsort(np.concatenate([self._times(chunk) for chunk in chunks]), kind="stable")
        borders = np.cumsum([0, *(len(chunk.lines) for chunk in chunks)])
        lines = np.concatenate([chunk.lines for chunk in chunks])
        columns = {name: _join([chunk.columns[name] for chunk in chunks]) for name in chunks[0].columns}
        for number, chunk in enumerate(chunks):
            rows = order[borders[number] : borders[number + 1]]

            def show(i: int, rows: NDArray[np.int64] = rows) -> str:
                place = int(np.searchsorted(borders, rows[i], side="right")) - 1
                return chunks[place].show(int(rows[i] - borders[place]))

            picked = {name: _pick(column, rows) for name, column in columns.items()}
            yield Chunk(chunk.file, picked, lines[rows], show, chunk.bad, chunk.bytes_read, chunk.unread)


def _num_bytes(chunk: Chunk) -> int:
    """The memory of a chunk, about; columns of text share one buffer."""
    buffers = {id(array): array.nbytes for column in chunk.columns.values() for array in _arrays(column)}
    return sum(buffers.values())


def _arrays(column: Column) -> list[NDArray[np.generic]]:
    return [column.offsets, *_arrays(column.values)] if isinstance(column, Lists) else list(column)


def _join(columns: list[Column]) -> Column:
    """The columns of several chunks, one after the other."""
    first = columns[0]
    if isinstance(first, Text):
        starts = np.cumsum([0, *(len(one.data) for one in columns if isinstance(one, Text))])
        texts = [one for one in columns if isinstance(one, Text)]
        return Text(
            np.concatenate([one.data for one in texts]),
            np.concatenate([one.starts + at for one, at in zip(texts, starts)]),
            np.concatenate([one.ends + at for one, at in zip(texts, starts)]),
        )
    if isinstance(first, Lists):
        lists = [one for one in columns if isinstance(one, Lists)]
        lengths = np.concatenate([np.diff(one.offsets) for one in lists])
        values = _join([one.values for one in lists])
        assert isinstance(values, Text | Integers | Floats)
        return Lists(np.concatenate([[0], np.cumsum(lengths)]), values)
    parts = [np.concatenate(arrays) for arrays in zip(*(_arrays(one) for one in columns))]
    return type(first)(*parts)


def _pick(column: Column, rows: NDArray[np.int64]) -> Column:
    """The rows in this order."""
    if isinstance(column, Text):
        return Text(column.data, column.starts[rows], column.ends[rows])
    if isinstance(column, Lists):
        lengths = np.diff(column.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        places = np.repeat(column.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        values = _pick(column.values, places)
        assert isinstance(values, Text | Integers | Floats)
        return Lists(offsets, values)
    assert isinstance(column, Integers | Floats | HashedText | Instants)
    assert num_values(column) >= len(rows)
    return type(column)(*(array[rows] for array in column))
