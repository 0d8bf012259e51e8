"""The data set's own counts in, the rows worth keeping out: what the static policy is told before training.

Counts come from the counts files that `prepare` wrote, so nothing is read but one line per distinct id. Ids that `min_count`
left out of a vocabulary share row 0, which is counted as the files leave it: not at all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotbed.data.dataset import Counts, Dataset
from hotbed.data.schema import IdFeature

HOT_SHARE = (
    0.9  # of the slots; the rest is for rows that come and go (Criteo, 1.5 %: 0.75 misses 3 % more, 1.0 1 % more)
)


def hot_keys(dataset: Dataset, num_slots: int) -> NDArray[np.int64]:
    """The keys of the hottest rows, ascending: as many as a cache of `num_slots` slots should keep for good."""
    keys, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    base = 0
    for feature in dataset.schema.features:
        rows, times = count_rows(feature, dataset.counts(feature.name))
        keys.append(base + rows)
        counts.append(times)
        base += rows.shape[0] if feature.mode == "raw" else feature.rows
    every, times = np.concatenate(keys), np.concatenate(counts)
    hottest = np.argsort(-times, kind="stable")[: int(num_slots * HOT_SHARE)]
    return np.sort(every[hottest])


def count_rows(feature: IdFeature, counts: Counts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(rows of the feature's table, uses of each), for rows that are used at all."""
    if feature.mode == "vocabulary":  # row 1 + k is the k-th line
        listed = min(counts.ids.shape[0], feature.rows - 1)
        return np.arange(1, 1 + listed, dtype=np.int64), counts.counts[:listed]
    if feature.mode == "raw":  # row k is the k-th line
        return np.arange(counts.ids.shape[0], dtype=np.int64), counts.counts
    rows, place = np.unique(counts.ids % feature.rows, return_inverse=True)
    times = np.zeros(rows.shape[0], dtype=np.int64)
    np.add.at(times, place, counts.counts)
    return rows, times
