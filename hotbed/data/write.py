"""Pass 2 of prepare: parsed rows in, the Parquet files and id counts of a dataset out.

Numbers of ids become rows of the vocabulary (row 0: unknown, then most frequent first, ties by id) or, with the hashing
trick and for dynamic ids, the 64-bit ids again. Parts of about a million rows are written side by side, each in row groups of
65,536 rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.data.parse import Parsed, ParsedSplit, Progress
from hotbed.data.schema import DenseColumn, IdFeature, IdMode, Split
from hotbed.data.values import standardise
from hotbed.data.vocabulary import Numbering

GROUP_ROWS = 1 << 16
PART_ROWS = 1 << 20
_FEW = 1 << 15  # distinct ids; above, a dictionary costs a fifth of the writing time and a seventh of the size
_MOST_THREADS = 4  # each holds a row group and its Parquet pages, some 50 MB


class Written(NamedTuple):
    """The parts of the schema that pass 2 finds."""

    dense: tuple[DenseColumn, ...]
    features: tuple[IdFeature, ...]
    splits: dict[str, Split]


class _Finish(NamedTuple):
    """How temporary columns become final ones."""

    schema: pa.Schema
    dense: tuple[DenseColumn, ...]
    value_of_number: list[np.ndarray]  # per feature: row (int32) or id (int64) of every number
    few_values: list[str]  # columns that Parquet stores better as a dictionary


class IdRule(NamedTuple):
    """What becomes of 64-bit ids."""

    mode: IdMode
    min_count: int = 1  # of a vocabulary
    rows: int | None = None  # of the hashing trick


def write_dataset(parsed: Parsed, directory: Path, *, rule: IdRule, progress: Callable[[Progress], None]) -> Written:
    """Write counts and splits; the temporary files are deleted as they are used up."""
    (directory / "counts").mkdir()
    features, values = [], []
    for feature in parsed.layout.features:
        numbering = parsed.numberings.pop(0)  # its memory is free once its rows are known
        path = directory / "counts" / f"{feature.name}.parquet"
        done, value_of_number = _finish_feature(feature, numbering, rule, path)
        features.append(done)
        values.append(value_of_number)
    dense = tuple(moments.fit(spec) for moments, spec in zip(parsed.moments, parsed.layout.dense))
    fields = [pa.field(parsed.layout.label, pa.float32()), *(pa.field(spec.name, pa.float32()) for spec in dense)]
    for feature in features:
        kind = pa.int32() if rule.mode == "vocabulary" else pa.int64()
        fields.append(pa.field(feature.name, pa.list_(kind) if feature.multi else kind))
    few_values = [parsed.layout.label, *(spec.name for spec in dense)]
    few_values += [feature.name for feature in features if feature.distinct <= _FEW]
    finish = _Finish(pa.schema(fields), dense, values, few_values)
    total = sum(split.rows for split in parsed.splits.values())
    splits: dict[str, Split] = {}
    for name, split in parsed.splits.items():
        before = sum(done.rows for done in splits.values())

        def report(rows: int, before: int = before) -> None:
            progress(Progress("writing", before + rows, total, before + rows))

        splits[name] = _write_split(name, split, finish, directory, report)
        split.path.unlink()
    return Written(dense, tuple(features), splits)


def _finish_feature(feature: IdFeature, numbering: Numbering, rule: IdRule, path: Path) -> tuple[IdFeature, np.ndarray]:
    """Write the feature's counts; (its final description, the value of each number)."""
    ids, counts = numbering.ids, numbering.counts
    distinct = int(np.count_nonzero(counts))
    kept = np.flatnonzero(counts >= rule.min_count)
    kept = kept[np.lexsort((ids[kept], -counts[kept]))]
    pq.write_table(pa.table({"id": ids[kept], "count": counts[kept]}), path, compression="zstd")
    if rule.mode != "vocabulary":
        return replace(feature, rows=rule.rows or 0, mode=rule.mode, distinct=distinct), ids
    rows = np.zeros(len(ids), dtype=np.int32)
    rows[kept] = np.arange(1, len(kept) + 1, dtype=np.int32)
    return replace(feature, rows=len(kept) + 1, mode="vocabulary", distinct=distinct), rows


def _write_split(
    name: str, split: ParsedSplit, finish: _Finish, directory: Path, report: Callable[[int], None]
) -> Split:
    (directory / name).mkdir()
    starts = range(0, split.rows, PART_ROWS)
    sizes = [min(PART_ROWS, split.rows - begin) for begin in starts]
    files = [f"{name}/part-{number:05d}.parquet" for number in range(len(sizes))]

    def write(number: int) -> int:
        path = directory / files[number]
        options = {"compression": "zstd", "compression_level": 1, "use_dictionary": finish.few_values}
        with pq.ParquetWriter(path, finish.schema, **options) as writer:
            for group in _groups(split, starts[number], sizes[number]):
                writer.write_table(_finished(group, finish), row_group_size=GROUP_ROWS)
        return sizes[number]

    done = 0
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as threads:
        for rows in threads.map(write, range(len(sizes))):
            done += rows
            report(done)
    return Split(tuple(files), tuple(sizes), split.positives)


def _groups(split: ParsedSplit, begin: int, rows: int) -> Iterator[pa.Table]:
    """Rows begin .. begin + rows of a temporary file, GROUP_ROWS at a time."""
    with pa.memory_map(str(split.path)) as source:
        reader = pa.ipc.open_file(source)
        waiting: list[pa.RecordBatch] = []
        count = 0
        first = 0  # row where the next batch starts
        for number, batch_rows in enumerate(split.batch_rows):
            low, high = max(begin - first, 0), min(begin + rows - first, batch_rows)
            first += batch_rows
            if low >= high:
                continue
            waiting.append(reader.get_batch(number).slice(low, high - low))
            count += high - low
            while count >= GROUP_ROWS:
                table = pa.Table.from_batches(waiting)
                yield table.slice(0, GROUP_ROWS)
                waiting = table.slice(GROUP_ROWS).to_batches()
                count -= GROUP_ROWS
        if count:
            yield pa.Table.from_batches(waiting)


def _finished(group: pa.Table, finish: _Finish) -> pa.Table:
    columns = [column.combine_chunks() for column in group.columns]
    num_dense = len(finish.dense)
    arrays = [columns[0]]
    for spec, column in zip(finish.dense, columns[1 : 1 + num_dense]):
        arrays.append(pa.array(standardise(column.to_numpy(), spec)))
    for values, column in zip(finish.value_of_number, columns[1 + num_dense :]):
        if pa.types.is_large_list(column.type):
            offsets = column.offsets.to_numpy()
            numbers = column.values.to_numpy()[offsets[0] : offsets[-1]]
            offsets = (offsets - offsets[0]).astype(np.int32)
            arrays.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values[numbers])))
        else:
            arrays.append(pa.array(values[column.to_numpy()]))
    return pa.Table.from_arrays(arrays, schema=finish.schema)
