"""Exports of a large table: `python -m benchmarks.export [--rows 4000000] [--dim 16] [--out FILE.csv]`, about two minutes.

A model with one table is exported in every format and precision, without ONNX, each time in a process of its own: as a
vocabulary, whose rows stay in place, and as hashed ids, whose rows are gathered in the order of their counts. Before a figure
counts, 1,000 rows of the export are compared with those of the model within the bound of the precision. Told: seconds, MB of
rows read a second, MB written, and by how much private memory grew at most; mapped files are not private.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.results_file import append_rows
from hotbed.checkpoint.files import write_tensors
from hotbed.data.schema import IdFeature, Schema, Split
from hotbed.export.score import Export
from hotbed.export.write import ExportOptions, export
from hotbed.models import build_model
from hotbed.run.folder import write_folder

BOUNDS = {"fp32": 0.0, "fp16": 1 / 2048, "int8": 1 / 254}  # of the largest weight of a row


def write_model(folder: Path, rows: int, dim: int, mode: str, data: Path) -> None:
    """A model folder with one table, and a dataset that counts its ids."""
    feature = IdFeature("user", rows, mode=mode)  # type: ignore[arg-type]
    generator = np.random.default_rng(0)

    def fill(new: Path) -> None:
        Schema("click", (), (feature,), {}).save(new)
        model = build_model("dnn", num_features=1, dim=dim, num_dense=0, options={})
        write_tensors(new / "dense.safetensors", model.state_dict())
        write_tensors(new / "tables.safetensors", {"user.weight": torch.randn(rows, dim)})
        table = {"rows": rows, "dim": dim, "pooling": "sum", "hashing": mode == "hash"}
        built = {"name": "dnn", "num_features": 1, "dim": dim, "num_dense": 0, "options": {}}
        card = {"format_version": 1, "model": built, "tables": {"user": table}, "dataset": str(data)}
        (new / "model.json").write_text(json.dumps(card))
        (new / "counts").mkdir()
        if mode == "vocabulary":
            write_counts(new / "counts", np.arange(rows - 1), generator)

    write_folder(folder, fill)
    (data / "counts").mkdir(parents=True)
    Schema("click", (), (feature,), {"train": Split((), ())}).save(data)
    write_counts(data / "counts", generator.integers(0, 1 << 62, rows // 2), generator)


def write_counts(folder: Path, ids: np.ndarray, generator: np.random.Generator) -> None:
    counts = np.sort(generator.zipf(1.3, len(ids)).clip(max=1 << 40))[::-1]
    pq.write_table(pa.table({"id": ids, "count": counts}), folder / "user.parquet")


@contextmanager
def growth() -> Iterator[list[float]]:
    """MB by which private memory is larger than at the beginning, at most; looked at every 5 ms."""
    most, done, before = [0.0], threading.Event(), _private()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], _private() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def _private() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3


def check(out: Path, weight: np.ndarray, precision: str) -> None:
    """A thousand rows, within the bound."""
    ids = np.random.default_rng(1).integers(0, len(weight), 1000)
    wanted = weight[ids]
    off = np.abs(Export(out).tables["user"].look_up(ids) - wanted)
    bound = np.abs(wanted).max(axis=1, keepdims=True) * BOUNDS[precision] * (1 + 1e-5)
    assert (off <= bound).all(), f"rows of {precision} are off by {off.max()}"


def measure(place: Path, shape: tuple[int, int], rows: str, precision: str) -> dict[str, object]:
    """One export, checked."""
    wanted = ExportOptions(onnx=False, rows=rows, precision=precision, overwrite=True)  # type: ignore[arg-type]
    started = time.perf_counter()
    with growth() as most:
        done = export(place, place / "out", wanted)
    seconds = time.perf_counter() - started
    path = place / "model" / "tables.safetensors"
    header = path.stat().st_size - shape[0] * shape[1] * 4
    check(place / "out", np.memmap(path, np.float32, "r", offset=header, shape=shape), precision)
    return {
        "ids": place.name,
        "rows": shape[0],
        "dim": shape[1],
        "format": rows,
        "precision": precision,
        "seconds": round(seconds, 2),
        "read_mb_per_s": round(shape[0] * shape[1] * 4 / 1e6 / seconds),
        "written_mb": round(done.num_bytes / 1e6),
        "private_mb": round(most[0]),
    }


def main() -> None:
    """Measure, print, and append to a file where one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000, help="of the table (%(default)s)")
    parser.add_argument("--dim", type=int, default=16, help="of the table (%(default)s)")
    parser.add_argument("--out", help="append results to this CSV file")
    given = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("vocabulary", "hash"):
            place = Path(folder) / mode
            write_model(place / "model", given.rows, given.dim, mode, place / "data")
            for rows in ("safetensors", "parquet"):
                for precision in BOUNDS:
                    with ProcessPoolExecutor(1, spawn) as fresh:
                        results.append(fresh.submit(measure, place, (given.rows, given.dim), rows, precision).result())
                    print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    if given.out:
        append_rows(given.out, results)


if __name__ == "__main__":
    main()
