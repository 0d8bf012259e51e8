"""The accuracy table of docs/accuracy.md: prepares the real logs, trains every run file with three seeds, prints the table.

    python -m benchmarks.accuracy [--only frappe] [--seeds 0,1,2] [--jobs 2] [--device cpu] [--out docs/accuracy-runs.csv]

It calls the `hotbed` command as a user would, one process per run. Raw files are read from HOTBED_DATA or ../shared/data,
datasets are written to data-cache/, runs to runs/accuracy/. Runs that are finished are not repeated. With --twin the same
model in plain PyTorch (nn.Embedding and dense torch.optim.Adam) trains on the same batches for comparison.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import yaml

HERE = Path(__file__).parent
RAW = Path(os.environ.get("HOTBED_DATA", "../shared/data"))
DATASETS = {  # arguments of `hotbed prepare`
    "frappe": [
        *(f"{split}={RAW}/frappe_{split}.csv.xz" for split in ("train", "valid", "test")),
        *("--label", "label", "--ids", "*"),
    ],
    "criteo": [
        *(f"{RAW}/criteo_60k.tsv.xz", "--split", "train=50000,test=10000"),
        *("--min-count", "10"),
    ],
    "adult": None,  # embedded
}


class Job(NamedTuple):
    """One run file with one seed, by hotbed or by its twin."""

    file: Path
    seed: int
    twin: bool

    @property
    def dataset(self) -> str:
        return self.file.stem.split("_")[0]

    @property
    def run(self) -> Path:
        return Path("runs/accuracy") / f"{self.file.stem}_{self.seed}{'_twin' * self.twin}"


def prepare(dataset: str) -> None:
    """Write data-cache/DATASET unless it is there."""
    arguments, out = DATASETS[dataset], Path("data-cache") / dataset
    if arguments is not None and not (out / "schema.json").exists():
        subprocess.run([sys.executable, "-m", "hotbed", "prepare", *arguments, "--out", str(out)], check=True)


def train(job: Job, device: str, threads: int) -> float:
    """The test AUC of one job."""
    result = job.run.with_suffix(".json")
    if not result.exists():
        result.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HOTBED_LOG": "quiet"}
        if job.twin:
            done = subprocess.run(
                twin_command(job, threads), check=True, env=environment, capture_output=True, text=True
            )
            auc = json.loads(done.stdout.splitlines()[-1])["test"]["auc"]
        else:
            command = ["train", str(job.file), "--seed", str(job.seed), "--out", str(job.run), "--device", device]
            subprocess.run(
                [sys.executable, "-m", "hotbed", *command, "--overwrite", "--quiet"],
                check=True,
                env=environment,
                stdout=subprocess.DEVNULL,
            )
            auc = json.loads((job.run / "summary.json").read_text())["final"]["test"]["auc"]
        result.write_text(json.dumps({"auc": auc}))
    auc = float(json.loads(result.read_text())["auc"])
    print(f"{job.run.name}: test AUC {auc:.4f}", flush=True)
    return auc


def twin_command(job: Job, threads: int) -> list[str]:
    """The run file's settings as arguments of the plain twin."""
    config = yaml.safe_load(job.file.read_text())
    model, tables, course = config["model"], config["tables"], config["train"]
    options = {
        "--model": model["name"],
        "--dim": model["dim"],
        "--options": json.dumps(model.get("options", {})),
        "--batch-size": config["data"]["batch_size"],
        "--epochs": course["epochs"],
        "--optimizer": tables["optimizer"],
        "--lr": tables["lr"],
        "--dense-lr": config["dense"]["lr"],
        "--l2": tables.get("l2", 0.0),
        "--plateau-factor": course.get("plateau_factor", 1.0),
        "--patience": course.get("patience", 0),
        "--seed": job.seed,
        "--threads": threads,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-m", "benchmarks.plain_torch.train", config["data"]["path"], *words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the name of the run files, e.g. frappe or criteo_deepfm")
    parser.add_argument("--seeds", default="0,1,2", help="of every run file (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time, one thread each")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--twin", action="store_true", help="also train the plain PyTorch twin (criteo)")
    parser.add_argument("--out", default="", help="CSV file to write")
    args = parser.parse_args()
    files = [file for file in sorted(HERE.glob("*.yaml")) if args.only in file.stem]
    if not files:
        raise SystemExit(f"no run file in {HERE} has {args.only!r} in its name")
    for dataset in sorted({file.stem.split("_")[0] for file in files}):
        prepare(dataset)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    twins = (False, True) if args.twin else (False,)
    jobs = [Job(file, seed, twin) for file in files for twin in twins for seed in seeds]
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    with ThreadPoolExecutor(args.jobs) as pool:
        aucs = dict(zip(jobs, pool.map(lambda job: train(job, args.device, threads), jobs)))
    rows = []
    print(
        f"\n| run file | by | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | spread |\n|---|---|"
        + "---|" * (len(seeds) + 2)
    )
    for file in files:
        for twin in twins:
            found = [aucs[Job(file, seed, twin)] for seed in seeds]
            system = "plain PyTorch" if twin else "hotbed"
            mean, spread = statistics.mean(found), max(found) - min(found)
            print(
                f"| {file.stem} | {system} | {' | '.join(f'{auc:.4f}' for auc in found)} | {mean:.4f} | {spread:.4f} |"
            )
            rows += [
                {"run": file.stem, "system": system, "seed": s, "test_auc": round(a, 5)} for s, a in zip(seeds, found)
            ]
    if args.out:
        with open(args.out, "w", newline="") as out:
            writer = csv.DictWriter(out, fieldnames=["run", "system", "seed", "test_auc"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
