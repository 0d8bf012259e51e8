"""Drawing click logs compared with reading them, in one run: `python -m benchmarks.synthetic [--rows 1000000] [--csv FILE]`.

draw     rows/s that the generator gives, bags included
read     rows/s that hotbed's loader gives from a dataset of the same rows, batches of 16,384, file cache warm, no shuffling
text     MB/s of raw text, drawn, rendered and written
write    rows/s of a dataset directory, both passes

Before anything is timed, the labels read must be those drawn. Drawing and reading take turns; the best round of each counts.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.results_file import append_rows
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.data.synthetic import SHAPES, ClickLog, write_dataset, write_text

BATCH, ROUNDS = 16_384, 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of every log (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="to draw and to read with (%(default)s)")
    parser.add_argument("--only", default="", help="shapes whose name holds this text")
    parser.add_argument("--folder", type=Path, help="where files are made; a folder for temporary files if not given")
    parser.add_argument("--csv", default="", help="file to append the table to")
    asked = parser.parse_args()
    found = []
    print(f"{'log':22} {'draw rows/s':>12} {'read rows/s':>12} {'ratio':>6} {'text MB/s':>10} {'write rows/s':>13}")
    for name in SHAPES:
        if asked.only not in name:
            continue
        root = Path(tempfile.mkdtemp(prefix="hotbed-synthetic-", dir=asked.folder))
        try:
            result = measure(name, asked.rows, asked.threads, root)
        finally:
            shutil.rmtree(root)
        text = f"{result['text_mb_s']:10,.0f}" if result["text_mb_s"] else f"{'-':>10}"
        print(
            f"{name:22} {result['draw_rows_s']:12,.0f} {result['read_rows_s']:12,.0f} {result['ratio']:6.2f} {text} "
            f"{result['write_rows_s']:13,.0f}",
            flush=True,
        )
        found.append({"log": name, "rows": asked.rows, "threads": asked.threads, **result})
    if asked.csv:
        append_rows(asked.csv, found)
    slower = [result["log"] for result in found if result["ratio"] < 1]
    print(
        f"slower than reading: {', '.join(map(str, slower))}" if slower else "all are drawn faster than they are read"
    )
    return 1 if slower else 0


def measure(name: str, rows: int, threads: int, root: Path) -> dict[str, float]:
    """All figures of one shape."""
    shape = SHAPES[name]
    log = ClickLog(shape)
    write_dataset(root / "warm", shape=shape, train=1_000, valid=0, test=0, threads=threads)  # compiles all there is
    writing = seconds_of(
        lambda: write_dataset(root / "data", shape=shape, train=rows, valid=0, test=0, threads=threads)
    )
    loader = Loader(Dataset.open(root / "data"), "train", batch_size=BATCH, threads=threads)
    labels = np.concatenate([batch.labels.numpy() for batch in loader.epoch(0)])
    if not np.array_equal(labels, log.rows(0, rows, threads).labels):
        raise SystemExit(f"{name}: the rows read are not the rows drawn")
    draws, reads = [], []
    for _ in range(ROUNDS):
        draws.append(seconds_of(lambda: draw(log, rows, threads)))
        reads.append(seconds_of(lambda: read(loader)))
    text = 0.0
    if shape.text:
        write_text(root / "warm.txt", log, 0, 1_000)
        last = min(seconds_of(lambda: write_text(root / "text", log, 0, rows, threads=threads)) for _ in range(2))
        text = (root / "text").stat().st_size / 1e6 / last
    return {
        "draw_rows_s": round(rows / min(draws)),
        "read_rows_s": round(rows / min(reads)),
        "ratio": round(min(reads) / min(draws), 3),
        "text_mb_s": round(text, 1),
        "write_rows_s": round(rows / writing),
    }


def draw(log: ClickLog, rows: int, threads: int) -> None:
    """Every row once, a slice at a time, as a consumer would."""
    step = 32 * BATCH
    for start in range(0, rows, step):
        drawn = log.rows(start, min(start + step, rows), threads)
        for number, column in enumerate(log.shape.ids):
            if column.bag > 1:
                log.bags(number, drawn.ids[number])


def read(loader: Loader) -> None:
    for _ in loader.epoch(0):
        pass


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
