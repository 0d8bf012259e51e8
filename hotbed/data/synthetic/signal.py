"""The planted signal: what makes a generated click likely.

In: a seed. Out: flat tables the row kernel reads. The logit of a row is

    bias + sum over integers  slope * t + bend * (t * t - 1)                    t = standardised signed log of the value
         + sum over id columns  main0[id] * cos(angle * day) + main1[id] * sin(angle * day)
         + sum over pairs of interacting columns  <latent[id_a], latent[id_b]>

An id's effect shrinks with its rarity, p / (p + RARE), and ids far below RARE carry none: a signal that sits in ids seen
a handful of times would be noise to every model. Latents are centred by frequency, so the pairs hide nothing that a
first-order model could pick up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.draws import key_of, words
from hotbed.data.synthetic.shape import (
    FRACTION_BITS,
    ID_COLUMNS,
    INTEGER_COLUMNS,
    INTERACTING,
    MISSING_SHARE,
    IdColumn,
    inverse_quantiles,
    probabilities,
)

LATENT = 4  # rank of the pairwise interactions
RARE = 1e-3  # an id of this probability carries half the effect of a frequent one
CUT = RARE / 10  # ids below this probability carry none
MAX_HEAD = 1 << 17
ANGLE = 0.015  # radians by which main effects turn in a day


class Signal(NamedTuple):
    """Effect tables. Column c owns head_rows[c] + 1 lines from head_start[c] on; the last one is "missing"."""

    head_start: NDArray[np.int64]  # [26]
    head_rows: NDArray[np.int64]  # [26]
    main: NDArray[np.float32]  # [H, 2]
    latent: NDArray[np.float32]  # [H, LATENT], zero for columns that do not interact
    interacts: NDArray[np.bool_]  # [26]
    center: NDArray[np.float64]  # [13] of the integers' signed log
    spread: NDArray[np.float64]  # [13]
    slope: NDArray[np.float64]  # [13]
    bend: NDArray[np.float64]  # [13]


def plant(seed: int) -> Signal:
    """The signal of a seed, not yet scaled: the generator measures and scales its three parts."""
    mains, latents, heads = [], [], []
    for number, column in enumerate(ID_COLUMNS):
        weight = _weights(column)
        shrink = (weight / (weight + RARE))[:, None]
        draws = _normals(key_of(seed, 1, number), len(weight) * (2 + LATENT)).reshape(len(weight), 2 + LATENT) * shrink
        draws -= (weight @ draws) / weight.sum() * shrink
        mains.append(draws[:, :2])
        latents.append(draws[:, 2:] * (column.name in INTERACTING))
        heads.append(len(weight) - 1)
    rows = np.asarray(heads, dtype=np.int64)
    moments = np.asarray([_moments(number) for number in range(len(INTEGER_COLUMNS))])
    bends = _normals(key_of(seed, 2), 2 * len(INTEGER_COLUMNS)).reshape(2, -1)
    return Signal(
        head_start=np.concatenate([[0], np.cumsum(rows + 1)[:-1]]),
        head_rows=rows,
        main=np.concatenate(mains).astype(np.float32),
        latent=np.concatenate(latents).astype(np.float32),
        interacts=np.asarray([column.name in INTERACTING for column in ID_COLUMNS]),
        center=moments[:, 0],
        spread=moments[:, 1],
        slope=bends[0],
        bend=0.25 * bends[1],
    )


def _weights(column: IdColumn) -> NDArray[np.float64]:
    """Probabilities of the ids that carry an effect, then that of "missing"."""
    share = MISSING_SHARE.get(column.missing, 0.0)
    head = probabilities(column, min(column.cardinality, MAX_HEAD)) * (1.0 - share)
    return np.append(head[head > CUT], share)


def _moments(number: int) -> tuple[float, float]:
    """Mean and standard deviation of one integer's signed log, where missing counts as 0."""
    column = INTEGER_COLUMNS[number]
    value = inverse_quantiles(column) / 2.0**FRACTION_BITS
    logs = np.sign(value) * np.log1p(np.abs(value))
    present = 1.0 - MISSING_SHARE.get(column.missing, 0.0)
    mean = present * logs.mean()
    return float(mean), float(np.sqrt(present * np.mean(logs**2) - mean**2))


def _normals(key: int, count: int) -> NDArray[np.float64]:
    """Numbers near a standard normal: the sum of four uniform 16-bit words, exact on every machine before the division."""
    draws = words(key, count).view(np.uint16).reshape(count, 4)
    return np.asarray((draws.sum(axis=1, dtype=np.int64) - 2 * 65535) / (65536 * np.sqrt(1 / 3)))
