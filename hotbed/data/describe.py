"""What a dataset holds, as numbers: rows, positives, distinct ids, and how unevenly look-ups fall on them.

In: an open Dataset. Out: a JSON-able dict. All figures are exact: they come from the counts files, which `prepare` filled
from every row of the train split. Ids that `min_count`, or the memory of `prepare`, left out are not among them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.data.dataset import Dataset

TOP_SHARE = 0.015  # of the ids; what the published caches hold on the device
CURVE_POINTS = 64


def describe(dataset: Dataset) -> dict[str, Any]:
    """Sizes of the splits, and the skew of every feature and of all of them together."""
    schema = dataset.schema
    splits = {
        name: {"rows": split.rows, "positive_rate": split.positives / split.rows if split.rows else None}
        for name, split in sorted(schema.splits.items(), key=lambda item: _place(item[0]))
    }
    counts = {feature.name: dataset.counts(feature.name).counts for feature in schema.features}
    rows = {feature.name: feature.distinct if feature.mode == "raw" else feature.rows for feature in schema.features}
    features = [{"name": name, "rows": rows[name], **skew(counts[name])} for name in rows]
    together = np.concatenate([np.zeros(0, dtype=np.int64), *counts.values()])
    total = {"name": "total", "rows": sum(rows.values()), **skew(together)}
    return {"splits": splits, "features": features, "total": total}


def skew(counts: NDArray[np.int64]) -> dict[str, Any]:
    """How the look-ups counted in `counts` (one entry per distinct id) spread over the ids."""
    falling = np.sort(counts)[::-1]
    reached = np.cumsum(falling)
    lookups = int(reached[-1]) if len(reached) else 0
    if not lookups:
        return {"distinct": len(falling), "lookups": 0, "top_share": None, "curve": []}
    top = int(np.ceil(len(falling) * TOP_SHARE))
    places = np.unique(np.round(np.geomspace(1, len(falling), CURVE_POINTS)).astype(np.int64))
    return {
        "distinct": len(falling),
        "lookups": lookups,
        "top_share": int(reached[top - 1]) / lookups,
        "curve": [[int(place) / len(falling), int(reached[place - 1]) / lookups] for place in places],
    }


def _place(split: str) -> tuple[int, str]:
    """The usual splits in the order of their use, then others by name."""
    usual = ("train", "valid", "test")
    return (usual.index(split) if split in usual else len(usual), split)
