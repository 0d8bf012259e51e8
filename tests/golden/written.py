"""Files as hotbed 0.1 wrote them, and what is in them: `python -m tests.golden.written OUT` makes an archive and its values.

The committed archive was written by commit 57ddd35, to whose tree this folder and benchmarks/golden.py were copied. It is never
written anew: later versions of hotbed read it, or say why they do not.

    chains/NAME       checkpoints of a configuration of benchmarks/golden.py: a full one and an incremental one
    clicks, raw       datasets of `hotbed prepare` with numbers, text, lists and integers: vocabularies, and ids as they are
    runs/NAME         run folders of `hotbed train`, one of two ranks, with settings, metrics, checkpoints and model
    export            of runs/plain by `hotbed export`
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import hotbed
from benchmarks.golden import CASES, Draws, batches_of, digest, environment, losses_of, rows_of, tables_of

SEED = 11  # of tests/golden/cpu.json
SAVED = {"plain": (2, 4), "tiered": (2, 4), "dynamic": (6, 14), "bf16": (2, 4)}  # after how many steps
RUNS = {
    "plain": (),
    "cached": ("--cache", "0.3"),
    "dynamic": ("--dynamic", "--admit", "after 2", "--expire", "unused 6 steps, every 3", "--hbm", "1MiB"),
    "two_ranks": ("--cache", "0.5"),
    "tiered": ("--cache", "0.3", "--memory", "14KiB", "--ssd", "ssd:16MiB"),
}
SETTINGS = {
    "data.batch_size": 16,
    "model.dim": 4,
    "model.options.hidden": "[8]",
    "tables.lr": 0.3,
    "tables.init": "normal(0.3)",
    "train.device": "cpu",
    "train.log_every": 1,
    "train.checkpoint_every": 4,
}
RAW = {
    "price": ["0.5", "-1.25", ""],
    "age": ["31", "7", "64"],
    "user": ["u7", "u1", "nobody"],
    "tags": ["a|b", "", "c"],
    "ad": ["1000003", "5", "9000027"],
}


def write_raw(file: Path, rows: int = 600) -> None:
    """A raw log of clicks."""
    draws = Draws(5)
    lines = ["click,price,age,user,tags,ad"]
    for user, ad, price, age, chance in zip(*(draws.below(limit, rows) for limit in (300, 60, 4000, 90, 100))):
        tags = "|".join("abcd"[: user % 4])
        lines.append(f"{int(chance < 20 + 60 * (user % 2))},{price / 1000 - 2:.3f},{age},u{user},{tags},{ad * 1000003}")
    file.write_text("\n".join(lines) + "\n")


def command(*arguments: str) -> None:
    """The `hotbed` command, in this process."""
    with mock.patch.object(sys, "argv", ["hotbed", *arguments]), pytest.raises(SystemExit) as ended:
        runpy.run_module("hotbed", run_name="__main__")
    assert not ended.value.code, f"hotbed {' '.join(arguments)} ended with {ended.value.code}"


def write(folder: Path) -> None:
    """Every file, below the folder."""
    for name in SAVED:
        write_chain(name, folder / "chains" / name)
    here = Path.cwd()
    os.chdir(folder)  # no path of this machine stands in a file
    try:
        write_raw(Path("clicks.csv"))
        columns = ("--ids", "ad", "--multi", "tags:|", "--splits", "train=0.7,valid=0.15,test=0.15", "--workers", "1")
        command("prepare", "clicks.csv", "--out", "clicks", *columns)
        command("prepare", "clicks.csv", "--out", "raw", *columns, "--ids-mode", "raw")
        for name in RUNS:
            write_run(name)
        command("export", "runs/plain", "--out", "export")
    finally:
        os.chdir(here)


def write_run(name: str) -> None:
    """A run of one epoch; its tables are spread over two ranks where the name says so."""
    settings = [part for item in SETTINGS.items() for part in ("--set", "{}={}".format(*item))]
    data = "raw" if name == "dynamic" else "clicks"
    arguments = ["train", "--data", data, "--model", "deepfm", "--out", f"runs/{name}", *RUNS[name], *settings]
    if name == "two_ranks":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*torchrun, "-m", "hotbed", *arguments], check=True)
    else:
        command(*arguments)
    about = Path("runs", name, "data.json")
    about.write_text(about.read_text().replace(str(Path.cwd()), "/data"))


def write_chain(name: str, folder: Path) -> None:
    """Two checkpoints of a configuration."""
    case, done = CASES[name], 0
    with tempfile.TemporaryDirectory() as ssd:
        tables = tables_of(case, SEED, "cpu", Path(ssd))
        batches = batches_of(case.kind, SEED)
        for steps in SAVED[name]:
            losses_of(tables, case, batches[done:steps])
            hotbed.checkpoint.save(folder, tables, step=steps, extra={"steps": steps})
            done = steps


def read_chain(name: str, folder: Path, ssd: Path) -> tuple[int, dict[str, str], list[str], dict[str, str]]:
    """(steps done, the rows of a checkpoint, the losses of all steps after it, the rows at the end)."""
    case = CASES[name]
    tables = tables_of(case, SEED, "cpu", ssd)
    loaded = hotbed.checkpoint.load(folder, tables)
    rows = digest([rows_of(tables)])
    losses = losses_of(tables, case, batches_of(case.kind, SEED)[loaded.extra["steps"] :])
    return loaded.step, rows, losses, digest([rows_of(tables)])


def read_dataset(folder: Path) -> dict[str, str]:
    """The sha256 of the batches of every split, in the order of the second epoch of training."""
    dataset = hotbed.data.Dataset.open(folder)
    found = {}
    for split in ("train", "valid", "test"):
        state = hashlib.sha256()
        for batch in hotbed.data.Loader(dataset, split, batch_size=32, shuffle=True, seed=5).epoch(1):
            bags = [part for bag in batch.bags.values() for part in (bag.values, bag.offsets)]
            for tensor in (batch.labels, batch.dense, batch.ids, *bags):
                state.update(f"{tensor.dtype} {list(tensor.shape)} ".encode() + tensor.numpy().tobytes())
        found[split] = state.hexdigest()
    return found


def read_scores(folder: Path) -> list[float]:
    """What a run or an export says of three raw samples, one with values that training never saw."""
    with hotbed.load(folder, memory="1MB") as scorer:
        return [float(score) for score in scorer.score(RAW)]


def resume(folder: Path, name: str) -> list[list[Any]]:
    """[kind, step, loss, AUC] of every line of metrics.jsonl, after one more epoch."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        command("train", "--resume", f"runs/{name}", "--epochs", "2")
    finally:
        os.chdir(here)
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [[line["kind"], line["step"], line.get("loss", line.get("log_loss")), line["auc"]] for line in lines]


