"""A Criteo-like dataset directory, written in two passes over the generator.

In: split sizes and a seed. Out: the directory, as `prepare` would write it from the same log's text. Pass one counts the ids
of the train split and measures the integers, pass two draws the rows again and writes them: drawing is cheaper than keeping.
Splits follow each other in time. Memory does not grow with the rows: 135 MB of counts, as much again of row numbers, and a
part or two for every thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numba import njit
from numpy.typing import NDArray

from hotbed.data.ahead import run_ahead
from hotbed.data.formats.chunk import Faults, Integers
from hotbed.data.schema import DenseColumn, IdFeature, Schema, Split
from hotbed.data.synthetic.generate import MISSING_ID, MISSING_INTEGER, ClickRows, CriteoLike
from hotbed.data.synthetic.shape import ID_COLUMNS, INTEGER_COLUMNS
from hotbed.data.synthetic.text import raw_ids
from hotbed.data.values import read_dense, standardise
from hotbed.data.workspace import Workspace
from hotbed.errors import ConfigError

TRAIN_ROWS, VALID_ROWS, TEST_ROWS = 2_000_000, 200_000, 200_000
ROW_GROUP = 1 << 14  # 8 of them make a shuffling block of the loader
PART_ROWS = ROW_GROUP * 16
CHANCE_BINS = 1 << 20  # the best AUC is that of probabilities rounded to this many steps

Progress = Callable[[int, int], None]  # rows done, rows in all


class _Part(NamedTuple):
    """One Parquet file."""

    split: str
    file: str
    start: int
    stop: int


class _Written(NamedTuple):
    """What a part adds to the schema."""

    part: _Part
    positives: int
    chances: NDArray[np.int64]  # [2, CHANCE_BINS]: rows by label and probability


class _Numbers(NamedTuple):
    """Pass one: the columns of the schema, and the row of every id."""

    dense: tuple[DenseColumn, ...]
    features: tuple[IdFeature, ...]
    rows: list[NDArray[np.int32]]  # per column [cardinality + 1]; the last entry is "missing", 0 where unseen in train


def other_rows(train: int) -> int:
    """How many rows valid and test get beside `train`: a tenth, but enough for a steady AUC where train is small."""
    return max(train // 10, min(train, 10_000))


def write_dataset(
    out: str | Path,
    *,
    train: int = TRAIN_ROWS,
    valid: int = VALID_ROWS,
    test: int = TEST_ROWS,
    seed: int = 0,
    threads: int = 2,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Schema:
    """Write the first train + valid + test rows of the seed's log; splits of 0 rows are left out."""
    if train < 1 or valid < 0 or test < 0:
        raise ConfigError(f"train={train}, valid={valid}, test={test}: train needs at least 1 row, the others 0.")
    log = CriteoLike(seed)
    total = 2 * train + valid + test
    report = progress or (lambda done, total: None)
    with Workspace(Path(out), overwrite) as work:
        numbers = _first_pass(log, train, threads, work.path, lambda done: report(done, total))
        parts = list(_parts({"train": train, "valid": valid, "test": test}))
        for split in {part.split for part in parts}:
            (work.path / split).mkdir()
        written: list[_Written] = []
        done = train
        write = _Writer(log, numbers, work.path)
        for result in run_ahead(write, parts, threads=threads, ahead=threads):
            written.append(result)
            done += result.part.stop - result.part.start
            report(done, total)
        schema = _schema(log, numbers, written)
        schema.save(work.path)
        work.commit()
    return schema


def _parts(sizes: dict[str, int]) -> Iterator[_Part]:
    first = 0
    for split, rows in sizes.items():
        for number, start in enumerate(range(first, first + rows, PART_ROWS)):
            yield _Part(split, f"{split}/part-{number:05d}.parquet", start, min(start + PART_ROWS, first + rows))
        first += rows


