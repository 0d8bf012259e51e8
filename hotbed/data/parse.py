"""Pass 1 of prepare: raw files in, parsed rows in temporary Arrow files and what there is to know about them out.

Every id is numbered when first seen (int32) and counted if its row is in train; numbers are transformed but not yet
standardised. Chunks are read one after the other; the columns of a chunk are shared among threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from hotbed.data.encoded import Encoded, encode, take_rows
from hotbed.data.formats import Chunk, Format
from hotbed.data.inputs import Source, SplitRule, file_mark
from hotbed.data.layout import Layout, Wishes, choose_layout
from hotbed.data.quarantine import Quarantine
from hotbed.data.schema import DenseColumn
from hotbed.data.values import Bags, LabelReader
from hotbed.data.vocabulary import Numbering
from hotbed.errors import FormatError

TRAIN = "train"


class Progress(NamedTuple):
    """How far prepare is: bytes while reading, rows while writing."""

    stage: str  # "reading" or "writing"
    done: int
    total: int
    rows: int


class Moments:
    """Mean and standard deviation of numbers that come in pieces."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        if len(values) == 0:
            return
        mean = float(values.mean())
        count = self._count + len(values)
        apart = mean - self._mean
        self._squares += float(((values - mean) ** 2).sum()) + apart**2 * self._count * len(values) / count
        self._mean += apart * len(values) / count
        self._count = count

    def fit(self, spec: DenseColumn) -> DenseColumn:
        """`spec` with the mean and scale that make these numbers standard; constant columns keep scale 1."""
        deviation = float(np.sqrt(self._squares / max(self._count, 1)))
        scale = deviation if deviation > 1e-9 * max(abs(self._mean), 1e-30) and np.isfinite(deviation) else 1.0
        return DenseColumn(spec.name, spec.transform, mean=self._mean, scale=scale)


