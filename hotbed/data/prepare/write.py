"""Pass 2 of prepare: parsed rows and the rows of their ids in, the files of rows of a dataset out.

Numbers of ids become rows of the vocabulary (row 0: unknown, then most frequent first, ties by id) or, with the hashing
trick and for dynamic ids, 64-bit ids. Parts of about a million rows are written in parallel, in record batches of 65,536 rows,
each part atomically.

Files are Arrow, not packed (arrow_file.py): a row of Criteo takes 160 bytes, and no time to decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data.arrow_file import SUFFIX, ArrowWriter
from hotbed.data.prepare.arrays import ArrayFile
from hotbed.data.schema import DenseColumn, IdFeature
from hotbed.data.values import standardise
from hotbed.host.atomic import rewriting

GROUP_ROWS = 1 << 16
PART_ROWS = 1 << 20


class RowSpan(NamedTuple):
    """Rows begin .. end - 1 of a piece."""

    piece: int
    begin: int
    end: int


class DatasetPart(NamedTuple):
    """One file: the rows of these spans, in order."""

    file: str
    spans: tuple[RowSpan, ...]
    rows: int


class Pieces(NamedTuple):
    """The paths of pieces, and the range of each in the row list of every feature."""

    paths: list[Path]
    starts: NDArray[np.int64]  # [P, F]
    ends: NDArray[np.int64]  # [P, F]
    work: Path


class FinalColumns(NamedTuple):
    """The columns of the dataset."""

    label: str
    dense: tuple[DenseColumn, ...]
    features: tuple[IdFeature, ...]

    @property
    def schema(self) -> pa.Schema:
        kinds = dict.fromkeys([self.label, *(spec.name for spec in self.dense)], pa.float32())
        for feature in self.features:
            kind = pa.int32() if feature.mode == "vocabulary" else pa.int64()
            kinds[feature.name] = pa.list_(kind) if feature.multi else kind
        return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def cut_parts(split: str, spans: Sequence[RowSpan]) -> list[DatasetPart]:
    """The parts of a split whose rows are `spans`."""
    parts: list[DatasetPart] = []
    waiting: list[RowSpan] = []
    rows = 0
    for span in spans:
        begin = span.begin
        while begin < span.end:
            end = min(span.end, begin + PART_ROWS - rows)
            waiting.append(RowSpan(span.piece, begin, end))
            rows += end - begin
            begin = end
            if rows == PART_ROWS:
                parts.append(DatasetPart(f"{split}/part-{len(parts):05d}{SUFFIX}", tuple(waiting), rows))
                waiting, rows = [], 0
    if rows:
        parts.append(DatasetPart(f"{split}/part-{len(parts):05d}{SUFFIX}", tuple(waiting), rows))
    return parts


def write_part(part: DatasetPart, pieces: Pieces, finish: FinalColumns, directory: Path) -> int:
    """Write one file; returns its number of rows."""
    path = directory / part.file
    schema = finish.schema
    with (  # pieces may be deleted once the file exists
        rewriting(path, unique=True) as temporary,
        ExitStack() as stack,
        ArrowWriter(temporary, schema, part.file) as writer,
    ):
        open_pieces = {
            number: _OpenPiece(stack, number, pieces, finish) for number in dict.fromkeys(s.piece for s in part.spans)
        }
        for spans in _groups(part.spans):
            columns = [open_pieces[span.piece].columns(span.begin, span.end) for span in spans]
            arrays = [_join([of_span[i] for of_span in columns]) for i in range(len(schema))]
            writer.write(pa.Table.from_arrays(arrays, schema=schema), GROUP_ROWS)
    return part.rows


def _groups(spans: Sequence[RowSpan]) -> list[list[RowSpan]]:
    """The same rows in groups of GROUP_ROWS."""
    groups: list[list[RowSpan]] = [[]]
    rows = 0
    for span in spans:
        begin = span.begin
        while begin < span.end:
            if rows == GROUP_ROWS:
                groups.append([])
                rows = 0
            end = min(span.end, begin + GROUP_ROWS - rows)
            groups[-1].append(RowSpan(span.piece, begin, end))
            rows += end - begin
            begin = end
    return groups


class _OpenPiece:
    """Reads the final columns of any rows of a piece."""

    def __init__(self, stack: ExitStack, number: int, pieces: Pieces, finish: FinalColumns) -> None:
        self._arrays = stack.enter_context(ArrayFile(pieces.paths[number]))
        self._finish = finish
        self._values: list[NDArray[Any]] = []  # per feature: row (int32) or id (int64) of every number
        for i, feature in enumerate(finish.features):
            if feature.mode == "vocabulary":
                start, end = int(pieces.starts[number, i]), int(pieces.ends[number, i])
                path = pieces.work / f"feature-{i}.rows"
                self._values.append(np.fromfile(path, np.int32, end - start, offset=4 * start))
            else:
                self._values.append(self._arrays.read(f"ids.{i}"))

    def columns(self, begin: int, end: int) -> list[pa.Array]:
        arrays = [pa.array(self._arrays.read("label", begin, end))]
        for i, spec in enumerate(self._finish.dense):
            arrays.append(pa.array(standardise(self._arrays.read(f"dense.{i}", begin, end), spec)))
        for i, feature in enumerate(self._finish.features):
            if feature.multi:
                offsets = self._arrays.read(f"offsets.{i}", begin, end + 1)
                numbers = self._arrays.read(f"numbers.{i}", int(offsets[0]), int(offsets[-1]))
                starts = (offsets - offsets[0]).astype(np.int32)
                arrays.append(pa.ListArray.from_arrays(pa.array(starts), pa.array(self._values[i][numbers])))
            else:
                arrays.append(pa.array(self._values[i][self._arrays.read(f"numbers.{i}", begin, end)]))
        return arrays


def _join(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
