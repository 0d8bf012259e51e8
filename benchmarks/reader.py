"""The batch reader compared with pyarrow and torch's DataLoader: `python -m benchmarks.reader [--threads 2] [--csv FILE]`.

Criteo's columns (13 numbers, 26 ids, a label), drawn, written as a dataset in a temporary folder, read in batches of 16,384
from a warm file cache. Before anything is timed, batches in order must equal what pyarrow reads, and shuffled epochs hold the
same rows. Readers take turns; the best round of each counts.

pyarrow        reads the same columns of every row group, in a pool of as many threads or its own: the faster; no batches
in order       hotbed's batches, in the order on disk
shuffled       hotbed's batches, in the order of training
pinned         the same in page-locked memory, where there is a CUDA device
ids            hotbed's batches, shuffled, ids alone: what looking far ahead needs
DataLoader     over a map-style dataset of the same rows, shuffled, with the better of no and --threads worker processes:
  by row         a dataset of rows and one collate for a batch; the file is unpacked before, at no charge
  by batch       __getitems__ gives whole batches; unpacking the file is charged

arrow          what `hotbed prepare` writes
parquet        what hotbed 0.1 wrote: not packed, and dictionaries for columns of few values
zstd           Parquet packed with zstd

Bars: in order at 70 % of pyarrow (zstd) or more; shuffled (arrow) 5 times the DataLoader by row or more; with 16 threads or
more, shuffled (arrow) at 3 million samples/s or more. Exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import torch

from benchmarks.map_style import Batches, Rows, data_loader, unpack, workers_that_fit
from benchmarks.results_file import append_rows
from hotbed.data.arrow_file import ArrowWriter
from hotbed.data.dataset import Dataset, RowGroup
from hotbed.data.loader.loader import Loader
from hotbed.data.prepare.write import GROUP_ROWS, PART_ROWS
from hotbed.data.schema import Split
from hotbed.data.synthetic import SHAPES, write_dataset
from hotbed.types import Batch

BATCH, ROUNDS, MAP_ROWS = 16_384, 5, 1 << 19
FEW = 1 << 15  # distinct ids up to which a column of Parquet is stored as a dictionary
PLAIN: dict[str, Any] = {"compression": "none", "write_page_checksum": True}
PACKINGS = {"arrow": None, "parquet": PLAIN, "zstd": {**PLAIN, "compression": "zstd", "compression_level": 1}}

Reader = Callable[[], int]  # reads everything; how many rows


def make(folder: Path, rows: int, threads: int) -> dict[str, Dataset]:
    """The same rows in every packing."""
    write_dataset(folder / "drawn", shape=SHAPES["criteo-like"], train=rows, valid=0, test=0, threads=threads)
    drawn = Dataset.open(folder / "drawn")
    names = columns_of(drawn)
    files = dict.fromkeys(group.file for group in drawn.split("train"))
    table = pa.concat_tables(read_table(file) for file in files).select(names).combine_chunks()
    many = {feature.name for feature in drawn.schema.features if feature.distinct > FEW}
    starts = range(0, rows, PART_ROWS)
    sizes = tuple(min(PART_ROWS, rows - start) for start in starts)
    dictionary = [name for name in names if name not in many]
    found = {}
    for packing, options in PACKINGS.items():
        suffix = "arrow" if options is None else "parquet"
        parts = tuple(f"train/part-{number:05d}.{suffix}" for number in range(len(sizes)))
        (folder / packing / "train").mkdir(parents=True)
        for part, start, size in zip(parts, starts, sizes):
            path = folder / packing / part
            some = table.slice(start, size)
            if options is not None:
                pq.write_table(some, path, row_group_size=GROUP_ROWS, use_dictionary=dictionary, **options)
                continue
            with ArrowWriter(path, some.schema) as writer:
                writer.write(some, GROUP_ROWS)
        split = Split(parts, sizes, drawn.schema.splits["train"].positives)
        replace(drawn.schema, splits={"train": split}).save(folder / packing)
        found[packing] = Dataset.open(folder / packing)
    shutil.rmtree(folder / "drawn")
    return found


def read_table(file: Path) -> pa.Table:
    """All rows of a file."""
    return pq.read_table(file) if file.suffix == ".parquet" else pa.feather.read_table(file, memory_map=False)


def columns_of(dataset: Dataset) -> list[str]:
    schema = dataset.schema
    return [schema.label, *(column.name for column in schema.dense), *(feature.name for feature in schema.features)]


def check(dataset: Dataset, threads: int) -> None:
    """End the program unless hotbed reads what pyarrow reads."""
    files = dict.fromkeys(group.file for group in dataset.split("train"))
    table = pa.concat_tables(read_table(file) for file in files)
    names = columns_of(dataset)
    num_dense = len(dataset.schema.dense)
    start, expected = 0, np.empty(table.num_rows, dtype=np.uint64)
    for batch in Loader(dataset, "train", batch_size=BATCH, threads=threads).epoch(0):
        rows = table.slice(start, batch.size)
        columns = [batch.labels, *batch.dense.unbind(1), *batch.ids.unbind(1)]
        assert len(columns) == len(names) == 1 + num_dense + batch.ids.shape[1]
        for name, column in zip(names, columns):
            if not np.array_equal(rows[name].to_numpy(), column.numpy()):
                raise SystemExit(f"{dataset.path}: column {name} of the batch at row {start} is not what pyarrow reads")
        expected[start : start + batch.size] = row_hashes(batch)
        start += batch.size
    shuffled = Loader(dataset, "train", batch_size=BATCH, threads=threads, shuffle=True)
    found = np.concatenate([row_hashes(batch) for batch in shuffled.epoch(0)])
    if start != table.num_rows or not np.array_equal(np.sort(found), np.sort(expected)):
        raise SystemExit(f"{dataset.path}: a shuffled epoch does not hold the rows of the file")


def row_hashes(batch: Batch) -> np.ndarray:
    """A number for every row, out of all its values."""
    values = torch.cat([batch.labels[:, None], batch.dense], 1).view(torch.int32).to(torch.int64)
    values = torch.cat([values, batch.ids], 1).numpy().view(np.uint64)
    odd = np.random.default_rng(1).integers(1, 2**63, values.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return np.asarray((values * odd).sum(1, dtype=np.uint64))


def arrow_readers(dataset: Dataset, threads: int) -> list[Reader]:
    """pyarrow alone, row group by row group."""
    names, groups = columns_of(dataset), dataset.split("train")

    def decode(group: RowGroup, use_threads: bool = False) -> int:
        if group.batch is not None:
            with pa.OSFile(str(group.file)) as source, pa.ipc.open_file(source) as reader:
                return int(reader.get_batch(group.number).num_rows)
        with pq.ParquetFile(group.file, pre_buffer=False) as parquet:
            return int(parquet.read_row_group(group.number, columns=names, use_threads=use_threads).num_rows)

    def in_a_pool() -> int:
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(decode, groups))

    def by_itself() -> int:
        pa.set_cpu_count(threads)
        return sum(decode(group, use_threads=True) for group in groups)

    return [in_a_pool, by_itself]


def hotbed_readers(dataset: Dataset, threads: int) -> dict[str, list[Reader]]:
    def count(batches: Iterable[Batch]) -> int:
        return sum(batch.size for batch in batches)

    plain, shuffled, pinned = (
        Loader(dataset, "train", batch_size=BATCH, threads=threads, **options)
        for options in ({}, {"shuffle": True}, {"shuffle": True, "pin_memory": True})
    )
    found: dict[str, list[Reader]] = {
        "in order": [lambda: count(plain.epoch(0))],
        "shuffled": [lambda: count(shuffled.epoch(0))],
        "ids": [lambda: count(shuffled.id_batches(0))],
    }
    if torch.cuda.is_available():
        found["pinned"] = [lambda: count(pinned.epoch(0))]
    return found


def map_style_readers(dataset: Dataset, threads: int, folder: Path) -> dict[str, list[Reader]]:
    """DataLoaders over the first rows of the file."""
    schema = dataset.schema
    names = (schema.label, [one.name for one in schema.dense], [one.name for one in schema.features])
    groups = dataset.split("train")[: max(1, MAP_ROWS // GROUP_ROWS)]
    rows = sum(group.rows for group in groups)

    def unpacked() -> None:
        tables = []
        for group in groups:
            with pa.OSFile(str(group.file)) as source, pa.ipc.open_file(source) as reader:
                tables.append(pa.Table.from_batches([reader.get_batch(group.number).select(columns_of(dataset))]))
        unpack(tables, names, folder)

    unpacked()
    workers = workers_that_fit(threads, BATCH * 264)
    row_wise = [data_loader(Rows(folder, rows), BATCH, count) for count in {0, workers}]
    batch_wise = [data_loader(Batches(folder, rows), BATCH, count) for count in {0, workers}]
    for loader in (*row_wise, *batch_wise):  # processes start
        sum(len(labels) for labels, _, _ in loader)

    def by_row(loader: Any) -> int:
        return sum(len(labels) for labels, _, _ in loader)

    def by_batch(loader: Any) -> int:
        unpacked()
        return by_row(loader)

    return {
        "DataLoader by row": [lambda loader=loader: by_row(loader) for loader in row_wise],
        "DataLoader by batch": [lambda loader=loader: by_batch(loader) for loader in batch_wise],
    }


class Speed(NamedTuple):
    """Of one reader: the best way and round."""

    samples_s: float = 0.0
    cpu_ns: float = math.inf  # of all threads, for a sample; steadier than samples/s where others use the machine


def best_speeds(readers: dict[str, list[Reader]]) -> dict[str, Speed]:
    found = dict.fromkeys(readers, Speed())
    for _ in range(ROUNDS):
        for name, ways in readers.items():
            for way in ways:
                began, used = time.perf_counter(), time.process_time()
                rows = way()
                speed = rows / (time.perf_counter() - began)
                cpu = (time.process_time() - used) / rows * 1e9
                found[name] = Speed(max(found[name].samples_s, speed), min(found[name].cpu_ns, cpu))
    return found


def bars(found_speeds: dict[tuple[str, str], Speed], threads: int) -> list[str]:
    """A line for every bar; those that are missed begin with MISSED."""
    speeds = {name: speed.samples_s for name, speed in found_speeds.items()}
    found = [("in order, zstd, of pyarrow", speeds["zstd", "in order"] / speeds["zstd", "pyarrow"], 0.7)]
    if ("arrow", "DataLoader by row") in speeds:
        times = speeds["arrow", "shuffled"] / speeds["arrow", "DataLoader by row"]
        found.append(("shuffled, times the DataLoader by row", times, 5.0))
    if threads >= 16:
        found.append(("shuffled, million samples/s", speeds["arrow", "shuffled"] / 1e6, 3.0))
    return [f"{'met   ' if value >= bar else 'MISSED'} {name}: {value:.2f}, bar {bar}" for name, value, bar in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1 << 22, help="1 KiB of memory and 0.4 KB of disk each")
    parser.add_argument("--threads", type=int, default=2, help="of every reader")
    parser.add_argument("--folder", type=Path, help="where files are made; a folder for temporary files if not given")
    parser.add_argument(
        "--no-dataloader", action="store_true", help="leave out torch's DataLoader, which takes longest"
    )
    parser.add_argument("--csv", default="", help="file to append the table to")
    asked = parser.parse_args()
    if asked.rows < 1 or asked.threads < 1:
        parser.error(f"--rows {asked.rows} --threads {asked.threads}: both must be at least 1")
    folder = Path(tempfile.mkdtemp(prefix="hotbed-reader-", dir=asked.folder))
    speeds: dict[tuple[str, str], Speed] = {}
    try:
        for packing, dataset in make(folder, asked.rows, asked.threads).items():
            check(dataset, asked.threads)
            readers = {"pyarrow": arrow_readers(dataset, asked.threads), **hotbed_readers(dataset, asked.threads)}
            if packing == "arrow" and not asked.no_dataloader:
                readers |= map_style_readers(dataset, asked.threads, folder)
            speeds |= {(packing, name): speed for name, speed in best_speeds(readers).items()}
    finally:
        shutil.rmtree(folder)
    print(f"{'packing':8} {'reader':20} {'samples/s':>12} {'of pyarrow':>11} {'cpu ns':>7} {'of pyarrow':>11}")
    results = []
    for (packing, name), speed in speeds.items():
        arrow = speeds[packing, "pyarrow"]
        cpu_ns = math.nan if "DataLoader" in name else speed.cpu_ns  # worker processes are not counted
        share, cpu_share = speed.samples_s / arrow.samples_s, arrow.cpu_ns / cpu_ns
        print(f"{packing:8} {name:20} {speed.samples_s:12,.0f} {share:11.2f} {cpu_ns:7.0f} {cpu_share:11.2f}")
        sizes = {"threads": asked.threads, "rows": asked.rows, "batch": BATCH}
        results.append({"benchmark": "reader", "packing": packing, "reader": name, **sizes})
        results[-1] |= {"samples_per_s": round(speed.samples_s), "of_pyarrow": round(share, 3)}
        results[-1] |= {"cpu_ns": round(cpu_ns, 1), "cpu_of_pyarrow": round(cpu_share, 3)}
        results[-1] |= {"pyarrow": pa.__version__}
    if asked.csv:
        append_rows(asked.csv, results)
    lines = bars(speeds, asked.threads)
    print("\n".join(lines))
    return 1 if any(line.startswith("MISSED") for line in lines) else 0


if __name__ == "__main__":
    raise SystemExit(main())
