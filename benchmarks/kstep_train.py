"""k-step Adam through `hotbed train` on three logs: test AUC by k, number of ranks and seed.

    python -m benchmarks.kstep_train [--logs criteo,frappe,demo] [--ks 1,4,16,64] [--ranks 2,4,8] [--seeds 0,1,2]
    python -m benchmarks.kstep_train --page        # the table of docs/kstep.md

Every run is `torchrun --nproc-per-node RANKS -m hotbed train` with the default settings of k-step training. Rows that are in
benchmarks/results/kstep_train.csv are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.accuracy.__main__ import prepare
from benchmarks.results_file import append_rows

RESULTS = Path("benchmarks/results/kstep_train.csv")
LOGS = {  # settings of `hotbed train`
    "criteo": ["data.path=data-cache/criteo", "data.batch_size=512", "model.dim=8", "model.options.dropout=0.3",
               "tables.optimizer=adam", "tables.lr=0.001", "tables.l2=0.001", "train.epochs=2", "train.keep_best=false"],
    "frappe": ["data.path=data-cache/frappe", "data.batch_size=1024", "model.dim=10", "model.options.hidden=[128,128]",
               "model.options.batch_norm=true", "model.options.dropout=0.2", "tables.optimizer=adam", "tables.lr=0.001",
               "tables.l2=0.05", "train.epochs=6", "train.schedule=cosine"],
    "demo": ["data.path=criteo-like"],
}  # fmt: skip


def measure(log: str, k: int, ranks: int, seed: int) -> dict[str, object]:
    """One training; the row of the file."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [word for text in LOGS[log] for word in ("--set", text)]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "-m",
            "hotbed",
        ]
        command += ["train", *settings, "--k-step", str(k), "--seed", str(seed), "--out", f"{folder}/run", "--quiet"]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "HOTBED_LOG": "quiet"})
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    return {
        "benchmark": "kstep_train",
        "log": log,
        "k": k,
        "ranks": ranks,
        "seed": seed,
        "steps": summary["steps"],
        "auc": round(summary["final"]["test"]["auc"], 6),
        "seconds": round(time.perf_counter() - start, 1),
    }


def rows() -> list[dict[str, str]]:
    if not RESULTS.exists():
        return []
    with open(RESULTS, newline="") as file:
        return list(csv.DictReader(file))


def page() -> str:
    """AUC less that of k = 1, by log, ranks and k: the mean over seeds, and each of them."""
    found = {(row["log"], int(row["ranks"]), int(row["k"]), row["seed"]): float(row["auc"]) for row in rows()}
    lines = ["| log | ranks | k | AUC, mean | change | by seed |", "|---|---|---|---|---|---|"]
    by_case: dict[tuple[str, int, int], dict[str, float]] = defaultdict(dict)
    for (log, ranks, k, seed), auc in sorted(found.items()):
        by_case[log, ranks, k][seed] = auc
    for (log, ranks, k), aucs in by_case.items():
        mean, base = sum(aucs.values()) / len(aucs), by_case.get((log, ranks, 1), {})
        gaps = [auc - base[seed] for seed, auc in aucs.items() if seed in base]
        change = f"{sum(gaps) / len(gaps):+.5f} | {', '.join(f'{gap:+.5f}' for gap in gaps)}" if k > 1 and gaps else "|"
        lines.append(f"| {log} | {ranks} | {k} | {mean:.5f} | {change} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", default="criteo,frappe,demo", help="of criteo, frappe and demo (%(default)s)")
    parser.add_argument("--ks", default="1,4,16,64", help="steps between merges (%(default)s)")
    parser.add_argument("--ranks", default="2,4,8", help="processes (%(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="of every case (%(default)s)")
    parser.add_argument("--page", action="store_true", help="print the table, and train nothing")
    args = parser.parse_args()
    if args.page:
        print(page())
        return
    done = {(row["log"], row["k"], row["ranks"], row["seed"]) for row in rows()}
    lists = (one.split(",") for one in (args.seeds, args.logs, args.ranks, args.ks))
    for seed, log, ranks, k in itertools.product(*lists):
        if (log, k, ranks, seed) in done:
            continue
        if log != "demo":
            prepare(log)
        row = measure(log, int(k), int(ranks), int(seed))
        append_rows(str(RESULTS), [row])
        print(" ".join(f"{name}={value}" for name, value in row.items() if name != "benchmark"), flush=True)


if __name__ == "__main__":
    main()
