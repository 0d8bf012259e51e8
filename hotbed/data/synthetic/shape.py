"""The shape of the Criteo Kaggle click log as numbers: cardinalities, skew, missing shares, quantiles of the integers.

In: nothing. Out: constants, and `inverse_cdf`, which turns a power law into a table of fixed-point ranks. Skew was fitted
to the distinct-id growth and the head shares of the real log's first 60,000 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KNOTS = 4096  # equal-probability knots of every inverse distribution
FRACTION_BITS = 16  # fixed-point bits below a rank
HEAD = 4096  # ranks summed exactly; further ones by the integral of the power law
POSITIVE_RATE = 0.256


class IdColumn(NamedTuple):
    """Id r + 1 of `cardinality` has probability proportional to (r + 1 + shift) ** -exponent."""

    name: str
    cardinality: int
    exponent: float
    shift: float
    missing: str = ""  # the missing group it belongs to


class IntegerColumn(NamedTuple):
    """An integer column by its quantiles at QUANTILES."""

    name: str
    quantiles: tuple[int, ...]
    missing: str = ""


# columns of one group are missing together, as they are in the real log
MISSING_SHARE = {
    "page": 0.039,
    "C6": 0.137,
    "slot": 0.41,
    "C22": 0.82,
    "user": 0.45,
    "I3": 0.19,
    "visit": 0.19,
    "I6": 0.25,
    "I12": 0.77,
    "ad": 0.048,
}
ID_COLUMNS = (
    IdColumn("C1", 1460, 1.90, 0),
    IdColumn("C2", 583, 2.75, 20),
    IdColumn("C3", 10131227, 1.05, 2, "page"),
    IdColumn("C4", 2202608, 1.15, 2, "page"),
    IdColumn("C5", 305, 2.45, 0),
    IdColumn("C6", 24, 2.00, 1, "C6"),
    IdColumn("C7", 12517, 1.40, 50),
    IdColumn("C8", 633, 2.45, 1),
    IdColumn("C9", 3, 3.00, 0),
    IdColumn("C10", 93145, 1.20, 1),
    IdColumn("C11", 5683, 1.70, 50),
    IdColumn("C12", 8351593, 1.05, 2, "page"),
    IdColumn("C13", 3194, 1.70, 50),
    IdColumn("C14", 27, 2.90, 2),
    IdColumn("C15", 14992, 1.70, 50),
    IdColumn("C16", 5461306, 1.10, 5, "page"),
    IdColumn("C17", 10, 1.20, 0),
    IdColumn("C18", 5652, 2.10, 50),
    IdColumn("C19", 2173, 1.45, 0, "slot"),
    IdColumn("C20", 4, 3.00, 5, "slot"),
    IdColumn("C21", 7046547, 1.05, 1, "page"),
    IdColumn("C22", 18, 2.50, 1, "C22"),
    IdColumn("C23", 15, 2.70, 2),
    IdColumn("C24", 286181, 1.25, 2, "page"),
    IdColumn("C25", 105, 1.80, 1, "slot"),
    IdColumn("C26", 142572, 1.25, 5, "slot"),
)
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
INTEGER_COLUMNS = (
    IntegerColumn("I1", (0, 0, 0, 1, 3, 16, 44, 560), "user"),
    IntegerColumn("I2", (-2, -1, 0, 3, 39, 570, 2300, 18500)),
    IntegerColumn("I3", (0, 1, 3, 8, 23, 105, 350, 65535), "I3"),
    IntegerColumn("I4", (0, 0, 2, 5, 11, 29, 45, 420), "visit"),
    IntegerColumn("I5", (0, 2, 230, 2250, 10200, 51000, 287000, 1620000), "ad"),
    IntegerColumn("I6", (0, 0, 9, 38, 125, 600, 1570, 13600), "I6"),
    IntegerColumn("I7", (0, 0, 0, 3, 10, 59, 200, 8800), "ad"),
    IntegerColumn("I8", (0, 0, 2, 8, 20, 42, 48, 4350)),
    IntegerColumn("I9", (0, 1, 10, 41, 120, 520, 1225, 12700), "ad"),
    IntegerColumn("I10", (0, 0, 0, 1, 1, 2, 3, 6), "user"),
    IntegerColumn("I11", (0, 0, 0, 1, 2, 9, 23, 100), "ad"),
    IntegerColumn("I12", (0, 0, 0, 0, 1, 4, 16, 490), "I12"),
    IntegerColumn("I13", (0, 0, 2, 5, 13, 39, 74, 6560), "visit"),
)
# id columns whose pairs interact: few enough ids that most pairs of frequent ones meet often
INTERACTING = ("C1", "C2", "C5", "C6", "C8", "C14", "C17", "C20", "C23", "C25")


def probabilities(column: IdColumn, count: int) -> NDArray[np.float64]:
    """Probability of the `count` most frequent ids of a column."""
    ranks = np.arange(1, count + 1, dtype=np.float64)
    return np.asarray((ranks + column.shift) ** -column.exponent / _mass(column))


def inverse_cdf(column: IdColumn) -> NDArray[np.int64]:
    """The ranks (0 is the most frequent id) at KNOTS + 1 equally probable points, with FRACTION_BITS below the point."""
    head = min(HEAD, column.cardinality)
    cumulative = np.concatenate([[0.0], np.cumsum(probabilities(column, head))])
    levels = np.arange(KNOTS + 1) / KNOTS
    ranks = np.interp(levels, cumulative, np.arange(head + 1, dtype=np.float64))
    beyond = levels > cumulative[-1]
    a, origin = 1.0 - column.exponent, HEAD + 0.5 + column.shift
    tail = (levels[beyond] - cumulative[-1]) * _mass(column)
    ranks[beyond] = (origin**a + a * tail) ** (1.0 / a) - column.shift - 0.5
    ranks[-1] = column.cardinality
    return np.asarray(np.round(ranks * 2**FRACTION_BITS), dtype=np.int64)


def inverse_quantiles(column: IntegerColumn) -> NDArray[np.int64]:
    """The column's values at KNOTS + 1 equally probable points, with FRACTION_BITS below the point."""
    knots = np.asarray(column.quantiles, dtype=np.float64)
    curve = np.interp(np.arange(KNOTS + 1) / KNOTS, QUANTILES, np.sign(knots) * np.log1p(np.abs(knots)))
    values = np.sign(curve) * np.expm1(np.abs(curve))
    return np.asarray(np.round(values * 2**FRACTION_BITS), dtype=np.int64)


def _mass(column: IdColumn) -> float:
    """The sum of (rank + shift) ** -exponent over all ranks: exact for the head, the midpoint integral beyond it."""
    head = min(HEAD, column.cardinality)
    total = float(np.sum((np.arange(1, head + 1, dtype=np.float64) + column.shift) ** -column.exponent))
    if column.cardinality > HEAD:
        a = 1.0 - column.exponent
        end = (column.cardinality + 0.5 + column.shift) ** a
        total += (end - (HEAD + 0.5 + column.shift) ** a) / a
    return total
