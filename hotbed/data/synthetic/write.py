"""A dataset directory of a click log, written in two passes over the generator.

In: a shape, split sizes and a seed. Out: the directory, as `prepare` would write it from the text of the same log. Pass one
counts the ids of the train split and measures the integers (number_ids.py); pass two generates the rows again and writes them,
which is cheaper than storing them. Splits are consecutive in time. Memory does not grow with the rows: at most 4 bytes per id
of the shape, and one or two slices of 262,144 rows per thread. A killed job keeps its finished files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data.arrow_file import SUFFIX, ArrowWriter
from hotbed.data.schema import FORMAT_VERSION, Schema, Split
from hotbed.data.synthetic.generate import ClickLog, ClickRows
from hotbed.data.synthetic.number_ids import FACTS, LogVocabulary, integer_logs, number_ids
from hotbed.data.synthetic.shapes import SHAPES, Shape
from hotbed.data.values import standardise
from hotbed.data.workspace import Workspace
from hotbed.errors import ConfigError
from hotbed.host.atomic import flush_to_disk, make_folder, place
from hotbed.host.threads import run_ahead

TRAIN_ROWS, VALID_ROWS, TEST_ROWS = 2_000_000, 200_000, 200_000
BATCH_ROWS = 1 << 14  # of a record batch; 8 of them make a shuffling block of the loader
PART_ROWS = BATCH_ROWS * 16
MOST_LOOKUPS = 2**31 - 1  # of a column, since counts are 32-bit
CHANCE_BINS = 1 << 16  # the best AUC is that of probabilities rounded to this many steps; right to 7 digits
RAW_FORMATS = {"criteo": "criteo", "avazu": "csv", "": ""}

Progress = Callable[[int, int], None]  # rows done, rows in all


class _FilePart(NamedTuple):
    """One file of rows."""

    split: str
    file: str
    start: int
    stop: int


class _PartSummary(NamedTuple):
    """The labels and probabilities of a part, for the schema."""

    part: _FilePart
    chances: NDArray[np.int64]  # [2, CHANCE_BINS]: rows by label and probability


def other_rows(train: int) -> int:
    """The rows of valid and of test: a tenth of `train`, but enough for a stable AUC if train is small."""
    return max(train // 10, min(train, 10_000))


def make_log(shape: Shape, seed: int, num_rows: int, days: int | None) -> ClickLog:
    """The log of a shape, whose first `num_rows` rows span `days` days.

    Without `days`, at most those of the shape: a short log is its first days, a long one has longer days. More rows are then
    more of the same, and not a longer drift.
    """
    if days is not None and not 1 <= days <= num_rows:
        raise ConfigError(f"{num_rows:,} rows cannot span {days:,} days; take 1 to {num_rows:,} of them.")
    usual = max(shape.rows_per_day, -(-num_rows // shape.days))
    return ClickLog(shape, seed, usual if days is None else -(-num_rows // days))


def check_train_rows(shape: Shape, train: int) -> None:
    """A ConfigError if a dataset cannot hold that many."""
    most = MOST_LOOKUPS // max(column.bag for column in shape.ids)
    if train > most:
        raise ConfigError(
            f"{train:,} train rows are too many for a dataset of {shape.name}; it holds {most:,} at most."
        )


def write_dataset(
    out: str | Path,
    *,
    shape: Shape = SHAPES["criteo-like"],
    train: int = TRAIN_ROWS,
    valid: int = VALID_ROWS,
    test: int = TEST_ROWS,
    seed: int = 0,
    days: int | None = None,
    threads: int = 2,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Schema:
    """Write the first train + valid + test rows of the seed's log; splits of 0 rows are left out.

    With `days` the rows span that many days, with one file per day.
    """
    if train < 1 or valid < 0 or test < 0:
        raise ConfigError(f"train={train}, valid={valid}, test={test}: train needs at least 1 row, the others 0.")
    check_train_rows(shape, train)
    sizes = {"train": train, "valid": valid, "test": test}
    log = make_log(shape, seed, sum(sizes.values()), days)
    done, total = 0, 2 * train + valid + test

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    with Workspace(Path(out), overwrite, settings=_settings(log, sizes, days)) as work:
        numbers = number_ids(log, train, threads, work.path, report)
        parts = list(_parts(sizes, log.rows_per_day if days is not None else None))
        for folder in {"made", *(part.split for part in parts)}:
            make_folder(work.path / folder)
        splits: dict[str, _SplitSummary] = {}
        for result in run_ahead(_Writer(log, numbers, work.path), parts, threads=threads, ahead=threads):
            splits.setdefault(result.part.split, _SplitSummary()).add(result)
            report(result.part.stop - result.part.start)
        schema = _schema(log, numbers, splits)
        schema.save(work.path)
        (work.path / "numbers" / FACTS).unlink()  # first, so that a job killed here counts again
        flush_to_disk(work.path / "numbers")
        for folder in ("numbers", "made"):
            shutil.rmtree(work.path / folder)
        work.commit()
    return schema


def binned_auc(counts: NDArray[np.int64]) -> float:
    """AUC of scores in ascending bins: counts[0] negatives and counts[1] positives a bin; a shared bin is a tie."""
    negatives, positives = counts.astype(np.float64)
    below = np.cumsum(negatives) - negatives
    return float(np.sum(positives * (below + 0.5 * negatives)) / (negatives.sum() * positives.sum()))


def bin_chances(rows: ClickRows) -> NDArray[np.int64]:
    """Rows by label and probability, [2, CHANCE_BINS]."""
    bins = np.minimum((rows.probability * CHANCE_BINS).astype(np.int64), CHANCE_BINS - 1)
    return np.stack([np.bincount(bins[rows.labels == label], minlength=CHANCE_BINS) for label in (0, 1)])


class _SplitSummary:
    """The parts of a split, and their sums."""

    def __init__(self) -> None:
        self.parts: list[_FilePart] = []
        self.chances = np.zeros((2, CHANCE_BINS), dtype=np.int64)

    def add(self, written: _PartSummary) -> None:
        self.parts.append(written.part)
        self.chances += written.chances


class _Writer:
    """Generates and writes one part, unless it exists already; safe to call from several threads."""

    def __init__(self, log: ClickLog, numbers: LogVocabulary, out: Path) -> None:
        self._log = log
        self._numbers = numbers
        self._out = out

    def __call__(self, part: _FilePart) -> _PartSummary:
        path = self._out / part.file
        note = self._out / "made" / f"{part.file.replace('/', '-')}.npy"
        if path.exists() and note.exists():
            return _PartSummary(part, np.load(note).astype(np.int64))
        chances = np.zeros((2, CHANCE_BINS), dtype=np.int64)
        partial = path.with_suffix(".partial")
        with ArrowWriter(partial, self._columns(), part.file) as writer:
            for start in range(part.start, part.stop, PART_ROWS):
                rows = self._log.rows(start, min(start + PART_ROWS, part.stop))
                writer.write(self._table(rows), BATCH_ROWS)
                chances += bin_chances(rows)
        np.save(note, chances.astype(np.int32))
        for one in (note, note.parent):
            flush_to_disk(one)
        place(partial, path)
        return _PartSummary(part, chances)

    def _table(self, rows: ClickRows) -> pa.Table:
        columns: dict[str, NDArray[np.float32] | NDArray[np.int32] | pa.Array] = {self._log.shape.label: rows.labels}
        for number, column in enumerate(self._numbers.dense):
            columns[column.name] = standardise(integer_logs(self._log, rows, number), column)
        for number, feature in enumerate(self._numbers.features):
            rows_of = self._numbers.rows[number]
            if feature.multi:
                bags = self._log.bags(number, rows.ids[number])
                columns[feature.name] = pa.ListArray.from_arrays(
                    pa.array(bags.offsets), pa.array(rows_of.of(bags.values))
                )
            else:
                columns[feature.name] = rows_of.of(rows.ids[number])
        return pa.table(columns).cast(self._columns())

    def _columns(self) -> pa.Schema:
        kinds = dict.fromkeys([self._log.shape.label, *(one.name for one in self._numbers.dense)], pa.float32())
        for feature in self._numbers.features:
            kinds[feature.name] = pa.list_(pa.int32()) if feature.multi else pa.int32()
        return pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def _settings(log: ClickLog, sizes: dict[str, int], days: int | None) -> str:
    """Everything that determines the files of a directory."""
    shape = log.shape
    version = [FORMAT_VERSION, shape.generation]
    known = {"name": shape.name, "version": version, "seed": log.seed, **sizes, "days": days}
    if days is None and log.rows_per_day != shape.rows_per_day:
        known["rows_per_day"] = log.rows_per_day
    return json.dumps(known)


def _parts(sizes: dict[str, int], rows_per_day: int | None) -> Iterator[_FilePart]:
    """Files of PART_ROWS rows, or one per day."""
    first = 0
    for split, rows in sizes.items():
        last = first + rows
        if rows_per_day is None:
            for number, start in enumerate(range(first, last, PART_ROWS)):
                yield _FilePart(split, f"{split}/part-{number:05d}{SUFFIX}", start, min(start + PART_ROWS, last))
        else:
            start = first
            while start < last:
                day = start // rows_per_day
                stop = min((day + 1) * rows_per_day, last)
                yield _FilePart(split, f"{split}/day-{day:05d}{SUFFIX}", start, stop)
                start = stop
        first = last


def _schema(log: ClickLog, numbers: LogVocabulary, found: dict[str, _SplitSummary]) -> Schema:
    splits, best = {}, {}
    for name, summed in found.items():
        splits[name] = Split(
            files=tuple(part.file for part in summed.parts),
            file_rows=tuple(part.stop - part.start for part in summed.parts),
            positives=int(summed.chances[1].sum()),
        )
        if summed.chances.sum(axis=1).all():
            best[name] = binned_auc(summed.chances)
    shape = log.shape
    notes = {"generator": shape.name, "seed": log.seed, "rows_per_day": log.rows_per_day}
    raw = RAW_FORMATS[shape.text]
    return Schema(shape.label, numbers.dense, numbers.features, splits, raw_format=raw, best_auc=best, notes=notes)
