"""Batches -> a trace: the distinct keys of every batch, in the order of training, without rows, labels or gradients.

Keys are those of training (tables in schema order), so a cache makes the same decisions for a trace as in training. A trace of
Criteo-Kaggle at batch 16,384 takes 0.9 MB per batch; `max_batches` limits it.

Shapes: N batches, E distinct keys of all batches, batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.data.schema import IdFeature
from hotbed.data.vocabulary import Numbering
from hotbed.errors import ConfigError, SchemaError
from hotbed.types import Batch


class Trace(NamedTuple):
    """The lookups of every batch."""

    keys: NDArray[np.int64]  # [E], ascending within a batch
    counts: NDArray[np.int32]  # [E], lookups of each
    offsets: NDArray[np.int64]  # [N + 1]; batch n owns keys[offsets[n]:offsets[n + 1]]
    num_rows: int  # of all tables

    @property
    def num_batches(self) -> int:
        return int(self.offsets.shape[0]) - 1

    @property
    def most_keys(self) -> int:
        """Distinct keys of the largest batch: the least number of slots for the trace."""
        return int(np.diff(self.offsets).max(initial=0))

    @property
    def num_lookups(self) -> int:
        return int(self.counts.sum(dtype=np.int64))

    def distinct(self) -> NDArray[np.int64]:
        """Every key that occurs, ascending."""
        return np.unique(self.keys)

    def batch(self, number: int) -> NDArray[np.int64]:
        """The distinct keys of a batch."""
        return self.keys[self.offsets[number] : self.offsets[number + 1]]


def trace_of(lookups: Iterable[NDArray[np.int64]], num_rows: int) -> Trace:
    """A trace from the lookups of each batch, as keys; negative keys are padding."""
    keys, counts, offsets = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [0]
    for batch in lookups:
        found, times = np.unique(batch, return_counts=True)
        wanted = found >= 0
        keys.append(found[wanted].astype(np.int64, copy=False))
        counts.append(times[wanted].astype(np.int32))
        offsets.append(offsets[-1] + int(wanted.sum()))
    return Trace(np.concatenate(keys), np.concatenate(counts), np.array(offsets, dtype=np.int64), num_rows)


def read_trace(
    dataset: Dataset,
    *,
    batch_size: int,
    split: str = "train",
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    max_batches: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Trace:
    """An epoch of a split, as a run with the same batch size, seed and shuffling reads it."""
    if max_batches is not None and max_batches < 1:
        raise ConfigError(f"max_batches is {max_batches}; a trace needs at least 1.")
    if not dataset.schema.features:
        raise SchemaError(f"{dataset.path} has no id features, so there is nothing to look up.")
    loader = Loader(dataset, split, batch_size=batch_size, shuffle=shuffle, seed=seed)
    total = min(len(loader), max_batches or len(loader))
    keys_of = _Keys(dataset)

    def lookups() -> Iterable[NDArray[np.int64]]:
        with closing(loader.id_batches(epoch)) as batches:
            for done, batch in enumerate(islice(batches, total), start=1):
                yield keys_of(batch)
                progress(done, total)

    return trace_of(lookups(), keys_of.num_rows)


def rows_of(dataset: Dataset, raw: Mapping[str, int] | None = None) -> list[int]:
    """Rows of every table, in the order of the keys; of raw ids those of train, whose number may be known already."""
    return [
        (raw[one.name] if raw is not None else int(dataset.counts(one.name).ids.shape[0]))
        if one.mode == "raw"
        else one.rows
        for one in dataset.schema.features
    ]


class _Keys:
    """Ids -> keys, as a group of all tables numbers them; raw ids of train by their frequency."""

    def __init__(self, dataset: Dataset) -> None:
        self._features = dataset.schema.features
        self._numberings = {one.name: _numbering(dataset, one) for one in self._features if one.mode == "raw"}
        rows = rows_of(dataset, {name: len(numbering) for name, numbering in self._numberings.items()})
        self._base = np.cumsum([0, *rows[:-1]], dtype=np.int64)
        self.num_rows = sum(rows)

    def __call__(self, batch: Batch) -> NDArray[np.int64]:
        ids, column = batch.ids.numpy(), 0
        parts = []
        for feature, base in zip(self._features, self._base, strict=True):
            if feature.multi:
                values = batch.bags[feature.name].values.numpy()
            else:
                values, column = ids[:, column], column + 1
            parts.append(base + self._rows(feature, values))
        return np.concatenate(parts)

    def _rows(self, feature: IdFeature, values: NDArray[np.int64]) -> NDArray[np.int64]:
        if feature.mode == "hash":
            return values % feature.rows
        if feature.mode != "raw":
            return values
        rows = self._numberings[feature.name].find(np.ascontiguousarray(values)).astype(np.int64)
        if (rows < 0).any():
            unknown = int(values[np.argmax(rows < 0)])
            raise SchemaError(
                f"id {unknown} of feature {feature.name!r} is not in the train split, so it has no row to be simulated; "
                "read --split train."
            )
        return rows


def _numbering(dataset: Dataset, feature: IdFeature) -> Numbering:
    ids = dataset.counts(feature.name).ids
    numbering = Numbering()
    numbering.add(ids, np.zeros(ids.shape[0], dtype=np.bool_))
    return numbering
