"""Test AUC with rows of int8 in host memory, compared with float32, through `hotbed train`.

    python -m benchmarks.int8 [--logs criteo,frappe] [--seeds 0,1,2] [--optimizer rowwise_adagrad]

Each pair differs in tables.store_precision alone. The cache is nearly the smallest that holds a batch, so that most rows
leave it again and again. Prints the table of docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.accuracy.__main__ import prepare
from benchmarks.kstep_train import LOGS
from benchmarks.results_file import append_rows

RESULTS = "benchmarks/results/int8.csv"
CACHE = {"criteo": "0.33", "frappe": "0.29"}  # batches need 0.30 and 0.26
RATES = {"rowwise_adagrad": "0.05", "adam": "0.001"}


def measure(log: str, optimizer: str, store: str, seed: int) -> dict[str, object]:
    """One training; the row of the file."""
    named = {text.partition("=")[0]: text.partition("=")[2] for text in LOGS[log]}
    named |= {"tables.optimizer": optimizer, "tables.lr": RATES[optimizer], "tables.store_precision": store}
    named |= {"data.eval_batch_size": named["data.batch_size"]} | ({} if optimizer == "adam" else {"tables.l2": "0"})
    settings = [word for name, value in named.items() for word in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hotbed", "train", *settings, "--cache", CACHE[log], "--seed", str(seed)]
        subprocess.run(
            [*command, "--out", f"{folder}/run", "--quiet"],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "HOTBED_LOG": "quiet"},
        )
        auc = json.loads(Path(folder, "run", "summary.json").read_text())["final"]["test"]["auc"]
    return {
        "benchmark": "int8",
        "log": log,
        "optimizer": optimizer,
        "store_precision": store,
        "cache": CACHE[log],
        "seed": seed,
        "auc": round(auc, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", default="criteo,frappe", help="of criteo and frappe (%(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="of every case (%(default)s)")
    parser.add_argument("--optimizer", default="rowwise_adagrad", choices=RATES, help="of the rows (%(default)s)")
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for log, seed, store in itertools.product(args.logs.split(","), args.seeds.split(","), ("same", "int8")):
        prepare(log)
        row = measure(log, args.optimizer, store, int(seed))
        append_rows(RESULTS, [row])
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        found[log][store].append(float(str(row["auc"])))
    print("| log | float32: seeds | int8: seeds | change of the mean |\n|---|---|---|---|")
    for log, aucs in found.items():
        cells = [" ".join(f"{auc:.4f}" for auc in aucs[store]) for store in ("same", "int8")]
        change = sum(aucs["int8"]) / len(aucs["int8"]) - sum(aucs["same"]) / len(aucs["same"])
        print(f"| {log} | {cells[0]} | {cells[1]} | {change:+.5f} |")


if __name__ == "__main__":
    main()
