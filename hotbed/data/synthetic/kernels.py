"""What draws the rows of a click log: Numba loops over blocks of rows, one column at a time.

In: tables of a log (`Draw`, `Missing`, `Signal`) and the number of the first row. Out: ids, integers and the parts of the
logit, written into the caller's arrays. Loops are cut so that each vectorises: random words to ranks, ranks to ids, ids to
effects. One pass with branches took 1.1 microseconds a row of 39 columns, the loops take a third of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hotbed.data.draws import GOLDEN
from hotbed.data.hash import mix
from hotbed.data.synthetic.shape import FRACTION_BITS
from hotbed.data.synthetic.signal import ANGLE, LATENT, Signal, integer_effect

MISSING_ID = -1
MISSING_INTEGER = np.iinfo(np.int32).min
KNOT_SHIFT = 52  # the top 12 bits of a word choose the knot
TURN = 21  # an octave of ranks turns by 1 / TURN a day
OCTAVES = 32


class Missing(NamedTuple):
    """G groups of columns that are missing together; a word's top 32 bits below `below` mean missing."""

    keys: NDArray[np.uint64]  # [G]
    below: NDArray[np.uint64]  # [G]


class Draw(NamedTuple):
    """Where the random words of C columns start, and how they become values."""

    keys: NDArray[np.uint64]  # [C]
    base: NDArray[np.int64]  # [C, KNOTS]; value at a knot, fixed point
    step: NDArray[np.int64]  # [C, KNOTS]; from there to the next knot
    group: NDArray[np.int64]  # [C]; of Missing, -1 where never missing


class Ids(NamedTuple):
    """What is special about id columns."""

    cardinality: NDArray[np.int64]  # [C]
    clock: NDArray[np.int64]  # [C]; hours after which the hour begins again, 0 for columns that are drawn


@numba.njit(nogil=True, cache=True)
def missing_block(missing: Missing, first: np.uint64, out: NDArray[np.bool_]) -> None:
    """out[g, r]: whether the columns of group g are missing in row first + r."""
    for group in range(out.shape[0]):
        key, below = missing.keys[group], missing.below[group]
        for row in range(out.shape[1]):
            word = mix(key + (first + np.uint64(row)) * np.uint64(GOLDEN))
            out[group, row] = word >> np.uint64(32) < below


@numba.njit(nogil=True, cache=True)
def _values(
    key: np.uint64, base: NDArray[np.int64], step: NDArray[np.int64], first: np.uint64, out: NDArray[np.int64]
) -> None:
    """The fixed-point value at the place of each row's word between 0 and 2 ** 64: knots, then a straight line."""
    for row in range(len(out)):
        word = mix(key + (first + np.uint64(row)) * np.uint64(GOLDEN))
        knot = np.int64(word >> np.uint64(KNOT_SHIFT))
        fraction = np.int64((word >> np.uint64(KNOT_SHIFT - 20)) & np.uint64(0xFFFFF))
        out[row] = base[knot] + ((step[knot] * fraction) >> 20)


@numba.njit(nogil=True, cache=True)
def integer_block(
    draw: Draw,
    signal: Signal,
    missing: NDArray[np.bool_],
    first: np.uint64,
    out: NDArray[np.int32],
    logit: NDArray[np.float64],
) -> None:
    """Integers of rows first, first + 1, ..., and what they add to the logit."""
    num_rows = out.shape[1]
    half = np.int64(1) << (FRACTION_BITS - 1)
    values = np.empty(num_rows, dtype=np.int64)
    for column in range(out.shape[0]):
        _values(draw.keys[column], draw.base[column], draw.step[column], first, values)
        start, low, high = signal.effect_start[column], signal.effect_low[column], signal.effect_high[column]
        group = draw.group[column]
        for row in range(num_rows):
            value = (values[row] + half) >> FRACTION_BITS
            absent = group >= 0 and missing[group, row]
            out[column, row] = MISSING_INTEGER if absent else value
            values[row] = np.int64(0) if absent else value
        for row in range(num_rows):
            if values[row] <= high:
                logit[row] += signal.effect[start + values[row] - low]
            else:
                logit[row] += integer_effect(values[row], column, signal)


