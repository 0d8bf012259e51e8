"""DIN and a DNN on what users did before: Gowalla's lists of check-ins as samples with a history.

    python -m benchmarks.histories --rows 200000 --epochs 2

A positive sample is an item of a user's list with the items before it as history; a negative one has an item drawn by
popularity instead, which the user has not visited. Train and test are different users, so what is learned about a user does
not help: only the history does. The DNN reads the mean of the history's vectors, DIN weighs them by the item. Both are trained
with a table for each column, and with one for both (`prepare --share history=item`). Raw files are searched in HOTBED_DATA or
../shared/data.
"""

from __future__ import annotations

import argparse
import csv
import lzma
import os
import tempfile
from pathlib import Path

import numpy as np

import hotbed

LENGTH, LEAST = 20, 5  # items of a history, at most and at least


def read_lists(folder: Path) -> list[list[int]]:
    """The items of every user, in the order of the file."""
    text = lzma.decompress((folder / "gowalla_train.txt.xz").read_bytes()).decode()
    return [[int(one) for one in line.split()[1:]] for line in text.splitlines() if line.strip()]


def write_log(lists: list[list[int]], path: Path, num_rows: int, seed: int) -> None:
    """A CSV of label, item and history."""
    draws = np.random.default_rng(seed)
    everything = np.concatenate([np.array(one, dtype=np.int64) for one in lists])
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "item", "history"])
        written = 0
        while written < num_rows:
            items = lists[draws.integers(len(lists))]
            if len(items) <= LEAST:
                continue
            place = int(draws.integers(LEAST, len(items)))
            other = int(everything[draws.integers(len(everything))])
            if other in items:
                continue
            history = "|".join(f"i{one}" for one in items[max(0, place - LENGTH) : place])
            writer.writerow([1, f"i{items[place]}", history])
            writer.writerow([0, f"i{other}", history])
            written += 2


def measure(data: Path, out: Path, model: str, options: argparse.Namespace, seed: int) -> float:
    """The test AUC of one run."""
    settings = {
        "train.seed": seed,
        "data.batch_size": 256,
        "model.dim": 16,
        "train.device": "cpu",
        "tables.lr": options.lr,
    }
    if model != "dnn":
        settings |= {"model.options.target": "item", "model.options.softmax": "softmax" in model}
    run = hotbed.fit(
        model.split(maxsplit=1)[0], str(data), out=out, epochs=options.epochs, settings=settings, quiet=True
    )
    return float(run.summary["final"]["test"]["auc"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="samples, of which a tenth of the users' are test")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the train split")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each model")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of the rows (Adagrad)")
    options = parser.parse_args(arguments)
    folder = Path(os.environ.get("HOTBED_DATA", "../shared/data"))
    lists = read_lists(folder)
    with tempfile.TemporaryDirectory() as work:
        place = Path(work)
        border = len(lists) * 9 // 10
        write_log(lists[:border], place / "train.csv", options.rows * 9 // 10, 0)
        write_log(lists[border:], place / "test.csv", options.rows // 10, 1)
        inputs = [f"train={place / 'train.csv'}", f"test={place / 'test.csv'}"]
        for name, share in (("two tables", {}), ("one table", {"history": "item"})):
            data = place / name
            hotbed.prepare(inputs, data, sequence=[f"history:|:{LENGTH}"], share=share, min_count=2)
            for model in ("dnn", "din", "din softmax"):
                found = [
                    measure(data, place / f"{name}-{model}-{seed}", model, options, seed)
                    for seed in range(options.seeds)
                ]
                shown = ", ".join(f"{one:.4f}" for one in found)
                print(f"{model}, {name}: test AUC {np.mean(found):.4f} ({shown})", flush=True)


if __name__ == "__main__":
    main()
