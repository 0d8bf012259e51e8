"""A feature and ids of its table in, out what they stand for in the raw log, as far as the dataset tells.

A vocabulary lists 64-bit ids. Of whole numbers they are the values themselves, of log buckets they name a range; of texts they
are hashes, from which no text can be told.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotbed.data.dataset import Dataset
from hotbed.data.hash import MISSING_ID
from hotbed.data.schema import IdFeature
from hotbed.data.values import BUCKET_STARTS

_STARTS = (0, 1, 2, *(int(one) for one in BUCKET_STARTS))


def meanings(dataset: Dataset, feature: IdFeature, ids: Sequence[int]) -> list[str]:
    """In words; "" where nothing is known."""
    if feature.mode == "hash":
        return [""] * len(ids)  # many values share a row
    if feature.mode != "vocabulary":
        return [_of_id(feature, one) for one in ids]
    listed = dataset.counts(feature.name).ids
    known = {0: "values that train does not have"}
    known |= {one: _of_id(feature, int(listed[one - 1])) for one in ids if 0 < one <= len(listed)}
    return [known.get(one, "") for one in ids]


def _of_id(feature: IdFeature, raw: int) -> str:
    if raw == MISSING_ID:
        return "missing values"
    if feature.source == "integer":
        return f"value {raw}"
    return _range(raw) if feature.source == "bucket" else ""


def _range(bucket: int) -> str:
    size = abs(bucket)
    if not size:
        return "values between -1 and 1"
    if size + 1 >= len(_STARTS):
        return ""
    low, high = _STARTS[size : size + 2]
    return f"values from {low:,} to below {high:,}" if bucket > 0 else f"values from -{low:,} to above -{high:,}"
