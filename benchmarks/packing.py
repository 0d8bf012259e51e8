"""How Parquet files of Criteo's columns are read fastest: `python -m benchmarks.packing [--rows N] [--csv FILE]`, a minute.

The same rows (13 numbers, 26 ids, a label; drawn) are written in several ways and decoded by pyarrow, row group by row group
on one thread, from a warm file cache. What every file holds is compared first. Told are bytes a row and ns of CPU time a row,
the best of some rounds in which the ways take turns: steadier than the wall clock where others use the machine. In the end
the checksum of hotbed's reader over the bytes of the file that `hotbed prepare` would write, compared with zlib's.

nulls          columns say that they may hold nulls (they hold none)
row group      rows of a row group; 65,536 where nothing is said
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.reader import FEW, columns_of
from benchmarks.results_file import append_rows
from hotbed.data.dataset import Dataset
from hotbed.data.loader.crc import crc32
from hotbed.data.prepare.write import GROUP_ROWS, WRITING
from hotbed.data.synthetic import SHAPES, write_dataset

ROUNDS = 7
LZ4, ZSTD = {"compression": "lz4"}, {"compression": "zstd", "compression_level": 1}
PREPARE = "none"
WAYS: dict[str, dict[str, Any]] = {
    PREPARE: {},
    "none, nulls": {"nulls": True},
    "lz4": LZ4,
    "lz4, nulls": {**LZ4, "nulls": True},
    "zstd": ZSTD,
    "zstd, nulls": {**ZSTD, "nulls": True},
    "none, no dictionaries": {"use_dictionary": False},
    "none, row group 16,384": {"row_group_size": 1 << 14},
}


def drawn(folder: Path, rows: int) -> tuple[pa.Table, list[str]]:
    """Rows of a click log without nulls, and the columns of few values."""
    write_dataset(folder / "drawn", shape=SHAPES["criteo-like"], train=rows, valid=0, test=0, threads=2)
    dataset = Dataset.open(folder / "drawn")
    files = dict.fromkeys(group.file for group in dataset.split("train"))
    table = pa.concat_tables(pq.read_table(file, columns=columns_of(dataset)) for file in files).combine_chunks()
    many = {feature.name for feature in dataset.schema.features if feature.distinct > FEW}
    return as_nullable(table, False), [name for name in table.column_names if name not in many]


def as_nullable(table: pa.Table, nulls: bool) -> pa.Table:
    return table.cast(pa.schema([field.with_nullable(nulls) for field in table.schema]))


def write(table: pa.Table, few: list[str], file: Path, way: dict[str, Any]) -> None:
    """One file in one way; what it holds is compared with the rows."""
    options = {**WRITING, "use_dictionary": few, "row_group_size": GROUP_ROWS, **way}
    given = as_nullable(table, options.pop("nulls", False))
    pq.write_table(given, file, **options)
    if not pq.read_table(file).equals(given):
        raise SystemExit(f"{file} does not hold the rows that were written")


def decode(file: Path) -> None:
    with pq.ParquetFile(file, pre_buffer=False) as parquet:
        for group in range(parquet.num_row_groups):
            parquet.read_row_group(group, use_threads=False)


def best_seconds(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """CPU seconds of each, the best of rounds in which they take turns."""
    found = dict.fromkeys(works, math.inf)
    for _ in range(ROUNDS):
        for name, work in works.items():
            began = time.process_time()
            work()
            found[name] = min(found[name], time.process_time() - began)
    return found


def checksums(file: Path) -> dict[str, Callable[[], object]]:
    """Both checksums over the bytes of a file; they must be equal."""
    content = np.fromfile(file, dtype=np.uint8)
    if crc32(content.ctypes.data, content.size) != zlib.crc32(content):
        raise SystemExit("the checksum of hotbed's reader is not zlib's")
    return {
        "checksum, hotbed": lambda: crc32(content.ctypes.data, content.size),
        "checksum, zlib": lambda: zlib.crc32(content),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, default=1 << 20, help="1 KiB of memory and 0.7 KB of disk each (%(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="where files are made; a folder for temporary files if not given")
    parser.add_argument("--csv", default="", help="file to append the table to")
    asked = parser.parse_args()
    if asked.rows < 1:
        parser.error(f"--rows {asked.rows}: it must be at least 1")
    with tempfile.TemporaryDirectory(prefix="hotbed-packing-", dir=asked.folder) as name:
        table, few = drawn(Path(name), asked.rows)
        files = {way: Path(name) / f"{number}.parquet" for number, way in enumerate(WAYS)}
        for way, options in WAYS.items():
            write(table, few, files[way], options)
        works: dict[str, Callable[[], object]] = {way: lambda file=file: decode(file) for way, file in files.items()}
        seconds = best_seconds(works) | best_seconds(checksums(files[PREPARE]))
        sizes = {way: file.stat().st_size / asked.rows for way, file in files.items()}
    print(f"{'way':24} {'bytes a row':>12} {'CPU ns a row':>13}")
    rows = []
    for way, taken in seconds.items():
        size, ns = sizes.get(way, sizes[PREPARE]), taken / asked.rows * 1e9
        print(f"{way:24} {size:12.0f} {ns:13.1f}")
        rows.append(
            {"benchmark": "packing", "way": way, "rows": asked.rows, "bytes": round(size, 1), "ns": round(ns, 1)}
        )
    if asked.csv:
        append_rows(asked.csv, rows)


if __name__ == "__main__":
    main()
