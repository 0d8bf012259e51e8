"""Generates the rows of a click log: Numba loops over blocks of rows, one column at a time.

In: tables of a log (`Draw`, `MissingGroups`, `Signal`) and the number of the first row. Out: ids, integers and the parts of the
logit, written into the caller's arrays. Separate loops vectorise: random words to ranks, ranks to ids, ids to effects.
They take a third of the 1.1 microseconds that one pass with branches took for a row of 39 columns.

`Signal`: the planted signal, which determines the click probability. In: a shape and a seed. Out: flat tables for the row
kernels. The logit of a row is

    bias + sum over integers  slope * t + bend * (t * t - 1)                    t = standardised signed log of the value
         + sum over id columns  main0[id] * cos(angle * day) + main1[id] * sin(angle * day)
         + sum over pairs of interacting columns  <latent[id_a], latent[id_b]>

The effect of an id shrinks with its rarity, p / (p + RARE), and ids far below RARE have none: a signal in ids that occur a
handful of times would be noise to every model. Latents are centred by frequency, so the pairs contain nothing that a
first-order model could learn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.draws import key_of, words
from hotbed.data.synthetic.shapes import (
    FRACTION_BITS,
    IdColumn,
    IntegerColumn,
    Shape,
    inverse_quantiles,
    probabilities,
)
from hotbed.host.jit import njit
from hotbed.host.splitmix import GOLDEN, mix

LATENT = 4  # rank of the pairwise interactions
RARE = 1e-3  # an id of this probability carries half the effect of a frequent one
CUT = RARE / 10  # ids below this probability carry none
MAX_HEAD = 1 << 17
MAX_EFFECT = (1 << 16) - 1  # effects of integers up to this one are kept, 0.5 MB a column
ANGLE = 0.015  # radians by which main effects rotate in a day
MISSING_ID = -1
MISSING_INTEGER = np.iinfo(np.int32).min
KNOT_SHIFT = 52  # the top 12 bits of a word choose the knot
TURN = 21  # an octave of ranks rotates by 1 / TURN a day
OCTAVES = 32


class MissingGroups(NamedTuple):
    """G groups of columns that are missing together; a word's top 32 bits below `below` mean missing."""

    keys: NDArray[np.uint64]  # [G]
    below: NDArray[np.uint64]  # [G]


class Draw(NamedTuple):
    """The keys of the random words of C columns, and how words become values."""

    keys: NDArray[np.uint64]  # [C]
    base: NDArray[np.int64]  # [C, KNOTS]; value at a knot, fixed point
    step: NDArray[np.int64]  # [C, KNOTS]; from there to the next knot
    group: NDArray[np.int64]  # [C]; of Missing, -1 where never missing


class IdColumns(NamedTuple):
    """Properties of id columns."""

    cardinality: NDArray[np.int64]  # [C]
    clock: NDArray[np.int64]  # [C]; period of the hour, 0 for columns that are random


@njit(nogil=True, cache=True)
def missing_block(missing: MissingGroups, first: np.uint64, out: NDArray[np.bool_]) -> None:
    """out[g, r]: whether the columns of group g are missing in row first + r."""
    for group in range(out.shape[0]):
        key, below = missing.keys[group], missing.below[group]
        for row in range(out.shape[1]):
            word = mix(key + (first + np.uint64(row)) * GOLDEN)
            out[group, row] = word >> np.uint64(32) < below


@njit(nogil=True, cache=True)
def _values(
    key: np.uint64, base: NDArray[np.int64], step: NDArray[np.int64], first: np.uint64, out: NDArray[np.int64]
) -> None:
    """The fixed-point value at the place of each row's word between 0 and 2 ** 64: knots, then a straight line."""
    for row in range(len(out)):
        word = mix(key + (first + np.uint64(row)) * GOLDEN)
        knot = np.int64(word >> np.uint64(KNOT_SHIFT))
        fraction = np.int64((word >> np.uint64(KNOT_SHIFT - 20)) & np.uint64(0xFFFFF))
        out[row] = base[knot] + ((step[knot] * fraction) >> 20)


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def id_block(
    draw: Draw,
    ids: IdColumns,
    signal: Signal,
    missing: NDArray[np.bool_],
    first: np.uint64,
    rows_per_day: np.int64,
    out: NDArray[np.int32],
    parts: NDArray[np.float64],
) -> None:
    """Ids of rows first, first + 1, ... of one day, and what they add to the logit alone (parts[1]) and in pairs (parts[2])."""
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


