"""Small dataset directories made by hand, for the tests of what reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather

from hotbed.data.arrow_file import ArrowWriter
from hotbed.data.schema import DenseColumn, IdFeature, Schema, Split

ROWS = 1000  # of every vocabulary


def make_table(rows: int, first: int = 0, bags: bool = False) -> pa.Table:
    """Row i of the split has number i in column `b`, so that orders can be read off."""
    number = np.arange(first, first + rows)
    columns = {
        "label": (number % 3 == 0).astype(np.float32),
        "x": (number / 7).astype(np.float32),
        "y": -number.astype(np.float32),
        "a": (number * 7 % ROWS).astype(np.int32),
        "b": number.astype(np.int64) + (1 << 40),
    }
    table = pa.table(columns)
    if bags:
        lists = [[int(n) % ROWS] * (int(n) % 4) for n in number]
        table = table.append_column("tags", pa.array(lists, type=pa.list_(pa.int32())))
    return table


def write_rows(table: pa.Table, path: Path, row_group: int = 10) -> None:
    """A file of rows, Arrow or Parquet by its name."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=row_group)
        return
    with ArrowWriter(path, table.schema) as writer:
        writer.write(table, row_group)


def read_rows(path: Path) -> pa.Table:
    """What a file of rows holds."""
    return pq.read_table(path) if path.suffix == ".parquet" else feather.read_table(path, memory_map=False)


def make_dataset(
    directory: Path, sizes: dict[str, list[int]], row_group: int = 10, bags: bool = False, kind: str = "arrow"
) -> Schema:
    """A dataset whose splits have files of the given sizes."""
    splits = {}
    for name, file_rows in sizes.items():
        (directory / name).mkdir(parents=True)
        files, first, positives = [], 0, 0
        for number, rows in enumerate(file_rows):
            files.append(f"{name}/part-{number:05d}.{kind}")
            table = make_table(rows, first, bags)
            write_rows(table, directory / files[-1], row_group)
            positives += int(np.sum(table["label"].to_numpy()))
            first += rows
        splits[name] = Split(tuple(files), tuple(file_rows), positives)
    features = (IdFeature("a", ROWS), IdFeature("b", 50, mode="hash"))
    if bags:
        features += (IdFeature("tags", ROWS, multi=True),)
    schema = Schema("label", (DenseColumn("x"), DenseColumn("y")), features, splits)
    schema.save(directory)
    (directory / "counts").mkdir()
    for feature in features:
        counts = pa.table({"id": np.arange(ROWS - 1), "count": np.arange(ROWS - 1, 0, -1)})
        pq.write_table(counts, directory / "counts" / f"{feature.name}.parquet")
    return schema


def replace_column(path: Path, name: str, values: pa.Array, row_group: int = 10) -> None:
    """Write a part file again with one column changed."""
    table = read_rows(path)
    write_rows(table.set_column(table.column_names.index(name), name, values), path, row_group)
