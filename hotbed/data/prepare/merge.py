"""The id lists of all pieces in; per table, its vocabulary, its counts file and the statistics of its features out.

Tables are independent, so only the ids of a few are in memory at a time. A table is counted exactly if its distinct ids fit
into the given memory. Otherwise a sketch (sketches.py) first finds every id that may occur more than E times; a second pass
counts those exactly and keeps the ids that do. So a vocabulary is never approximate: it is that of `min_count` E + 1, and every
count in the file is exact.

`feature-i.rows` holds, piece after piece, the row of every number of the piece, for pass 2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotbed.data.prepare.arrays import ArrayFile, write_whole
from hotbed.data.prepare.sketches import HeavyHitters, HyperLogLog
from hotbed.data.schema import IdFeature, IdMode
from hotbed.data.vocabulary import Numbering
from hotbed.host.atomic import rewriting

IdCounts = tuple[NDArray[np.int64], NDArray[np.int64]]  # distinct ids, and how often each occurs
BYTES_OF_ID = 72  # table, growth of the table, and sorting


class IdRule(NamedTuple):
    """How 64-bit ids are stored."""

    mode: IdMode
    min_count: int = 1  # of a vocabulary
    rows: int | None = None  # of the hashing trick


class CountedPiece(NamedTuple):
    """A piece and its rows in train."""

    path: Path
    rows: int
    train: tuple[int, int]  # begin, end
    whole: bool  # the counts in the file are for exactly these rows


class _Vocabulary(NamedTuple):
    """Ids of train and their exact counts; numbers are those of `table`."""

    table: Numbering
    counts: NDArray[np.int64]
    distinct: int
    error: int  # ids with counts up to this one are not all in the table
    estimate: int
    lookups: Mapping[int, int]  # of each feature


def merge_table(
    features: Mapping[int, IdFeature], pieces: list[CountedPiece], rule: IdRule, memory: int, work: Path
) -> None:
    """Count the features of one table, by number; writes counts/TABLE.parquet, then work/feature-i.rows and feature-i.json."""
    found = _count(features, pieces, memory)
    least = max(rule.min_count, found.error + 1)
    kept = np.flatnonzero(found.counts >= least)
    ids = found.table.ids
    kept = kept[np.lexsort((ids[kept], -found.counts[kept]))]
    listed = pa.table({"id": ids[kept], "count": found.counts[kept]})
    path = work.parent / "counts" / f"{next(iter(features.values())).table}.parquet"
    with rewriting(path, unique=True) as temporary:
        pq.write_table(listed, temporary, compression="zstd")
    row_of_number = np.zeros(len(ids) + 1, dtype=np.int32)  # the last entry, index -1, is for ids not in the table
    row_of_number[kept] = np.arange(1, len(kept) + 1, dtype=np.int32)
    num_kept, unlisted = len(kept), sum(found.lookups.values()) - int(found.counts[kept].sum())
    del kept, listed
    for number, feature in features.items():
        if rule.mode == "vocabulary":
            rows = work / f"feature-{number}.rows"
            with rewriting(rows, unique=True) as temporary, temporary.open("wb", buffering=1 << 20) as file:
                for piece in pieces:
                    with ArrayFile(piece.path) as arrays:
                        file.write(row_of_number[found.table.find(arrays.read(f"ids.{number}"))].data)
        done = replace(
            feature,
            rows=num_kept + 1 if rule.mode == "vocabulary" else rule.rows or 0,
            mode=rule.mode,
            distinct=found.estimate if found.error else found.distinct,
            counting="sketch" if found.error else "exact",
            count_error=found.error,
            distinct_estimate=found.estimate,
            lookups=found.lookups[number],
            unlisted_lookups=unlisted
            if len(features) == 1 or not unlisted
            else _unlisted(_lists(number, feature, pieces), found.table, row_of_number),
        )
        write_whole(work / f"feature-{number}.json", json.dumps(asdict(done)))


def _unlisted(lists: Iterator[IdCounts], table: Numbering, row_of_number: NDArray[np.int32]) -> int:
    """How many ids of a feature in train are not in the counts file."""
    return sum(int(counts[row_of_number[table.find(ids)] == 0].sum()) for ids, counts in lists)


def load_feature(number: int, work: Path) -> IdFeature | None:
    """A feature that was merged already, or None."""
    path = work / f"feature-{number}.json"
    return IdFeature(**json.loads(path.read_text())) if path.is_file() else None


def _count(features: Mapping[int, IdFeature], pieces: list[CountedPiece], memory: int) -> _Vocabulary:
    most_ids = max(memory // BYTES_OF_ID, 16)
    distinct = HyperLogLog()
    table: Numbering | None = Numbering()
    sketch: HeavyHitters | None = None
    lookups = dict.fromkeys(features, 0)
    for number, feature in features.items():
        for ids, counts in _lists(number, feature, pieces):
            distinct.add(ids)
            lookups[number] += int(counts.sum())
            if table is not None:
                table.add(ids, counts)
                if len(table) > most_ids:
                    sketch = HeavyHitters(max(memory // 2, 512))
                    sketch.add(table.ids, table.counts)
                    table = None
            elif sketch is not None:
                sketch.add(ids, counts)
    estimate = round(distinct.estimate())
    if table is not None:
        return _Vocabulary(table, table.counts, len(table), 0, estimate, lookups)
    assert sketch is not None
    error = sketch.error
    candidates = sketch.items().ids
    del sketch
    table = Numbering()
    table.add(candidates, np.zeros(len(candidates), dtype=np.int64))
    del candidates
    for number, feature in features.items():
        for ids, counts in _lists(number, feature, pieces):
            known = table.find(ids) >= 0
            table.add(ids[known], counts[known])
    return _Vocabulary(table, table.counts, estimate, error, estimate, lookups)


def _lists(number: int, feature: IdFeature, pieces: list[CountedPiece]) -> Iterator[IdCounts]:
    """The ids of every piece that occur in train, and how often."""
    for piece in pieces:
        begin, end = piece.train
        if begin == end:
            continue
        with ArrayFile(piece.path) as arrays:
            ids = arrays.read(f"ids.{number}")
            if piece.whole:
                counts = arrays.read(f"counts.{number}")
            else:
                if feature.multi:
                    offsets = arrays.read(f"offsets.{number}")
                    begin, end = int(offsets[begin]), int(offsets[end])
                counts = np.bincount(arrays.read(f"numbers.{number}", begin, end), minlength=len(ids))
        seen = counts > 0
        yield (ids, counts) if seen.all() else (ids[seen], counts[seen])
