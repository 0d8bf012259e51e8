"""A written dataset in, the columns that give the label away out.

A column that is known only after the click (the time of the purchase, filled for positives alone) makes a model look perfect
and useless. Every column is tried alone on the first rows of train: how well does its value order the labels (AUC)? For ids,
the share of positives of each id is counted on every other row and tried on the rest; ids that are rare there share one
value, so a column whose values never repeat is judged by whether it is filled. Real features stay far below the limit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data.schema import Schema

LEAK_AUC = 0.99
_ROWS = 100_000  # that are inspected
_FEWEST = 10  # positives and negatives, in each half
_RARE = 3  # an id with fewer rows in one half has no share of its own
_PRIOR = 0.5  # added to the rows of an id, in units of an average row
_FLOAT_DIGITS = 12


def find_leaks(directory: Path, schema: Schema) -> dict[str, float]:
    """Column -> AUC of its value alone, for those above LEAK_AUC."""
    table = _first_rows(directory, schema)
    labels = table.column(schema.label).to_numpy() > 0
    halves = labels[::2], labels[1::2]
    if any(min(int(half.sum()), int((~half).sum())) < _FEWEST for half in halves):
        return {}
    found = {}
    for spec in schema.dense:
        area = _auc(labels, table.column(spec.name).to_numpy())
        found[spec.name] = max(area, 1 - area)
    for feature in schema.features:
        column = table.column(feature.name).combine_chunks()
        ids = _firsts(column) if feature.multi else column.to_numpy()
        found[feature.name] = _auc_of_ids(labels, ids)
    return {name: round(area, _FLOAT_DIGITS) for name, area in found.items() if area >= LEAK_AUC}


def _first_rows(directory: Path, schema: Schema) -> pa.Table:
    parts, rows = [], 0
    for file in schema.splits["train"].files:
        with pa.OSFile(str(directory / file)) as source, pa.ipc.open_file(source) as opened:
            for number in range(opened.num_record_batches):
                if rows < _ROWS:
                    parts.append(opened.get_batch(number))
                    rows += parts[-1].num_rows
        if rows >= _ROWS:
            break
    return pa.Table.from_batches(parts).slice(0, _ROWS)


def _firsts(column: pa.Array) -> NDArray[np.int64]:
    """The first id of every bag, -1 for an empty one."""
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
    filled = offsets[1:] > offsets[:-1]
    out = np.full(len(filled), -1, dtype=np.int64)
    out[filled] = values[offsets[:-1][filled]]
    return out


def _auc_of_ids(labels: NDArray[np.bool_], ids: NDArray[np.int64]) -> float:
    """Of the share of positives of every id, counted on the even rows and tried on the odd ones."""
    _, numbers = np.unique(ids, return_inverse=True)
    counted = numbers[::2]
    rows = np.bincount(counted, minlength=numbers.max() + 1)
    positives = np.bincount(counted, labels[::2], minlength=len(rows))
    rare = rows < _RARE
    rows = np.where(rare, rows[rare].sum(), rows)
    positives = np.where(rare, positives[rare].sum(), positives)
    shares = (positives + _PRIOR * labels.mean()) / (rows + _PRIOR)
    return _auc(labels[1::2], shares[numbers[1::2]])


def _auc(labels: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Area under the ROC curve; a tie counts half."""
    _, numbers = np.unique(scores, return_inverse=True)
    positives = np.bincount(numbers, labels)
    negatives = np.bincount(numbers, ~labels)
    below = np.cumsum(negatives) - negatives / 2
    return float((positives * below).sum() / (positives.sum() * negatives.sum()))
