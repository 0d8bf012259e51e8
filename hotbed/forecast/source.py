"""A dataset or a file of ids in; its trace, its tables, and the rows a static cache would keep out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.dataset import HOT_SHARE, Dataset, hot_keys
from hotbed.forecast.id_file import read_ids
from hotbed.forecast.trace import Trace, read_trace, rows_of


class Given(NamedTuple):
    """What is simulated."""

    trace: Trace
    names: list[str]  # of the tables
    ends: list[int]  # keys of table f are below ends[f]
    hot: Callable[[int], NDArray[np.int64]]  # number of slots -> keys that a static cache keeps


def from_dataset(dataset: Dataset, **options: Any) -> Given:
    """The batches of a split; `options` are those of read_trace."""
    trace = read_trace(dataset, **options)
    rows = rows_of(dataset)
    ends = np.cumsum(rows).tolist()
    return Given(trace, [one.name for one in dataset.schema.features], ends, lambda size: hot_keys(dataset, size))


def from_file(path: Path, batch_size: int, max_batches: int | None = None) -> Given:
    """The ids of a file; a static cache keeps those that occur most in it."""
    found = read_ids(path, batch_size, max_batches)
    return Given(found.trace, found.features, found.ends, lambda size: hottest(found.trace, size))


def hottest(trace: Trace, num_slots: int) -> NDArray[np.int64]:
    """The rows of a trace that a cache of so many slots should keep for good, by the trace's own counts."""
    keys, place = np.unique(trace.keys, return_inverse=True)
    uses = np.bincount(place, weights=trace.counts)
    return np.sort(keys[np.argsort(-uses, kind="stable")[: int(num_slots * HOT_SHARE)]])