@numba.njit(nogil=True, cache=True)
def id_block(
    draw: Draw,
    ids: Ids,
    signal: Signal,
    missing: NDArray[np.bool_],
    first: np.uint64,
    rows_per_day: np.int64,
    out: NDArray[np.int32],
    parts: NDArray[np.float64],
) -> None:
    """Ids of rows first, first + 1, ... of one day, what they add to the logit alone (parts[1]) and in pairs (parts[2])."""
    num_columns, num_rows = out.shape
    day = np.int64(first) // rows_per_day
    cos, sin = np.cos(ANGLE * day), np.sin(ANGLE * day)
    total = np.zeros((LATENT, num_rows))
    squares = np.zeros(num_rows)
    chosen = np.empty(num_rows, dtype=np.int64)
    scratch = np.empty(num_rows)
    for column in range(num_columns):
        if ids.clock[column] > 0:
            for row in range(num_rows):
                out[column, row] = (np.int64(first) + row) * 24 // rows_per_day % ids.clock[column]
            continue
        _values(draw.keys[column], draw.base[column], draw.step[column], first, chosen)
        _turn(chosen, scratch, day, ids.cardinality[column])
        start, head, group = signal.head_start[column], signal.head_rows[column], draw.group[column]
        for row in range(num_rows):
            value = chosen[row]
            absent = group >= 0 and missing[group, row]
            out[column, row] = MISSING_ID if absent else value
            chosen[row] = start + (head if absent else (value if value < head else head + 1))
        for row in range(num_rows):
            line = chosen[row]
            parts[1, row] += signal.main[line, 0] * cos + signal.main[line, 1] * sin
        if signal.interacts[column]:
            for row in range(num_rows):
                line = chosen[row]
                for k in range(LATENT):
                    value = np.float64(signal.latent[line, k])
                    total[k, row] += value
                    squares[row] += value * value
    for row in range(num_rows):
        norm = 0.0
        for k in range(LATENT):
            norm += total[k, row] * total[k, row]
        parts[2, row] = 0.5 * (norm - squares[row])


@numba.njit(nogil=True, cache=True)
def _turn(values: NDArray[np.int64], scratch: NDArray[np.float64], day: np.int64, cardinality: np.int64) -> None:
    """Fixed-point ranks to ids.

    Popularity drifts: the ids of one octave of ranks (2^k .. 2^(k+1) - 1) take turns, a step a day.
    """
    low = np.empty(OCTAVES, dtype=np.int64)
    size = np.empty(OCTAVES, dtype=np.int64)
    shift = np.zeros(OCTAVES, dtype=np.int64)
    for k in range(OCTAVES):
        low[k] = np.int64(1) << k
        size[k] = min(low[k], cardinality - low[k]) if k >= 2 and low[k] < cardinality else np.int64(1) << 40
        if size[k] < np.int64(1) << 40:
            shift[k] = day * size[k] // TURN % size[k]
    for row in range(len(values)):
        rank = min(values[row] >> FRACTION_BITS, cardinality - 1)
        values[row] = rank
        scratch[row] = np.float64(max(rank, 1))
    exponents = scratch.view(np.int64)  # a float's exponent is the octave of its integer
    for row in range(len(values)):
        k = (exponents[row] >> 52) - 1023
        place = values[row] - low[k] + shift[k]
        values[row] = low[k] + (place - size[k] if place >= size[k] else place)


@numba.njit(nogil=True, cache=True)
def click_block(
    key: np.uint64,
    first: np.uint64,
    logit: NDArray[np.float64],
    labels: NDArray[np.float32],
    probability: NDArray[np.float64],
) -> None:
    """Labels of rows first, first + 1, ... and the chance that each had."""
    for row in range(logit.shape[0]):
        word = mix(key + (first + np.uint64(row)) * np.uint64(GOLDEN))
        chance = 1.0 / (1.0 + np.exp(-logit[row]))
        probability[row] = chance
        labels[row] = 1.0 if float(word >> np.uint64(11)) * 2.0**-53 < chance else 0.0


@numba.njit(nogil=True, cache=True)
def bag_block(key: np.uint64, cardinality: np.int64, ids: NDArray[np.int32], size: int, out: NDArray[np.int32]) -> int:
    """The bags of these first ids, one after the other, and how many values they have; a missing id has an empty bag."""
    at = 0
    for row in range(len(ids)):
        if ids[row] == MISSING_ID:
            continue
        out[at] = ids[row]
        for place in range(1, size):
            counter = np.uint64(ids[row]) * np.uint64(size) + np.uint64(place)
            word = mix(key + counter * np.uint64(GOLDEN))
            out[at + place] = ((word >> np.uint64(32)) * np.uint64(cardinality)) >> np.uint64(32)
        at += size
    return at