@njit(nogil=True, cache=True)
def _turn(values: NDArray[np.int64], scratch: NDArray[np.float64], day: np.int64, cardinality: np.int64) -> None:
    """Fixed-point ranks to ids.

    Popularity drifts: the ids of one octave of ranks (2^k .. 2^(k+1) - 1) rotate, one step a day.
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


@njit(nogil=True, cache=True)
def click_block(
    key: np.uint64,
    first: np.uint64,
    logit: NDArray[np.float64],
    labels: NDArray[np.float32],
    probability: NDArray[np.float64],
) -> None:
    """Labels of rows first, first + 1, ... and their click probabilities."""
    for row in range(logit.shape[0]):
        word = mix(key + (first + np.uint64(row)) * GOLDEN)
        chance = 1.0 / (1.0 + np.exp(-logit[row]))
        probability[row] = chance
        labels[row] = 1.0 if float(word >> np.uint64(11)) * 2.0**-53 < chance else 0.0


@njit(nogil=True, cache=True)
def bag_block(key: np.uint64, cardinality: np.int64, ids: NDArray[np.int32], size: int, out: NDArray[np.int32]) -> int:
    """Write the bags of these first ids; returns the number of values. A missing id has an empty bag."""
    at = 0
    for row in range(len(ids)):
        if ids[row] == MISSING_ID:
            continue
        out[at] = ids[row]
        for place in range(1, size):
            counter = np.uint64(ids[row]) * np.uint64(size) + np.uint64(place)
            word = mix(key + counter * GOLDEN)
            out[at + place] = ((word >> np.uint64(32)) * np.uint64(cardinality)) >> np.uint64(32)
        at += size
    return at


class Signal(NamedTuple):
    """Effect tables. Column c owns head_rows[c] + 2 lines from head_start[c] on; the last two are "missing" and "none"."""

    head_start: NDArray[np.int64]  # [C]
    head_rows: NDArray[np.int64]  # [C]
    main: NDArray[np.float32]  # [H, 2]
    latent: NDArray[np.float32]  # [H, LATENT], zero for columns that do not interact
    interacts: NDArray[np.bool_]  # [C]
    center: NDArray[np.float64]  # [N] of the integers' signed log
    spread: NDArray[np.float64]  # [N]
    slope: NDArray[np.float64]  # [N]
    bend: NDArray[np.float64]  # [N]
    effect_start: NDArray[np.int64]  # [N]; value v of column n has effect[effect_start[n] + v - effect_low[n]]
    effect_low: NDArray[np.int64]  # [N]
    effect_high: NDArray[np.int64]  # [N]; the largest value in the table
    effect: NDArray[np.float64]


def plant(shape: Shape, seed: int) -> Signal:
    """The signal of a seed, not yet scaled: the generator measures and scales its three parts."""
    mains, latents, heads = [], [], []
    nothing = np.zeros((1, 2 + LATENT))
    for number, column in enumerate(shape.ids):
        weight = _weights(shape, column)
        shrink = (weight / (weight + RARE))[:, None]
        draws = _normals(key_of(seed, 1, number), len(weight) * (2 + LATENT)).reshape(len(weight), 2 + LATENT) * shrink
        if weight.sum() > 0:
            draws -= (weight @ draws) / weight.sum() * shrink
        draws = np.concatenate([draws, nothing])
        mains.append(draws[:, :2])
        latents.append(draws[:, 2:] * (column.name in shape.interacting))
        heads.append(len(weight) - 1)
    rows = np.asarray(heads, dtype=np.int64)
    bends = _normals(key_of(seed, 2), 2 * len(shape.integers)).reshape(2, -1)
    moments = np.asarray([_moments(shape, column) for column in shape.integers]).reshape(-1, 2)
    low = np.asarray([min(column.quantiles[0], 0) for column in shape.integers], dtype=np.int64)
    high = np.asarray([min(column.quantiles[-1], MAX_EFFECT) for column in shape.integers], dtype=np.int64)
    signal = Signal(
        head_start=np.concatenate([[0], np.cumsum(rows + 2)[:-1]]),
        head_rows=rows,
        main=np.concatenate(mains).astype(np.float32),
        latent=np.concatenate(latents).astype(np.float32),
        interacts=np.asarray([column.name in shape.interacting for column in shape.ids]),
        center=moments[:, 0],
        spread=moments[:, 1],
        slope=bends[0],
        bend=0.25 * bends[1],
        effect_start=np.cumsum(high - low + 1) - (high - low + 1),
        effect_low=low,
        effect_high=high,
        effect=np.zeros(int(np.sum(high - low + 1))),
    )
    _fill_effects(signal)
    return signal


@njit(nogil=True, cache=True, inline="always")
def integer_effect(value: np.int64, column: int, signal: Signal) -> np.float64:
    """What an integer adds to the logit."""
    log = np.log1p(float(abs(value)))
    t = ((log if value >= 0 else -log) - signal.center[column]) / signal.spread[column]
    t = min(max(t, -3.0), 3.0)
    effect: np.float64 = signal.slope[column] * t + signal.bend[column] * (t * t - 1.0)
    return effect


@njit(nogil=True, cache=True)
def _fill_effects(signal: Signal) -> None:
    for column in range(len(signal.effect_low)):
        low, start = signal.effect_low[column], signal.effect_start[column]
        for place in range(signal.effect_high[column] - low + 1):
            signal.effect[start + place] = integer_effect(low + place, column, signal)


def _weights(shape: Shape, column: IdColumn) -> NDArray[np.float64]:
    """Probabilities of the ids that carry an effect, then that of "missing"."""
    share = shape.share_missing(column)
    if column.clock:
        return np.asarray([share])
    head = probabilities(column, min(column.cardinality, MAX_HEAD)) * (1.0 - share)
    return np.append(head[head > CUT], share)


def _moments(shape: Shape, column: IntegerColumn) -> tuple[float, float]:
    """Mean and standard deviation of one integer's signed log, where missing counts as 0."""
    value = inverse_quantiles(column) / 2.0**FRACTION_BITS
    logs = np.sign(value) * np.log1p(np.abs(value))
    present = 1.0 - shape.share_missing(column)
    mean = present * logs.mean()
    return float(mean), float(np.sqrt(present * np.mean(logs**2) - mean**2))


def _normals(key: int, count: int) -> NDArray[np.float64]:
    """Numbers near a standard normal: the sum of four uniform 16-bit words, exact on every machine before the division."""
    draws = words(key, count).view(np.uint16).reshape(count, 4)
    return np.asarray((draws.sum(axis=1, dtype=np.int64) - 2 * 65535) / (65536 * np.sqrt(1 / 3)))