def values_of(folder: Path, spare: Path) -> dict[str, Any]:
    """What was in the files when they were written. Runs are resumed: give a copy."""
    chains = {}
    for name, saved in SAVED.items():
        for steps in saved:
            one = read_chain(name, folder / "chains" / name / f"{steps:012}", spare / f"{name}-{steps}")
            chains[f"{name}/{steps:012}"] = one[1]
    scores = {f"runs/{name}": read_scores(folder / "runs" / name) for name in RUNS}
    scores["export"] = read_scores(folder / "export")
    datasets = {name: read_dataset(folder / name) for name in ("clicks", "raw")}
    found = {"chains": chains, "datasets": datasets, "scores": scores}
    return found | {"resumed": {name: resume(folder, name) for name in RUNS}}


def main() -> None:
    out = Path(sys.argv[1]).absolute()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "written"
        folder.mkdir()
        write(folder)
        with tarfile.open(out / "written_by_0_1.tar.xz", "w:xz") as archive:
            archive.add(folder, ".", filter=_nameless)
        values = {"environment": environment("cpu")} | values_of(folder, Path(work))
    (out / "written_by_0_1.json").write_text(json.dumps(values, indent=0) + "\n")


def _nameless(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Without what belongs to a machine, and without what nothing reads."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return None if Path(member.name).name in ("report.html", "tensorboard", "ssd") else member


if __name__ == "__main__":
    main()