def _first_pass(log: CriteoLike, train: int, threads: int, out: Path, report: Callable[[int], None]) -> _Numbers:
    """Count ids, measure integers, write the counts files."""
    counts = [np.zeros(column.cardinality + 1, dtype=np.int32) for column in ID_COLUMNS]
    moments = np.zeros((2, len(INTEGER_COLUMNS)))

    def draw(start: int) -> tuple[ClickRows, NDArray[np.float64]]:
        rows = log.rows(start, min(start + PART_ROWS // 2, train))
        logs = [_logs(rows, number) for number in range(len(INTEGER_COLUMNS))]
        return rows, np.asarray([[values.sum(), (values * values).sum()] for values in logs]).T

    starts = range(0, train, PART_ROWS // 2)
    for start, (rows, sums) in zip(starts, run_ahead(draw, starts, threads=threads, ahead=threads)):
        moments += sums
        for column, total in enumerate(counts):
            _count(rows.ids[column], total)
        report(min(start + PART_ROWS // 2, train))
    mean = moments[0] / train
    deviation = np.sqrt(np.maximum(moments[1] / train - mean * mean, 0.0))
    dense = tuple(
        DenseColumn(column.name, "log", float(mean[i]), float(deviation[i]) or 1.0)
        for i, column in enumerate(INTEGER_COLUMNS)
    )
    (out / "counts").mkdir()
    features, rows_of_id = [], []
    for number, feature_rows in enumerate(
        run_ahead(lambda c: _number_ids(c, counts[c], out), range(len(ID_COLUMNS)), threads=threads, ahead=threads)
    ):
        distinct = int(feature_rows.max())
        features.append(IdFeature(ID_COLUMNS[number].name, rows=1 + distinct, distinct=distinct))
        rows_of_id.append(feature_rows)
    return _Numbers(dense, tuple(features), rows_of_id)


def _number_ids(column: int, counts: NDArray[np.int32], out: Path) -> NDArray[np.int32]:
    """Rows 1, 2, ... to the ids that occur, most frequent first, and their counts file."""
    seen = np.flatnonzero(counts)
    ids = raw_ids(column, np.where(seen == len(counts) - 1, MISSING_ID, seen))
    order = np.lexsort((ids, -counts[seen]))
    table = pa.table({"id": ids[order], "count": counts[seen][order].astype(np.int64)})
    pq.write_table(table, out / "counts" / f"{ID_COLUMNS[column].name}.parquet", use_dictionary=["count"])
    rows = np.zeros(len(counts), dtype=np.int32)
    rows[seen[order]] = np.arange(1, len(seen) + 1, dtype=np.int32)
    return rows


class _Writer:
    """Draws and writes one part at a time; safe to call from several threads."""

    def __init__(self, log: CriteoLike, numbers: _Numbers, out: Path) -> None:
        self._log = log
        self._numbers = numbers
        self._out = out

    def __call__(self, part: _Part) -> _Written:
        rows = self._log.rows(part.start, part.stop)
        columns: dict[str, NDArray[np.float32] | NDArray[np.int32]] = {"label": rows.labels}
        for number, column in enumerate(self._numbers.dense):
            columns[column.name] = standardise(_logs(rows, number), column)
        for number, feature in enumerate(self._numbers.features):
            columns[feature.name] = self._numbers.rows[number][rows.ids[number]]  # -1, missing, is the last entry
        pq.write_table(
            pa.table(columns),
            self._out / part.file,
            row_group_size=ROW_GROUP,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            write_statistics=False,
        )
        bins = np.minimum((rows.probability * CHANCE_BINS).astype(np.int64), CHANCE_BINS - 1)
        chances = np.stack([np.bincount(bins[rows.labels == label], minlength=CHANCE_BINS) for label in (0, 1)])
        return _Written(part, int(rows.labels.sum(dtype=np.float64)), chances)


def _logs(rows: ClickRows, number: int) -> NDArray[np.float64]:
    """One integer column as `prepare` transforms it, float64 [R]."""
    values = rows.integers[number]
    column = Integers(values.astype(np.int64), values == MISSING_INTEGER)
    return read_dense(column, DenseColumn(INTEGER_COLUMNS[number].name, "log"), Faults(len(values)))


def _schema(log: CriteoLike, numbers: _Numbers, written: list[_Written]) -> Schema:
    splits, best = {}, {}
    for name in dict.fromkeys(result.part.split for result in written):
        mine = [result for result in written if result.part.split == name]
        splits[name] = Split(
            files=tuple(result.part.file for result in mine),
            file_rows=tuple(result.part.stop - result.part.start for result in mine),
            positives=sum(result.positives for result in mine),
        )
        chances = np.sum([result.chances for result in mine], axis=0)
        if chances.sum(axis=1).all():
            best[name] = binned_auc(chances)
    notes = {"generator": "criteo-like", "seed": log.seed, "rows_per_day": log.rows_per_day}
    return Schema("label", numbers.dense, numbers.features, splits, raw_format="criteo", best_auc=best, notes=notes)


def binned_auc(counts: NDArray[np.int64]) -> float:
    """AUC of scores in ascending bins: counts[0] negatives and counts[1] positives a bin; a shared bin is a tie."""
    negatives, positives = counts.astype(np.float64)
    below = np.cumsum(negatives) - negatives
    return float(np.sum(positives * (below + 0.5 * negatives)) / (negatives.sum() * positives.sum()))


@njit(nogil=True, cache=True)
def _count(ids: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
    for i in range(len(ids)):
        counts[ids[i]] += 1
