"""The shape of the Criteo 1TB click log as MLPerf's DLRM trains on it, with one id a column or with its bags.

Cardinalities: those of the MLPerf DLRM data (ids of a column beyond 40 M folded), 187,767,399 in all. Bag sizes: the multi-hot
sizes of MLPerf's DLRM-DCNv2, 214 ids a row, made as there: the first id is the log's, the others are uniform over the column
and belong to that first id for good. Not published, so taken from the Kaggle log's columns of like cardinality: the skew, the
integers, what is missing. Clicks: 3.4 %; both kinds of rows were thinned by the publisher.
"""

from __future__ import annotations

from hotbed.data.synthetic.criteo import INTEGER_COLUMNS, MISSING_SHARE
from hotbed.data.synthetic.shape import IdColumn, Shape

BAG_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
ID_COLUMNS = (
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
    ids=ID_COLUMNS,
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
    ids=tuple(column._replace(bag=size) for column, size in zip(ID_COLUMNS, BAG_SIZES, strict=True)),
    text="",
)