class ParsedSplit:
    """The rows of one split in a temporary Arrow file."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.schema = schema
        self.batch_rows: list[int] = []  # rows of each batch in the file
        self.positives = 0
        self._writer = pa.ipc.new_file(str(path), schema)

    @property
    def rows(self) -> int:
        return sum(self.batch_rows)

    def add(self, arrays: list[pa.Array], positives: int) -> None:
        self._writer.write_batch(pa.record_batch(arrays, schema=self.schema))
        self.batch_rows.append(len(arrays[0]))
        self.positives += positives

    def close(self) -> None:
        self._writer.close()


@dataclass
class Parsed:
    """What pass 1 knows; pass 2 needs nothing else."""

    layout: Layout
    labels: LabelReader
    numberings: list[Numbering]  # one per feature
    moments: list[Moments]  # one per dense column
    splits: dict[str, ParsedSplit]
    raw_bytes: int = 0  # of all files on disk
    left_out: int = 0  # good rows that belong to no split


def parse_sources(
    sources: Sequence[Source],
    splits: tuple[str, ...],
    rule: SplitRule | None,
    reader: Format,
    begin: Callable[[Chunk], Parsed],
    quarantine: Quarantine,
    progress: Callable[[Progress], None],
) -> Parsed:
    """Read everything. `begin` decides from the first chunk what the columns are."""
    marks = [file_mark(source.path) for source in sources]
    total = sum(size for size, _ in marks)
    parsed: Parsed | None = None
    with ThreadPoolExecutor((os.cpu_count() or 1) + 1) as threads:
        for number, chunk, bytes_read in _ahead(_chunks(sources, marks, reader), threads):
            if parsed is None:
                if len(chunk.lines) == 0:
                    quarantine.add(chunk.bad, 0)  # nothing to judge the columns by
                    continue
                parsed = begin(chunk)
            parsed.layout.check_columns(chunk)
            encoded = encode(chunk, parsed.labels, parsed.layout.dense, parsed.layout.features, threads)
            if rule is not None:
                split_of_row = rule.assign(number, encoded.lines, quarantine.good_rows)
            else:
                split_of_row = np.full(len(encoded.lines), splits.index(sources[number].split or TRAIN))
            quarantine.add(encoded.bad, len(encoded.lines))
            _keep(encoded, split_of_row, parsed, threads)
            progress(Progress("reading", bytes_read, total, quarantine.good_rows))
            if rule is not None and rule.full(quarantine.good_rows):
                break
    quarantine.check()
    if parsed is None or quarantine.good_rows == 0:
        raise FormatError(f"{', '.join(str(source.path) for source in sources[:3])}: not one good row was found.")
    _check_splits(parsed, quarantine.good_rows)
    parsed.raw_bytes = total
    return parsed


class _Numbered(NamedTuple):
    """A chunk, the number of its file, and the bytes read of all files so far."""

    file: int
    chunk: Chunk
    bytes_read: int


def _chunks(sources: Sequence[Source], marks: Sequence[tuple[int, int]], reader: Format) -> Iterator[_Numbered]:
    before = 0
    for number, (source, mark) in enumerate(zip(sources, marks)):
        for chunk in reader.chunks(source.path):
            yield _Numbered(number, chunk, before + chunk.bytes_read)
        if file_mark(source.path) != mark:
            raise FormatError(f"{source.path} changed while it was read. Wait until it is complete, or copy it first.")
        before += mark[0]


def _ahead(chunks: Iterator[_Numbered], threads: Executor) -> Iterator[_Numbered]:
    """The same chunks, the next one being read while the last one is used."""
    coming = threads.submit(next, chunks, None)
    while (chunk := coming.result()) is not None:
        coming = threads.submit(next, chunks, None)
        yield chunk


def start(
    chunk: Chunk, splits: tuple[str, ...], reader: Format, wishes: Wishes, positive: str | None, directory: Path
) -> Parsed:
    """Decide what the columns are and open the temporary files."""
    layout = choose_layout(chunk, wishes, reader.typed)
    fields = [pa.field(layout.label, pa.float32()), *(pa.field(spec.name, pa.float64()) for spec in layout.dense)]
    for feature in layout.features:
        fields.append(pa.field(feature.name, pa.large_list(pa.int32()) if feature.multi else pa.int32()))
    return Parsed(
        layout=layout,
        labels=LabelReader(layout.label, positive=positive, signed=reader.name == "libsvm"),
        numberings=[Numbering() for _ in layout.features],
        moments=[Moments() for _ in layout.dense],
        splits={name: ParsedSplit(directory / f"{name}.arrow", pa.schema(fields)) for name in splits},
    )


def _keep(encoded: Encoded, split_of_row: np.ndarray, parsed: Parsed, threads: Executor) -> None:
    """Number and count the ids of a chunk and append its rows to the files of their splits."""
    names = list(parsed.splits)
    counted = split_of_row == names.index(TRAIN)
    parsed.left_out += int(np.count_nonzero(split_of_row >= len(names)))

    def number(i: int) -> np.ndarray | Bags:
        ids = encoded.ids[i]
        if isinstance(ids, Bags):
            return Bags(ids.offsets, parsed.numberings[i].add(ids.ids, np.repeat(counted, np.diff(ids.offsets))))
        return parsed.numberings[i].add(ids, counted)

    numbers = list(threads.map(number, range(len(encoded.ids))))
    for values, moments in zip(encoded.dense, parsed.moments):
        moments.add(values[counted])
    for index, split in enumerate(parsed.splits.values()):
        rows = split_of_row == index
        if rows.any():
            columns = [encoded.labels, *encoded.dense, *numbers]
            arrays = [_arrow(values if rows.all() else take_rows(values, rows)) for values in columns]
            split.add(arrays, int(np.count_nonzero(encoded.labels[rows])))


def _arrow(values: np.ndarray | Bags) -> pa.Array:
    if isinstance(values, Bags):
        return pa.LargeListArray.from_arrays(pa.array(values.offsets), pa.array(values.ids))
    return pa.array(values)


def _check_splits(parsed: Parsed, good_rows: int) -> None:
    for split in parsed.splits.values():
        split.close()
    empty = [name for name, split in parsed.splits.items() if split.rows == 0]
    if empty:
        sizes = ", ".join(f"{name} {split.rows:,}" for name, split in parsed.splits.items())
        raise FormatError(
            f"split {', '.join(empty)} got no rows; the files hold {good_rows:,} good ones ({sizes}). "
            "Change --split or the files."
        )
