"""Pass one over a click log: how often each id occurs in train, which row it gets, mean and spread of the integers.

In: a log and the number of train rows. Out: a `LogVocabulary`, and the counts files of the dataset. The counts of a column are
an array over its ids (4 bytes each, then reused for the rows) where train can fill it, else a hash table of the ids that
occur, which is no larger. A column of 40 million ids costs 32 MB at a million rows, and never more than 160 MB. Columns are
numbered one after the other, at 50 bytes for every id seen. The result is kept in a folder, so a killed job need not count
again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotbed.data.formats.chunk import Faults, Integers
from hotbed.data.schema import DenseColumn, IdFeature
from hotbed.data.synthetic.generate import ClickLog, ClickRows
from hotbed.data.synthetic.kernels import MISSING_ID, MISSING_INTEGER
from hotbed.data.synthetic.text_files import raw_ids
from hotbed.data.values import read_dense
from hotbed.data.vocabulary import Numbering
from hotbed.host.atomic import flush_tree, make_folder, write_file
from hotbed.host.jit import njit
from hotbed.host.threads import run_ahead

FACTS = "facts.json"  # written last
DRAWN = 1 << 17  # rows drawn at once
SPARSE = 8  # bytes of a hash table's entry, in entries of an array

Report = Callable[[int], None]  # rows done since the last report


class LogVocabulary(NamedTuple):
    """The columns of the schema, and the row of every id."""

    dense: tuple[DenseColumn, ...]
    features: tuple[IdFeature, ...]
    rows: tuple[ArrayRows | HashRows, ...]


class ArrayRows:
    """Rows of a column by an array over all of its ids; the last entry is "missing"."""

    def __init__(self, cardinality: int) -> None:
        self._entries = np.zeros(cardinality + 1, dtype=np.int32)

    def count(self, ids: NDArray[np.int32]) -> None:
        _count(ids, self._entries)

    def counted(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids that occurred, and how often."""
        seen = np.flatnonzero(self._entries).astype(np.int32)
        counts = self._entries[seen]
        if len(seen) and seen[-1] == len(self._entries) - 1:
            seen[-1] = MISSING_ID
        return seen, counts

    def number(self, ids: NDArray[np.int32]) -> None:
        """Give rows 1, 2, ... to these ids; all others share row 0."""
        self._entries[:] = 0
        self._entries[ids] = np.arange(1, len(ids) + 1, dtype=np.int32)

    def of(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The rows of ids; -1, missing, is the last entry."""
        return np.asarray(self._entries[ids])


class HashRows:
    """Rows of a column by a hash table of the ids that occur."""

    def __init__(self) -> None:
        self._table = Numbering()

    def count(self, ids: NDArray[np.int32]) -> None:
        self._table.add(ids.astype(np.int64), np.ones(len(ids), dtype=np.bool_))

    def counted(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids that occurred, and how often."""
        return self._table.ids.astype(np.int32), self._table.counts.astype(np.int32)

    def number(self, ids: NDArray[np.int32]) -> None:
        """Give rows 1, 2, ... to these ids; all others share row 0."""
        self._table = Numbering()
        self.count(ids)

    def of(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The rows of ids."""
        return np.asarray(self._table.find(ids.astype(np.int64)) + 1)


def number_ids(log: ClickLog, train: int, threads: int, out: Path, report: Report) -> LogVocabulary:
    """Count the train rows, write out/counts, and store the vocabulary in out/numbers, so that the job can be resumed."""
    kept = out / "numbers"
    if (kept / FACTS).is_file():
        report(train)
        return _load(log, train, kept)
    for folder in (kept, out / "counts"):
        make_folder(folder)
    shape = log.shape
    columns = [_rows_for(column.cardinality, train * column.bag) for column in shape.ids]
    facts: dict[str, Any] = {"dense": _count_all(log, train, columns, threads, report), "lookups": []}
    for number, rows in enumerate(columns):
        ids, counts = rows.counted()
        raw = np.empty(len(ids), dtype=np.int64)
        for start in range(0, len(ids), DRAWN):  # names take five times the memory of their hashes
            raw[start : start + DRAWN] = raw_ids(shape, number, ids[start : start + DRAWN])
        order = np.lexsort((raw, -counts))
        table = pa.table({"id": raw[order], "count": counts[order].astype(np.int64)})
        pq.write_table(table, out / "counts" / f"{shape.ids[number].name}.parquet", use_dictionary=["count"])
        ordered = ids[order]
        np.save(kept / f"{number}.npy", ordered)
        facts["lookups"].append(int(counts.sum()))
        rows.number(ordered)
    for folder in (out / "counts", kept):
        flush_tree(folder)
    write_file(kept / FACTS, json.dumps(facts))
    return _load(log, train, kept, columns)


def integer_logs(log: ClickLog, rows: ClickRows, number: int) -> NDArray[np.float64]:
    """One integer column as `prepare` transforms it, float64 [R]."""
    values = rows.integers[number]
    column = Integers(values.astype(np.int64), values == MISSING_INTEGER)
    return read_dense(column, DenseColumn(log.shape.integers[number].name, "log"), Faults(len(values)))


def _load(log: ClickLog, train: int, kept: Path, columns: list[ArrayRows | HashRows] | None = None) -> LogVocabulary:
    facts = json.loads((kept / FACTS).read_text())
    features, rows_of = [], []
    for number, column in enumerate(log.shape.ids):
        ordered = np.load(kept / f"{number}.npy")
        if columns is None:
            rows = _rows_for(column.cardinality, train * column.bag)
            rows.number(ordered)
        else:
            rows = columns[number]
        rows_of.append(rows)
        distinct = len(ordered)
        feature = IdFeature(column.name, rows=1 + distinct, multi=column.bag > 1, distinct=distinct)
        features.append(replace(feature, distinct_estimate=distinct, lookups=facts["lookups"][number]))
    names = [column.name for column in log.shape.integers]
    dense = (DenseColumn(name, "log", mean, scale) for name, (mean, scale) in zip(names, facts["dense"], strict=True))
    return LogVocabulary(tuple(dense), tuple(features), tuple(rows_of))


def _rows_for(cardinality: int, most_seen: int) -> ArrayRows | HashRows:
    return HashRows() if SPARSE * most_seen < cardinality else ArrayRows(cardinality)


def _count_all(
    log: ClickLog, train: int, columns: list[ArrayRows | HashRows], threads: int, report: Report
) -> list[tuple[float, float]]:
    """Count ids; mean and standard deviation of each integer."""
    num_integers = len(log.shape.integers)
    moments = np.zeros((2, num_integers))

    def draw(start: int) -> tuple[ClickRows, NDArray[np.float64]]:
        rows = log.rows(start, min(start + DRAWN, train))
        logs = [integer_logs(log, rows, number) for number in range(num_integers)]
        return rows, np.asarray([[values.sum(), (values * values).sum()] for values in logs]).reshape(-1, 2).T

    starts = range(0, train, DRAWN)
    for rows, sums in run_ahead(draw, starts, threads=threads, ahead=threads):
        moments += sums
        for number, column in enumerate(columns):
            ids = rows.ids[number]
            column.count(log.bags(number, ids).values if log.shape.ids[number].bag > 1 else ids)
        report(len(rows.labels))
    mean = moments[0] / train
    deviation = np.sqrt(np.maximum(moments[1] / train - mean * mean, 0.0))
    return [(float(mean[i]), float(deviation[i]) or 1.0) for i in range(num_integers)]


@njit(nogil=True, cache=True)
def _count(ids: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
    for i in range(len(ids)):
        counts[ids[i]] += 1
