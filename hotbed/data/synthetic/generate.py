"""Rows of a Criteo-like click log as a pure function of (seed, row number).

In: a seed and a range of rows. Out: labels, 13 integers, 26 ids and the true click probability of each row. Every value
comes from its own counter-based random word, so any range can be drawn alone, in any order, by any number of threads.
Ids and integers are the same on every machine (integer arithmetic only); probabilities agree to rounding.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hotbed.data.draws import GOLDEN, key_of
from hotbed.data.hash import mix
from hotbed.data.synthetic.shape import (
    FRACTION_BITS,
    ID_COLUMNS,
    INTEGER_COLUMNS,
    MISSING_SHARE,
    POSITIVE_RATE,
    inverse_cdf,
    inverse_quantiles,
)
from hotbed.data.synthetic.signal import ANGLE, LATENT, Signal, plant
from hotbed.errors import ConfigError

GENERATION = 2  # raise it when the rows of a seed change, so that no cache mixes old rows with new code
ROWS_PER_DAY = 200_000
MISSING_ID = -1
MISSING_INTEGER = np.iinfo(np.int32).min
BLOCK = 8192  # rows a thread generates at once: 39 columns of them fit the second-level cache
KNOT_SHIFT = 52  # the top 12 bits of a word choose the knot
TURN = 21  # an octave of ranks turns by 1 / TURN a day
SPREAD = {"integers": 0.72, "main": 1.15, "pairs": 0.40}  # standard deviations of the three parts of the logit


class ClickRows(NamedTuple):
    """R rows, one line per column."""

    labels: NDArray[np.float32]  # [R]
    integers: NDArray[np.int32]  # [13, R], MISSING_INTEGER where missing
    ids: NDArray[np.int32]  # [26, R], 0 is the most frequent id, MISSING_ID where missing
    probability: NDArray[np.float64]  # [R]


class _Draw(NamedTuple):
    """Where the random words of a column start, how they become values, and when its values are missing."""

    keys: NDArray[np.uint64]  # [C]
    tables: NDArray[np.int64]  # [C, KNOTS + 1]
    missing_keys: NDArray[np.uint64]  # [C]
    missing_below: NDArray[np.uint64]  # [C]; a word's top 32 bits below this mean missing


class CriteoLike:
    """The click log of one seed, without end: `rows(a, b)` draws any part of it."""

    def __init__(self, seed: int = 0, rows_per_day: int = ROWS_PER_DAY) -> None:
        if rows_per_day < 1:
            raise ConfigError(f"rows_per_day is {rows_per_day}; a day needs at least 1 row.")
        self.seed = seed
        self.rows_per_day = rows_per_day
        self._label_key = np.uint64(key_of(seed, 0))
        tables = np.stack([inverse_cdf(column) for column in ID_COLUMNS])
        self._cardinality = np.asarray([column.cardinality for column in ID_COLUMNS], dtype=np.int64)
        self._ids = _draw(seed, 3, tables, [column.missing for column in ID_COLUMNS])
        tables = np.stack([inverse_quantiles(column) for column in INTEGER_COLUMNS])
        self._integers = _draw(seed, 4, tables, [column.missing for column in INTEGER_COLUMNS])
        self._signal = plant(seed)
        self._parts = np.ones(3)
        self._bias = 0.0
        self._calibrate()

    def rows(self, start: int, stop: int, threads: int = 1) -> ClickRows:
        """Rows start .. stop - 1; more threads draw the same rows sooner."""
        if not 0 <= start <= stop:
            raise ConfigError(f"rows({start}, {stop}): a range needs 0 <= start <= stop.")
        out = _empty(stop - start)
        if threads <= 1:
            self._fill(out, start, 0, stop - start)
            return out
        blocks = range(0, stop - start, BLOCK)
        with ThreadPoolExecutor(threads) as pool:
            jobs = [pool.submit(self._fill, out, start, low, min(low + BLOCK, stop - start)) for low in blocks]
            for job in jobs:
                job.result()
        return out

    def _fill(self, out: ClickRows, start: int, low: int, high: int) -> None:
        for begin in range(low, high, BLOCK):
            end = min(begin + BLOCK, high)
            logit = self._logit(out, start, begin, end)
            _click(self._label_key, np.uint64(start + begin), logit, out.labels[begin:end], out.probability[begin:end])

    def _logit(self, out: ClickRows, start: int, low: int, high: int) -> NDArray[np.float64]:
        parts = np.zeros((3, high - low))
        first = np.uint64(start + low)
        _integer_block(self._integers, self._signal, first, out.integers[:, low:high], parts[0])
        _id_block(
            self._ids, self._signal, self._cardinality, np.int64(self.rows_per_day), first, out.ids[:, low:high], parts
        )
        return np.asarray(
            self._parts[0] * parts[0] + self._parts[1] * parts[1] + self._parts[2] * parts[2] + self._bias
        )

    def _calibrate(self) -> None:
        """Scale the parts of the logit to SPREAD and place the bias so that POSITIVE_RATE of the rows are clicks."""
        count, blocks = 4096, 12  # from each of the first twelve days
        samples = []
        for day in range(blocks):
            parts = np.zeros((3, count))
            first = np.uint64(day * self.rows_per_day)
            scratch = _empty(count)
            _integer_block(self._integers, self._signal, first, scratch.integers, parts[0])
            _id_block(
                self._ids, self._signal, self._cardinality, np.int64(self.rows_per_day), first, scratch.ids, parts
            )
            samples.append(parts)
        sample = np.concatenate(samples, axis=1)
        self._parts = np.round(np.asarray(list(SPREAD.values())) / sample.std(axis=1), 9)
        logit = self._parts @ sample
        low, high = -30.0, 30.0
        for _ in range(60):
            middle = (low + high) / 2
            rate = float(np.mean(1.0 / (1.0 + np.exp(-logit - middle))))
            low, high = (middle, high) if rate < POSITIVE_RATE else (low, middle)
        self._bias = round(low, 9)


def _empty(count: int) -> ClickRows:
    return ClickRows(
        labels=np.empty(count, dtype=np.float32),
        integers=np.empty((len(INTEGER_COLUMNS), count), dtype=np.int32),
        ids=np.empty((len(ID_COLUMNS), count), dtype=np.int32),
        probability=np.empty(count, dtype=np.float64),
    )


def _draw(seed: int, kind: int, tables: NDArray[np.int64], groups: list[str]) -> _Draw:
    names = list(MISSING_SHARE)
    return _Draw(
        keys=np.asarray([key_of(seed, kind, number) for number in range(len(groups))], dtype=np.uint64),
        tables=tables,
        missing_keys=np.asarray(
            [key_of(seed, 5, names.index(group)) if group else 0 for group in groups], dtype=np.uint64
        ),
        missing_below=np.asarray([int(MISSING_SHARE.get(group, 0.0) * 2**32) for group in groups], dtype=np.uint64),
    )


@numba.njit(nogil=True, inline="always")
def _interpolate(table: NDArray[np.int64], word: np.uint64) -> np.int64:
    """The fixed-point value at the place of the word between 0 and 2 ** 64: knots, then a straight line."""
    knot = np.int64(word >> np.uint64(KNOT_SHIFT))
    fraction = np.int64((word >> np.uint64(KNOT_SHIFT - 20)) & np.uint64(0xFFFFF))
    value: np.int64 = table[knot] + (((table[knot + 1] - table[knot]) * fraction) >> 20)
    return value


@numba.njit(nogil=True, inline="always")
def _turn(rank: np.int64, day: np.int64, cardinality: np.int64) -> np.int64:
    """Popularity drift: the ids of one octave of ranks (2^k .. 2^(k+1) - 1) take turns, a step each day."""
    octave = np.int64(1)
    while octave * 2 <= rank:
        octave *= 2
    if octave < 4:
        return rank
    size = min(octave, cardinality - octave)
    return octave + (rank - octave + day * size // TURN) % size


@numba.njit(nogil=True, cache=True)
def _integer_block(
    draw: _Draw, signal: Signal, first: np.uint64, out: NDArray[np.int32], logit: NDArray[np.float64]
) -> None:
    half = np.int64(1) << (FRACTION_BITS - 1)
    for column in range(out.shape[0]):
        table = draw.tables[column]
        for row in range(out.shape[1]):
            counter = (first + np.uint64(row)) * np.uint64(GOLDEN)
            value = np.int64(0)
            if mix(draw.missing_keys[column] + counter) >> np.uint64(32) < draw.missing_below[column]:
                out[column, row] = MISSING_INTEGER
            else:
                value = (_interpolate(table, mix(draw.keys[column] + counter)) + half) >> FRACTION_BITS
                out[column, row] = value
            log = np.log1p(float(abs(value)))
            t = ((log if value >= 0 else -log) - signal.center[column]) / signal.spread[column]
            t = min(max(t, -3.0), 3.0)
            logit[row] += signal.slope[column] * t + signal.bend[column] * (t * t - 1.0)


@numba.njit(nogil=True, cache=True)
def _id_block(
    draw: _Draw,
    signal: Signal,
    cardinality: NDArray[np.int64],
    rows_per_day: np.int64,
    first: np.uint64,
    out: NDArray[np.int32],
    parts: NDArray[np.float64],
) -> None:
    num_rows = out.shape[1]
    total = np.zeros((num_rows, LATENT))
    squares = np.zeros(num_rows)
    for column in range(out.shape[0]):
        table = draw.tables[column]
        start = signal.head_start[column]
        head = signal.head_rows[column]
        for row in range(num_rows):
            number = first + np.uint64(row)
            counter = number * np.uint64(GOLDEN)
            day = np.int64(number) // rows_per_day
            if mix(draw.missing_keys[column] + counter) >> np.uint64(32) < draw.missing_below[column]:
                out[column, row] = MISSING_ID
                line = start + head
            else:
                rank = _interpolate(table, mix(draw.keys[column] + counter)) >> FRACTION_BITS
                chosen = _turn(min(rank, cardinality[column] - 1), day, cardinality[column])
                out[column, row] = chosen
                if chosen >= head:
                    continue
                line = start + chosen
            angle = ANGLE * day
            parts[1, row] += signal.main[line, 0] * np.cos(angle) + signal.main[line, 1] * np.sin(angle)
            if signal.interacts[column]:
                for k in range(LATENT):
                    value = np.float64(signal.latent[line, k])
                    total[row, k] += value
                    squares[row] += value * value
    for row in range(num_rows):
        norm = 0.0
        for k in range(LATENT):
            norm += total[row, k] * total[row, k]
        parts[2, row] = 0.5 * (norm - squares[row])


@numba.njit(nogil=True, cache=True)
def _click(
    key: np.uint64,
    first: np.uint64,
    logit: NDArray[np.float64],
    labels: NDArray[np.float32],
    probability: NDArray[np.float64],
) -> None:
    for row in range(logit.shape[0]):
        word = mix(key + (first + np.uint64(row)) * np.uint64(GOLDEN))
        chance = 1.0 / (1.0 + np.exp(-logit[row]))
        probability[row] = chance
        labels[row] = 1.0 if float(word >> np.uint64(11)) * 2.0**-53 < chance else 0.0
