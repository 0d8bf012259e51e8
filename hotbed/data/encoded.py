"""A chunk of raw columns in, labels, numbers and 64-bit ids of its good rows out.

`prepare` and `RawReader` both come through here, so a raw row scored later gets the ids it was trained with.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from hotbed.data.formats import BadRow, Chunk
from hotbed.data.formats.chunk import Faults, offsets_of
from hotbed.data.schema import DenseColumn, IdFeature
from hotbed.data.values import Bags, LabelReader, read_dense, read_ids

BUCKET_SUFFIX = "_bucket"  # the id feature made of integer column I1 is I1_bucket


class Encoded(NamedTuple):
    """The good rows of a chunk; ids are 64-bit and numbers not yet standardised."""

    labels: np.ndarray  # float32 [n]
    dense: list[np.ndarray]  # N times float64 [n]
    ids: list[np.ndarray | Bags]  # one per feature, in schema order
    lines: np.ndarray  # int64 [n]
    bad: list[BadRow]  # the chunk's own and those found here, by line


def raw_column(feature: IdFeature) -> str:
    """The raw column a feature is read from."""
    return feature.name.removesuffix(BUCKET_SUFFIX) if feature.source == "bucket" else feature.name


def encode(
    chunk: Chunk,
    label: LabelReader | None,
    dense: Sequence[DenseColumn],
    features: Sequence[IdFeature],
    threads: Executor | None = None,
) -> Encoded:
    """Read every column of a chunk; rows with a value that cannot be read are left out. No label reader: NaN labels."""
    n = len(chunk.lines)
    columns = chunk.columns
    faults = [Faults(n) for _ in range(1 + len(dense) + len(features))]

    def dense_column(i: int) -> np.ndarray:
        return read_dense(columns[dense[i].name], dense[i], faults[1 + i])

    def id_column(i: int) -> np.ndarray | Bags:
        return read_ids(columns[raw_column(features[i])], features[i], faults[1 + len(dense) + i])

    spread = threads.map if threads else map
    numbers, ids = list(spread(dense_column, range(len(dense)))), list(spread(id_column, range(len(features))))
    labels = np.full(n, np.nan, dtype=np.float32) if label is None else label.read(columns[label.name], faults[0])
    bad, lines = chunk.bad, chunk.lines
    if any(fault.any for fault in faults):
        merged = Faults(n)
        for fault in faults:
            merged.merge(fault)
        bad = sorted(bad + merged.bad_rows(chunk.file, lines, chunk.show), key=lambda row: row.line)
        keep = merged.good
        labels, lines = labels[keep], lines[keep]
        numbers, ids = [values[keep] for values in numbers], [take_rows(values, keep) for values in ids]
    return Encoded(labels, numbers, ids, lines, bad)


def take_rows(values: np.ndarray | Bags, keep: np.ndarray) -> np.ndarray | Bags:
    """The rows where `keep` (bool [n]) is true."""
    if isinstance(values, Bags):
        lengths = np.diff(values.offsets)
        return Bags(offsets_of(lengths[keep]), values.ids[np.repeat(keep, lengths)])
    kept: np.ndarray = values[keep]
    return kept
