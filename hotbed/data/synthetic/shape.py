"""What describes a click log to be made up, and the inverse distributions its values are drawn from.

In: columns of ids (power laws) and of integers (quantiles). Out: tables of fixed-point values at equally probable knots. The
tables take 32 KB a column, whatever its cardinality.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KNOTS = 4096  # equal-probability knots of every inverse distribution
FRACTION_BITS = 16  # fixed-point bits below a rank
HEAD = 4096  # ranks summed exactly; further ones by the integral of the power law
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


class IdColumn(NamedTuple):
    """Id r of `cardinality` has probability proportional to (r + 1 + shift) ** -exponent."""

    name: str
    cardinality: int
    exponent: float
    shift: float
    missing: str = ""  # the missing group it belongs to
    top: float = 0.0  # the share of id 0; the power law then rules the others
    bag: int = 1  # ids of a row
    clock: bool = False  # not drawn: the hour of the log, which begins again after `cardinality` hours


class IntegerColumn(NamedTuple):
    """An integer column by its quantiles at QUANTILES."""

    name: str
    quantiles: tuple[int, ...]
    missing: str = ""


class Shape(NamedTuple):
    """A kind of click log."""

    name: str
    summary: str
    ids: tuple[IdColumn, ...]
    integers: tuple[IntegerColumn, ...]
    missing: dict[str, float]  # group -> share; columns of a group are missing together
    interacting: tuple[str, ...]  # id columns whose pairs carry signal
    positive_rate: float
    rows_per_day: int  # unless the user says how many days the rows span
    days: int  # of the published log
    spread: tuple[float, float, float]  # standard deviations of the logit's parts: integers, ids alone, pairs
    text: str  # the raw format of its text: criteo, avazu, or none
    generation: int  # raise it when the rows of a seed change, so that no cache mixes old rows with new code
    salt: int  # tells the random words of shapes apart
    label: str = "label"

    def share_missing(self, column: IdColumn | IntegerColumn) -> float:
        """How often the column has no value."""
        return self.missing.get(column.missing, 0.0)


def probabilities(column: IdColumn, count: int) -> NDArray[np.float64]:
    """Probability of the `count` most frequent ids of a column."""
    if column.top:
        rest = (1.0 - column.top) * _law(column, count - 1)
        return np.append([column.top], rest)[:count]
    return _law(column, count)


def inverse_cdf(column: IdColumn) -> NDArray[np.int64]:
    """The ranks (0 is the most frequent id) at KNOTS + 1 equally probable points, with FRACTION_BITS below the point."""
    levels = np.arange(KNOTS + 1) / KNOTS
    if column.top:
        inner = np.maximum((levels - column.top) / (1.0 - column.top), 0.0)
        ranks = np.where(levels < column.top, levels / column.top, 1.0 + _law_ranks(column, inner))
    else:
        ranks = _law_ranks(column, levels)
    ranks[-1] = column.cardinality
    return np.asarray(np.round(ranks * 2**FRACTION_BITS), dtype=np.int64)


def inverse_quantiles(column: IntegerColumn) -> NDArray[np.int64]:
    """The column's values at KNOTS + 1 equally probable points, with FRACTION_BITS below the point."""
    knots = np.asarray(column.quantiles, dtype=np.float64)
    curve = np.interp(np.arange(KNOTS + 1) / KNOTS, QUANTILES, np.sign(knots) * np.log1p(np.abs(knots)))
    values = np.sign(curve) * np.expm1(np.abs(curve))
    return np.asarray(np.round(values * 2**FRACTION_BITS), dtype=np.int64)


def _law(column: IdColumn, count: int) -> NDArray[np.float64]:
    ranks = np.arange(1, count + 1, dtype=np.float64)
    return np.asarray((ranks + column.shift) ** -column.exponent / _mass(column))


def _law_ranks(column: IdColumn, levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where the power law's sum passes the levels."""
    size = _law_size(column)
    head = min(HEAD, size)
    cumulative = np.concatenate([[0.0], np.cumsum(_law(column, head))])
    ranks = np.interp(levels, cumulative, np.arange(head + 1, dtype=np.float64))
    beyond = (levels > cumulative[-1]) & (size > HEAD)
    a, origin = 1.0 - column.exponent, HEAD + 0.5 + column.shift
    tail = (levels[beyond] - cumulative[-1]) * _mass(column)
    ranks[beyond] = (origin**a + a * tail) ** (1.0 / a) - column.shift - 0.5
    return np.asarray(ranks)


def _law_size(column: IdColumn) -> int:
    """Ids that the power law rules."""
    return column.cardinality - (column.top > 0)


def _mass(column: IdColumn) -> float:
    """The sum of (rank + shift) ** -exponent over all ranks: exact for the head, the midpoint integral beyond it."""
    size = _law_size(column)
    head = min(HEAD, size)
    total = float(np.sum((np.arange(1, head + 1, dtype=np.float64) + column.shift) ** -column.exponent))
    if size > HEAD:
        a = 1.0 - column.exponent
        end = (size + 0.5 + column.shift) ** a
        total += (end - (HEAD + 0.5 + column.shift) ** a) / a
    return total
