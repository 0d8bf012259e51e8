"""The planted signal: what makes a generated click likely.

In: a shape and a seed. Out: flat tables the row kernel reads. The logit of a row is

    bias + sum over integers  slope * t + bend * (t * t - 1)                    t = standardised signed log of the value
         + sum over id columns  main0[id] * cos(angle * day) + main1[id] * sin(angle * day)
         + sum over pairs of interacting columns  <latent[id_a], latent[id_b]>

An id's effect shrinks with its rarity, p / (p + RARE), and ids far below RARE carry none: a signal that sits in ids seen
a handful of times would be noise to every model. Latents are centred by frequency, so the pairs hide nothing that a
first-order model could pick up.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hotbed.data.draws import key_of, words
from hotbed.data.synthetic.shape import (
    FRACTION_BITS,
    IdColumn,
    IntegerColumn,
    Shape,
    inverse_quantiles,
    probabilities,
)

LATENT = 4  # rank of the pairwise interactions
RARE = 1e-3  # an id of this probability carries half the effect of a frequent one
CUT = RARE / 10  # ids below this probability carry none
MAX_HEAD = 1 << 17
MAX_EFFECT = (1 << 16) - 1  # effects of integers up to this one are kept, 0.5 MB a column
ANGLE = 0.015  # radians by which main effects turn in a day


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


@numba.njit(nogil=True, cache=True, inline="always")
def integer_effect(value: np.int64, column: int, signal: Signal) -> np.float64:
    """What an integer adds to the logit."""
    log = np.log1p(float(abs(value)))
    t = ((log if value >= 0 else -log) - signal.center[column]) / signal.spread[column]
    t = min(max(t, -3.0), 3.0)
    effect: np.float64 = signal.slope[column] * t + signal.bend[column] * (t * t - 1.0)
    return effect


@numba.njit(nogil=True, cache=True)
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
