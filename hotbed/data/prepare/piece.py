"""Rows in, a temporary file of a few hundred thousand rows out, with facts about it.

A piece numbers the ids of each feature independently, in order of occurrence, and stores the list of ids with their counts in
train. So its tables fit into the processor's caches, pieces can be made anywhere in any order, and their lists are merged
afterwards, feature by feature (merge.py).

In the file: `label`; `dense.i`; `numbers.i` (int32, into the piece's own list; `offsets.i` too for bags); `ids.i` and
`counts.i`. Rows are sorted by split if it is known already; `stretches` gives the range of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.encode import EncodedRows
from hotbed.data.prepare.arrays import write_arrays
from hotbed.data.prepare.layout import ColumnLayout
from hotbed.data.schema import DenseColumn
from hotbed.data.times import DAY
from hotbed.data.values import Bags
from hotbed.data.vocabulary import Numbering

PIECE_IDS = 6 << 20  # ids of all features; a piece ends with the chunk that reaches it. 240,000 rows of Criteo


class PieceFacts(NamedTuple):
    """Facts about a piece."""

    rows: int
    stretches: list[tuple[int, int, int]]  # (split, begin, end); one of split -1 if the split is not known yet
    positives: list[int]  # of each stretch
    moments: list[tuple[int, float, float]]  # of each column of numbers, rows of train or of split -1
    sizes: list[int]  # distinct ids of each feature
    times: tuple[int, int] | None = None  # of the first and last row
    days: Sequence[tuple[int, int]] = ()  # (day, its first row)


class PieceBuilder:
    """Collects the rows of one piece."""

    def __init__(self, layout: ColumnLayout, train: int) -> None:
        self._layout = layout
        self._train = train
        self._numberings = [Numbering() for _ in layout.features]
        self._moments = [Moments() for _ in layout.numbers]
        self._parts: dict[int, list[list[NDArray[Any] | Bags]]] = {}  # split -> column -> pieces
        self._positives: dict[int, int] = {}
        self._times: list[NDArray[np.int64]] = []
        self.num_ids = 0
        self.rows = 0

    def add(self, encoded: EncodedRows, split_of_row: NDArray[np.int64] | int, num_splits: int) -> None:
        """Add rows; the split is an array or one number for all, -1 if not known yet. Rows of other splits are left out."""
        n = len(encoded.labels)
        if isinstance(split_of_row, int):
            rows_of_split: dict[int, NDArray[np.int64] | None] = {split_of_row: None}
            counted = np.full(n, split_of_row in (-1, self._train))
        else:
            present = np.flatnonzero(np.bincount(split_of_row, minlength=num_splits)[:num_splits])
            rows_of_split = {int(split): np.flatnonzero(split_of_row == split) for split in present}
            counted = split_of_row == self._train
            rows_of_split = {s: None if r is not None and len(r) == n else r for s, r in rows_of_split.items()}
        numbers = [self._number(i, ids, counted) for i, ids in enumerate(encoded.ids)]
        for values, moments in zip(encoded.dense, self._moments):
            moments.add(values if counted.all() else values[counted])
        columns: list[NDArray[Any] | Bags] = [encoded.labels, *encoded.dense, *numbers]
        for split, rows in rows_of_split.items():
            taken = [column if rows is None else _take(column, rows) for column in columns]
            parts = self._parts.setdefault(split, [[] for _ in columns])
            for part, of_rows in zip(parts, taken):
                part.append(of_rows)
            labels = taken[0]
            assert isinstance(labels, np.ndarray)
            self._positives[split] = self._positives.get(split, 0) + int(np.count_nonzero(labels))
            self.rows += len(labels)
        if encoded.times is not None:
            self._times.append(encoded.times)

    def _number(self, i: int, ids: NDArray[np.int64] | Bags, counted: NDArray[np.bool_]) -> NDArray[np.int32] | Bags:
        if isinstance(ids, Bags):
            self.num_ids += len(ids.ids)
            return Bags(ids.offsets, self._numberings[i].add(ids.ids, np.repeat(counted, np.diff(ids.offsets))))
        self.num_ids += len(ids)
        return self._numberings[i].add(ids, counted)

    def finish(self, path: Path) -> PieceFacts:
        """Write the file."""
        splits = sorted(self._parts)
        arrays: dict[str, list[NDArray[Any]]] = {}
        num_dense = len(self._layout.numbers)
        stretches, begin = [], 0
        for split in splits:
            rows = sum(len(labels) for labels in self._parts[split][0])
            stretches.append((split, begin, begin + rows))
            begin += rows
        for column in range(1 + num_dense + len(self._layout.features)):
            pieces = [piece for split in splits for piece in self._parts[split][column]]
            name = "label" if column == 0 else f"dense.{column - 1}"
            feature = column - 1 - num_dense
            if feature >= 0:
                name = f"numbers.{feature}"
            arrays[name] = [piece.ids if isinstance(piece, Bags) else piece for piece in pieces]
            if any(isinstance(piece, Bags) for piece in pieces):
                lengths = [np.diff(piece.offsets) for piece in pieces if isinstance(piece, Bags)]
                arrays[f"offsets.{feature}"] = [np.concatenate([[0], np.cumsum(np.concatenate(lengths))])]
        for i, numbering in enumerate(self._numberings):
            arrays[f"ids.{i}"], arrays[f"counts.{i}"] = [numbering.ids], [numbering.counts]
        times, days = _days_of(self._times)
        facts = PieceFacts(
            rows=begin,
            stretches=stretches,
            positives=[self._positives[split] for split in splits],
            moments=[moments.state for moments in self._moments],
            sizes=[len(numbering) for numbering in self._numberings],
            times=times,
            days=days,
        )
        write_arrays(path, arrays)
        return facts


def _take(column: NDArray[Any] | Bags, rows: NDArray[np.int64]) -> NDArray[Any] | Bags:
    if not isinstance(column, Bags):
        taken: NDArray[Any] = column[rows]
        return taken
    lengths = np.diff(column.offsets)
    keep = np.zeros(len(lengths), dtype=np.bool_)
    keep[rows] = True
    offsets = np.concatenate([[0], np.cumsum(lengths[rows])])
    return Bags(offsets, column.ids[np.repeat(keep, lengths)])


def _days_of(pieces: list[NDArray[np.int64]]) -> tuple[tuple[int, int] | None, list[tuple[int, int]]]:
    """The times of the first and last row, and the first row of each day; rows are sorted by time."""
    times = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
    if len(times) == 0:
        return None, []
    days, firsts = np.unique(times // DAY, return_index=True)
    return (int(times[0]), int(times[-1])), list(zip(days.tolist(), firsts.tolist()))


class Moments:
    """Mean and variance of a column: `add` numbers or `merge` others, then `fit` the column."""

    def __init__(self, state: tuple[int, float, float] = (0, 0.0, 0.0)) -> None:
        self.state = state  # count, mean, sum of squared distances from it

    def add(self, values: NDArray[np.float64]) -> None:
        if len(values):
            mean = float(values.mean())
            self.merge((len(values), mean, float(((values - mean) ** 2).sum())))

    def merge(self, other: tuple[int, float, float]) -> None:
        """Add the numbers of another Moments."""
        count, mean, squares = self.state
        other_count, other_mean, other_squares = other
        if other_count == 0:
            return
        total = count + other_count
        apart = other_mean - mean
        squares += other_squares + apart**2 * count * other_count / total
        self.state = (total, mean + apart * other_count / total, squares)

    def fit(self, spec: DenseColumn) -> DenseColumn:
        """`spec` with the mean and scale that standardise these numbers; constant columns keep scale 1."""
        count, mean, squares = self.state
        deviation = float(np.sqrt(squares / max(count, 1)))
        scale = deviation if deviation > 1e-9 * max(abs(mean), 1e-30) and np.isfinite(deviation) else 1.0
        return DenseColumn(spec.name, spec.transform, mean=mean, scale=scale)
