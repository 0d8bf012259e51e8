"""What describes a synthetic click log, the inverse distributions its values are drawn from, and the known shapes by name.

In: columns of ids (power laws) and of integers (quantiles). Out: tables of fixed-point values at equally probable knots. The
tables take 32 KB a column, whatever its cardinality.

Criteo Kaggle: cardinalities and missing shares are published or counted on the real log. Skew was fitted to the distinct-id
growth and the head shares of its first 60,000 rows.

Criteo 1TB, as MLPerf's DLRM trains on it, with one id a column or with its bags. Cardinalities: those of the MLPerf DLRM data
(ids of a column beyond 40 M folded), 187,767,399 in all. Bag sizes: the multi-hot sizes of MLPerf's DLRM-DCNv2, 214 ids a row,
made as there: the first id is that of the log, the others are uniform over the column and depend only on the first. Not
published, so taken from the Kaggle log's columns of like cardinality: the skew, the integers, what is missing. Clicks: 3.4 %;
both kinds of rows were thinned by the publisher.

Avazu: 22 id columns, no integers, ten days, 17 % clicks. Cardinalities are those published of the 40,428,967 train rows,
9,449,445 in all. Skew was fitted to the distinct-id growth and the head shares of the real log's first hour. `top` is the one
id that means "none" (no app on a site, no device id). The hour is the clock of the log and carries no signal, since no
model can know the hours of days to come.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import ConfigError

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
    top: float = 0.0  # the share of id 0; the others follow the power law
    bag: int = 1  # ids of a row
    clock: bool = False  # not random: the hour of the log, modulo `cardinality`


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
    rows_per_day: int  # unless the user chooses the number of days
    days: int  # of the published log
    spread: tuple[float, float, float]  # standard deviations of the logit's parts: integers, ids alone, pairs
    text: str  # the raw format of its text: criteo, avazu, or none
    generation: int  # raise it when the rows of a seed change, so that no cache mixes old rows with new code
    salt: int  # makes the random words of shapes different
    label: str = "label"

    def share_missing(self, column: IdColumn | IntegerColumn) -> float:
        """The share of rows in which the column is missing."""
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
    """The ranks at which the cumulative power law passes the levels."""
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
    """The number of ids that follow the power law."""
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

CRITEO = Shape(
    name="criteo-like",
    summary="click log of Criteo Kaggle's shape: 13 integers, 26 id columns of 33.8 M ids, 25.6 % clicks",
    ids=ID_COLUMNS,
    integers=INTEGER_COLUMNS,
    missing=MISSING_SHARE,
    interacting=INTERACTING,
    positive_rate=0.256,
    rows_per_day=200_000,
    days=12,
    spread=(0.72, 1.15, 0.40),
    text="criteo",
    generation=2,
    salt=0,
)


BAG_SIZES = (
    3,
    2,
    1,
    2,
    6,
    1,
    1,
    1,
    1,
    7,
    3,
    8,
    1,
    6,
    9,
    5,
    1,
    1,
    1,
    12,
    100,
    27,
    10,
    3,
    1,
    1,
)  # of MLPerf: 214 ids a row
CRITEO_1TB_IDS = (
    IdColumn("C1", 39884406, 1.05, 2, "page"),
    IdColumn("C2", 39043, 1.25, 5),
    IdColumn("C3", 17289, 1.40, 50),
    IdColumn("C4", 7420, 1.50, 20),
    IdColumn("C5", 20263, 1.30, 50),
    IdColumn("C6", 3, 3.00, 0),
    IdColumn("C7", 7120, 1.70, 50),
    IdColumn("C8", 1543, 1.90, 0),
    IdColumn("C9", 63, 2.00, 1),
    IdColumn("C10", 38532951, 1.05, 2, "page"),
    IdColumn("C11", 2953546, 1.15, 2, "page"),
    IdColumn("C12", 403346, 1.25, 2),
    IdColumn("C13", 10, 1.20, 0),
    IdColumn("C14", 2208, 1.45, 0),
    IdColumn("C15", 11938, 1.40, 50),
    IdColumn("C16", 155, 1.80, 1),
    IdColumn("C17", 4, 3.00, 5),
    IdColumn("C18", 976, 2.45, 1),
    IdColumn("C19", 14, 2.70, 2),
    IdColumn("C20", 39979771, 1.05, 1, "page"),
    IdColumn("C21", 25641295, 1.10, 5, "page"),
    IdColumn("C22", 39664984, 1.05, 2, "page"),
    IdColumn("C23", 585935, 1.25, 2),
    IdColumn("C24", 12972, 1.70, 50),
    IdColumn("C25", 108, 1.80, 1),
    IdColumn("C26", 36, 2.00, 1),
)

CRITEO_1TB = Shape(
    name="criteo-1tb-like",
    summary="click log of Criteo 1TB's shape (MLPerf DLRM): 13 integers, 26 id columns of 187.8 M ids, 24 days",
    ids=CRITEO_1TB_IDS,
    integers=INTEGER_COLUMNS,
    missing=MISSING_SHARE,
    interacting=("C6", "C8", "C9", "C13", "C16", "C17", "C18", "C19", "C25", "C26"),
    positive_rate=0.034,
    rows_per_day=100_000,
    days=24,
    spread=(0.62, 0.95, 0.38),
    text="criteo",
    generation=1,
    salt=1,
)
CRITEO_1TB_BAGS = CRITEO_1TB._replace(
    name="criteo-1tb-bags-like",
    summary="the same log with the bags of MLPerf DLRM-DCNv2: 214 ids a row",
    ids=tuple(column._replace(bag=size) for column, size in zip(CRITEO_1TB_IDS, BAG_SIZES, strict=True)),
    text="",
)


AVAZU_IDS = (
    IdColumn("hour", 240, 0.0, 0, clock=True),
    IdColumn("C1", 7, 8.00, 1.1),
    IdColumn("banner_pos", 7, 7.95, 0.05, top=0.8),
    IdColumn("site_id", 4737, 1.62, 0.25),
    IdColumn("site_domain", 7745, 1.72, 0.44),
    IdColumn("site_category", 26, 8.00, 7.1),
    IdColumn("app_id", 8552, 1.59, 2.8, top=0.782),
    IdColumn("app_domain", 559, 4.09, 4.3, top=0.83),
    IdColumn("app_category", 36, 5.75, 1.6),
    IdColumn("device_id", 2686408, 0.94, 1.2, top=0.873),
    IdColumn("device_ip", 6729486, 0.99, 15),
    IdColumn("device_model", 8251, 1.56, 12),
    IdColumn("device_type", 5, 8.00, 0.98),
    IdColumn("device_conn_type", 4, 5.60, 0.8),
    IdColumn("C14", 2626, 3.36, 30),
    IdColumn("C15", 8, 8.00, 0.45),
    IdColumn("C16", 9, 5.99, 0.05),
    IdColumn("C17", 435, 3.26, 12, top=0.392),
    IdColumn("C18", 4, 8.00, 5.1),
    IdColumn("C19", 68, 3.58, 2.4),
    IdColumn("C20", 172, 2.27, 4.2, top=0.62),
    IdColumn("C21", 60, 8.00, 14),
)

AVAZU = Shape(
    name="avazu-like",
    summary="click log of Avazu's shape: 22 id columns of 9.4 M ids, no numbers, 10 days, 17 % clicks",
    ids=AVAZU_IDS,
    integers=(),
    missing={},
    interacting=("C1", "banner_pos", "site_category", "app_category", "device_conn_type", "C16", "C18", "C19", "C21"),
    positive_rate=0.1698,
    rows_per_day=240_000,
    days=10,
    spread=(0.0, 1.22, 0.55),
    text="avazu",
    generation=1,
    salt=2,
    label="click",
)


SHAPES = {shape.name: shape for shape in (CRITEO, CRITEO_1TB, CRITEO_1TB_BAGS, AVAZU)}


def find_shape(name: str) -> Shape:
    """The shape of that name."""
    if name not in SHAPES:
        raise ConfigError(f"{name!r} cannot be generated; these can: {', '.join(SHAPES)}.")
    return SHAPES[name]
