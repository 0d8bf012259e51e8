"""The shape of the Criteo Kaggle click log: cardinalities, skew, missing shares, quantiles of the integers.

Cardinalities and missing shares are published or counted on the real log. Skew was fitted to the distinct-id growth and the
head shares of its first 60,000 rows.
"""

from __future__ import annotations

from hotbed.data.synthetic.shape import IdColumn, IntegerColumn, Shape

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
