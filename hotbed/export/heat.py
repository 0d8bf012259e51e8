"""How often ids were seen in training in, the order of a table's rows in an export out: hottest first.

A vocabulary is numbered by frequency, so its rows are in order as they are: row 0, which all unknown ids share, then the most
frequent id. Rows of other tables are ordered by the counts of the dataset, where it is at hand; else by id. An order takes 8
bytes a row of memory, and about 30 while it is made.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.dataset import Counts
from hotbed.data.schema import IdFeature
from hotbed.run.export_format import Order

Ints = NDArray[np.int64]


class Heat(NamedTuple):
    """The order of one table's rows."""

    order: Order
    positions: Ints | None  # [R]: where in the model the next row of the export is; None: the same place


def heat_of_rows(feature: IdFeature, rows: int, hashing: bool, counts: Counts | None) -> Heat:
    """Of a table with row numbers."""
    if feature.mode == "vocabulary":
        return Heat("frequency", None)
    if counts is None:
        return Heat("id", None)
    row_of = counts.ids % rows if hashing else counts.ids
    inside = (row_of >= 0) & (row_of < rows)
    seen = np.bincount(row_of[inside], weights=counts.counts[inside], minlength=rows)
    return Heat("frequency", np.argsort(np.negative(seen, out=seen), kind="stable"))


def heat_of_ids(feature: IdFeature, ids: Ints, counts: Counts | None) -> Heat:
    """Of a table of dynamic ids [R], ascending."""
    if counts is None:
        return Heat("id", None)
    if feature.mode == "vocabulary":  # ids are row numbers of the dataset
        by_id = np.concatenate([[feature.unlisted_lookups], counts.counts])
        inside = (ids >= 0) & (ids < len(by_id))
        seen = np.where(inside, by_id[np.where(inside, ids, 0)], 0)
    else:
        order = np.argsort(counts.ids)
        known = counts.ids[order]
        at = np.minimum(np.searchsorted(known, ids), max(len(known) - 1, 0))
        seen = np.where(known[at] == ids, counts.counts[order][at], 0) if len(known) else np.zeros(len(ids))
    return Heat("frequency", np.argsort(-seen, kind="stable"))
