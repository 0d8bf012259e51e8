"""Rows of a synthetic click log as a pure function of (seed, row number).

In: a shape, a seed and a range of rows. Out: labels, integers, ids and the true click probability of each row. Every value
comes from its own counter-based random word, so any range can be generated independently, in any order, by any number of
threads. Ids and integers are the same on every machine (integer arithmetic only); probabilities agree to rounding.

The log drifts from day to day: the frequent ids of each octave of ranks rotate, and so do the effects of ids. A day has
`rows_per_day` rows, by default that of the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.draws import key_of
from hotbed.data.synthetic.kernels import (
    MISSING_ID,
    MISSING_INTEGER,
    Draw,
    IdColumns,
    MissingGroups,
    bag_block,
    click_block,
    id_block,
    integer_block,
    missing_block,
    plant,
)
from hotbed.data.synthetic.shapes import IdColumn, IntegerColumn, Shape, inverse_cdf, inverse_quantiles
from hotbed.errors import ConfigError
from hotbed.host.threads import run_all

__all__ = ["MISSING_ID", "MISSING_INTEGER", "ClickBags", "ClickLog", "ClickRows"]

BLOCK = 8192  # rows a thread generates at once: 39 columns of them fit the second-level cache


class ClickRows(NamedTuple):
    """R rows, one line per column; N integer columns, C id columns."""

    labels: NDArray[np.float32]  # [R]
    integers: NDArray[np.int32]  # [N, R], MISSING_INTEGER where missing
    ids: NDArray[np.int32]  # [C, R], 0 is the most frequent id, MISSING_ID where missing
    probability: NDArray[np.float64]  # [R]


class ClickBags(NamedTuple):
    """The bags of R rows of a column, concatenated."""

    values: NDArray[np.int32]  # [L]
    offsets: NDArray[np.int32]  # [R + 1]


class ClickLog:
    """The infinite click log of a shape and a seed: `rows(a, b)` generates any part of it."""

    def __init__(self, shape: Shape, seed: int = 0, rows_per_day: int | None = None) -> None:
        if rows_per_day is not None and rows_per_day < 1:
            raise ConfigError(f"rows_per_day is {rows_per_day}; a day needs at least 1 row.")
        self.shape = shape
        self.seed = seed
        self.rows_per_day = rows_per_day or shape.rows_per_day
        self._key = key_of(seed, shape.salt) if shape.salt else seed
        self._label_key = np.uint64(key_of(self._key, 0))
        self._missing = MissingGroups(
            keys=np.asarray([key_of(self._key, 5, group) for group in range(len(shape.missing))], dtype=np.uint64),
            below=np.asarray([int(share * 2**32) for share in shape.missing.values()], dtype=np.uint64),
        )
        self._ids = IdColumns(
            cardinality=np.asarray([column.cardinality for column in shape.ids], dtype=np.int64),
            clock=np.asarray([column.cardinality * column.clock for column in shape.ids], dtype=np.int64),
        )
        knots = [np.zeros(2, dtype=np.int64) if column.clock else inverse_cdf(column) for column in shape.ids]
        self._id_draw = _draw(self._key, 3, shape, shape.ids, knots)
        knots = [inverse_quantiles(column) for column in shape.integers]
        self._integer_draw = _draw(self._key, 4, shape, shape.integers, knots)
        self._signal = plant(shape, self._key)
        self._parts = np.ones(3)
        self._bias = 0.0
        self._calibrate()

    def rows(self, start: int, stop: int, threads: int = 1) -> ClickRows:
        """Rows start .. stop - 1; the number of threads changes only the speed."""
        if not 0 <= start <= stop:
            raise ConfigError(f"rows({start}, {stop}): a range needs 0 <= start <= stop.")
        out = self._empty(stop - start)
        if threads <= 1:
            self._fill(out, start, 0, stop - start)
            return out
        blocks = range(0, stop - start, BLOCK)

        def fill(low: int) -> None:
            self._fill(out, start, low, min(low + BLOCK, stop - start))

        run_all(fill, blocks, threads=threads)
        return out

    def bags(self, column: int, ids: NDArray[np.int32]) -> ClickBags:
        """The bags of a column with these first ids, which determine the others. A missing id gives an empty bag."""
        size = self.shape.ids[column].bag
        values = np.empty(len(ids) * size, dtype=np.int32)
        key = np.uint64(key_of(self._key, 6, column))
        end = bag_block(key, self._ids.cardinality[column], ids, size, values)
        offsets = np.zeros(len(ids) + 1, dtype=np.int32)
        np.cumsum(np.where(ids == MISSING_ID, 0, size), out=offsets[1:])
        return ClickBags(values[:end], offsets)

    def _fill(self, out: ClickRows, start: int, low: int, high: int) -> None:
        begin = low
        while begin < high:
            end = min(begin + BLOCK, high, self._end_of_day(start + begin) - start)
            parts = self._draw_block(out, start + begin, begin, end)
            logit = self._parts[0] * parts[0] + self._parts[1] * parts[1] + self._parts[2] * parts[2] + self._bias
            first = np.uint64(start + begin)
            click_block(self._label_key, first, logit, out.labels[begin:end], out.probability[begin:end])
            begin = end

    def _draw_block(self, out: ClickRows, row: int, low: int, high: int) -> NDArray[np.float64]:
        """Fill integers and ids low .. high - 1 with rows row, row + 1, ... of one day; the parts of their logit [3, R]."""
        parts = np.zeros((3, high - low))
        first = np.uint64(row)
        missing = np.empty((len(self._missing.keys), high - low), dtype=np.bool_)
        missing_block(self._missing, first, missing)
        integers, ids = out.integers[:, low:high], out.ids[:, low:high]
        integer_block(self._integer_draw, self._signal, missing, first, integers, parts[0])
        day = np.int64(self.rows_per_day)
        id_block(self._id_draw, self._ids, self._signal, missing, first, day, ids, parts)
        return parts

    def _end_of_day(self, row: int) -> int:
        return (row // self.rows_per_day + 1) * self.rows_per_day

    def _calibrate(self) -> None:
        """Scale the parts of the logit to the shape's spread, and choose the bias for its click rate."""
        count, blocks = 4096, 12  # from each of the first twelve days
        samples = []
        for day in range(blocks):
            scratch = self._empty(count)
            row = day * self.rows_per_day
            ends = [*range(self._end_of_day(row) - row, count, self.rows_per_day), count]
            cuts = zip([0, *ends[:-1]], ends)
            samples += [
                self._draw_block(scratch, row + low, low, min(high, count)) for low, high in cuts if low < count
            ]
        sample = np.concatenate(samples, axis=1)
        deviation = sample.std(axis=1)
        wanted = np.asarray(self.shape.spread)
        self._parts = np.round(np.divide(wanted, deviation, out=np.zeros(3), where=deviation > 0), 9)
        logit = self._parts @ sample
        low, high = -30.0, 30.0
        for _ in range(60):
            middle = (low + high) / 2
            rate = float(np.mean(1.0 / (1.0 + np.exp(-logit - middle))))
            low, high = (middle, high) if rate < self.shape.positive_rate else (low, middle)
        self._bias = round(low, 9)

    def _empty(self, count: int) -> ClickRows:
        return ClickRows(
            labels=np.empty(count, dtype=np.float32),
            integers=np.empty((len(self.shape.integers), count), dtype=np.int32),
            ids=np.empty((len(self.shape.ids), count), dtype=np.int32),
            probability=np.empty(count, dtype=np.float64),
        )


def _draw(
    key: int, kind: int, shape: Shape, columns: Sequence[IdColumn | IntegerColumn], knots: list[NDArray[np.int64]]
) -> Draw:
    groups = list(shape.missing)
    width = max((len(values) for values in knots), default=2) - 1
    base, step = np.zeros((len(columns), width), dtype=np.int64), np.zeros((len(columns), width), dtype=np.int64)
    for number, values in enumerate(knots):
        base[number, : len(values) - 1], step[number, : len(values) - 1] = values[:-1], np.diff(values)
    return Draw(
        keys=np.asarray([key_of(key, kind, number) for number in range(len(columns))], dtype=np.uint64),
        base=base,
        step=step,
        group=np.asarray(
            [groups.index(column.missing) if column.missing else -1 for column in columns], dtype=np.int64
        ),
    )
