"""A chunk of raw columns in, labels, numbers and 64-bit ids of its good rows out.

Both `prepare` and `RawReader` use it, so a raw row that is scored later gets the ids it was trained with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hotbed.data.formats import BadRow, Chunk
from hotbed.data.formats.chunk import Faults, offsets_of
from hotbed.data.schema import DenseColumn, IdFeature, clock_of
from hotbed.data.times import TimeColumn, read_times
from hotbed.data.values import NO_TARGETS, Bags, LabelReader, Targets, read_dense, read_ids, read_target

BUCKET_SUFFIX = "_bucket"  # the id feature made of integer column I1 is I1_bucket


class EncodedRows(NamedTuple):
    """The good rows of a chunk; ids are 64-bit and numbers not yet standardised."""

    labels: np.ndarray  # float32 [n]
    dense: list[np.ndarray]  # N times float64 [n]; then the targets
    ids: list[np.ndarray | Bags]  # one per feature, in schema order
    lines: np.ndarray  # int64 [n]
    bad: list[BadRow]  # the chunk's own and those found here, by line
    times: np.ndarray | None = None  # int64 [n], microseconds, if there is a time column


def raw_column(feature: IdFeature) -> str:
    """The raw column a feature is read from."""
    if clock := clock_of(feature.source):
        return feature.name.removesuffix(f"_{clock.part}")
    return feature.name.removesuffix(BUCKET_SUFFIX) if feature.source == "bucket" else feature.name


def time_of(features: Sequence[IdFeature]) -> str | None:
    """The raw column that is read as a time, if features are made of one."""
    return next((raw_column(one) for one in features if clock_of(one.source)), None)


def encode(
    chunk: Chunk,
    label: LabelReader | None,
    dense: Sequence[DenseColumn],
    features: Sequence[IdFeature],
    time: TimeColumn | None = None,
    targets: Targets = NO_TARGETS,
) -> EncodedRows:
    """Read every column of a chunk; rows with a value that cannot be read are left out. No label reader: NaN labels.

    Targets come after the dense columns.
    """
    n = len(chunk.lines)
    columns = chunk.columns
    faults = Faults(n)  # the label first: the first reason found is kept
    labels = np.full(n, np.nan, dtype=np.float32) if label is None else label.read(columns[label.name], faults)
    times = None if time is None else read_times(columns[time.name], time, faults)
    numbers = [read_dense(columns[spec.name], spec, faults) for spec in dense]
    for target in targets.columns:
        if targets.optional and target.name not in columns:
            numbers.append(np.full(n, np.nan))
        else:
            numbers.append(read_target(columns[target.name], target, faults, optional=targets.optional))
    ids = [read_ids(columns[raw_column(feature)], feature, faults) for feature in features]
    bad, lines = chunk.bad, chunk.lines
    if faults.any:
        bad = sorted(bad + faults.bad_rows(chunk.file, lines, chunk.show), key=lambda row: row.line)
        keep = faults.good
        labels, lines = labels[keep], lines[keep]
        numbers, ids = [values[keep] for values in numbers], [take_rows(values, keep) for values in ids]
        times = None if times is None else times[keep]
    return EncodedRows(labels, numbers, ids, lines, bad, times)


def take_rows(values: np.ndarray | Bags, keep: np.ndarray) -> np.ndarray | Bags:
    """The rows where `keep` (bool [n]) is true."""
    if isinstance(values, Bags):
        lengths = np.diff(values.offsets)
        return Bags(offsets_of(lengths[keep]), values.ids[np.repeat(keep, lengths)])
    kept: np.ndarray = values[keep]
    return kept
