"""A click log from nothing to a trained model, as a user types it: `python -m benchmarks.end_to_end --rows 80000000 --kill`.

make        hotbed data make criteo-like:... --days 24 --text FOLDER/text      a text file for every day
prepare     hotbed prepare train=... valid=... test=... --out FOLDER/data      days 0 to 21, 22, 23; then the text is deleted
plan        hotbed plan FOLDER/data --cache 0.015
train       hotbed train --data FOLDER/data --cache 0.015 --checkpoint-every N --out FOLDER/run

With --kill, prepare and train are each killed once with SIGKILL, halfway and after a checkpoint, and the same is typed again
(for train: `hotbed train --resume FOLDER/run`). Prints times, the most memory of every stage, the test AUC compared with the
best possible one, and a verdict: all stages ended, prepare took at most 2 GiB, no stage more than --memory, the AUC is within
--gap of the best. Stages that are done are noted in FOLDER/stages.jsonl and not repeated, so that this program can itself be
stopped and started. A batch takes more than 1.5 % of the rows where there are few: try it with --rows 1000000 --cache 0.05.

Commands run in a process group of their own. Memory is what all processes of the group have resident, shared pages divided
among them, looked at twice a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.results_file import append_rows
from hotbed.data.synthetic import SHAPES, make_log, other_rows
from hotbed.data.synthetic.write import CHANCE_BINS, bin_chances, binned_auc

BETWEEN_LOOKS = 0.5  # seconds


class CommandEnd(NamedTuple):
    """How a command ended."""

    code: int
    seconds: float
    peak: int  # bytes
    killed: bool


def run_watched(command: Sequence[str], log: Path, kill_when: Callable[[], bool] | None = None) -> CommandEnd:
    """Run to the end, or until `kill_when` says so: then SIGKILL to the whole group. The output is appended to `log`."""
    began, peak, killed = time.perf_counter(), 0, False
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while not killed:
                try:
                    process.wait(BETWEEN_LOOKS)
                    break
                except subprocess.TimeoutExpired:
                    peak = max(peak, resident(process.pid))
                    killed = kill_when is not None and kill_when()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return CommandEnd(process.returncode, time.perf_counter() - began, peak, killed)


def resident(group: int) -> int:
    """Bytes that the processes of a group have in memory."""
    total = 0
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            if os.getpgid(int(entry)) == group:
                lines = Path("/proc", entry, "smaps_rollup").read_text().splitlines()
                total += next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):  # it ended meanwhile
            continue
    return total


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # renamed or removed meanwhile
                continue
    return total


DAYS = 24
SLICE = 1 << 19
GIB = 1 << 30
PREPARE_MOST = 2 * GIB


class Stage(NamedTuple):
    """What a stage took."""

    name: str
    seconds: float
    peak: int  # bytes
    kills: int
    disk: int  # bytes below the folder afterwards


class Course:
    """The stages of one folder; those that are noted there are done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._notes = folder / "stages.jsonl"
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        self.done = {stage.name: stage for stage in (Stage(**json.loads(line)) for line in lines)}

    def run(
        self,
        name: str,
        command: list[str],
        kill_when: Callable[[], bool] | None = None,
        again: list[str] | None = None,
    ) -> None:
        """Run a stage; killed once if `kill_when` is given, and then gone on with by `again` or by the same command."""
        if name in self.done:
            print(f"{name}: done before", flush=True)
            return
        log = self.folder / f"{name}.log"
        print(f"{name}: hotbed {shown(command)}", flush=True)
        seconds, peak, kills = 0.0, 0, 0
        while True:
            words = again if again is not None and kills else command
            ended = run_watched([sys.executable, "-m", "hotbed", *words], log, None if kills else kill_when)
            seconds, peak = seconds + ended.seconds, max(peak, ended.peak)
            if ended.killed:
                kills += 1
                print(
                    f"{name}: killed after {ended.seconds:.0f} s; again: hotbed {shown(again or command)}", flush=True
                )
                continue
            if ended.code != 0:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise SystemExit(f"{name} ended with {ended.code}:\n{last}\nAll of it is in {log}.")
            break
        stage = Stage(name, round(seconds, 1), peak, kills, size_of(self.folder))
        self.done[name] = stage
        with self._notes.open("a") as file:
            file.write(json.dumps(stage._asdict()) + "\n")
        print(f"{name}: {seconds:,.0f} s, {peak / 1e6:,.0f} MB, {stage.disk / 1e9:.1f} GB on disk", flush=True)


def main() -> int:
    asked = read_arguments()
    folder = (asked.folder or Path(tempfile.mkdtemp(prefix="hotbed-end-to-end-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"in {folder}", flush=True)
    course = Course(folder)
    run_stages(course, asked)
    test = json.loads((folder / "run" / "summary.json").read_text())["final"]["test"]
    best = best_auc(asked.rows, asked.seed)
    failed = print_end(course, asked, test["auc"], best)
    if asked.csv:
        append_rows(asked.csv, [result_row(course, asked, test["auc"], best, not failed)])
    return 1 if failed else 0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of all splits together, at least 40,000")
    parser.add_argument("--kill", action="store_true", help="kill prepare and train once each")
    parser.add_argument("--folder", type=Path, help="where all is written; a folder for temporary files if not given")
    parser.add_argument("--seed", type=int, default=0, help="of the log (%(default)s)")
    parser.add_argument("--cache", type=float, default=0.015, help="share of the rows on the device")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps; a fifth of the epoch if not given")
    parser.add_argument("--train", default="", help="further words for hotbed train, in one string")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB that no stage may exceed")
    parser.add_argument("--gap", type=float, default=0.02, help="AUC that may be missing to the best possible one")
    parser.add_argument("--keep-text", action="store_true", help="do not delete the text once it is prepared")
    parser.add_argument("--csv", default="", help="file to append the result to")
    asked = parser.parse_args()
    if asked.rows < 40_000:
        parser.error(f"--rows is {asked.rows}; at least 40,000 are needed")
    return asked


def run_stages(course: Course, asked: argparse.Namespace) -> None:
    """All four, in order."""
    text, data, run = (course.folder / name for name in ("text", "data", "run"))
    make = ["data", "make", f"criteo-like:{train_rows(asked.rows)}", "--days", str(DAYS), "--text", str(text)]
    course.run("make", [*make, "--seed", str(asked.seed)])
    files = sorted(text.glob("day_*"))
    if "prepare" not in course.done:
        if len(files) != DAYS:
            raise SystemExit(f"{text} holds {len(files)} days, not {DAYS}. Start in another folder.")
        splits = [*["train"] * (DAYS - 2), "valid", "test"]
        half = size_of(text) // 4  # temporary files take half of the text
        course.run(
            "prepare",
            ["prepare", *(f"{split}={file}" for split, file in zip(splits, files)), "--out", str(data)],
            (lambda: size_of(data.with_name(".data.partial")) > half) if asked.kill else None,
        )
    if not asked.keep_text:
        shutil.rmtree(text, ignore_errors=True)
    course.run("plan", ["plan", str(data), "--cache", str(asked.cache)])
    every = asked.checkpoint_every or max(1, asked.rows // 4096 // 5)
    train = ["train", "--data", str(data), "--cache", str(asked.cache), "--checkpoint-every", str(every)]
    course.run(
        "train",
        [*train, "--out", str(run), *asked.train.split()],
        (lambda: went_on_after_checkpoint(run)) if asked.kill else None,
        ["train", "--resume", str(run)],
    )


def train_rows(rows: int) -> int:
    """The number after the colon of the name, so that all splits together have that many rows."""
    train = rows * 10 // 12
    while train + 2 * other_rows(train) < rows:
        train += 1
    return train


def went_on_after_checkpoint(run: Path) -> bool:
    """Whether a checkpoint is whole and steps were logged after it, which a kill takes back."""
    checkpoints = [path for path in (run / "checkpoints").glob("*/manifest.json") if path.parent.name.isdecimal()]
    metrics = run / "metrics.jsonl"
    if not checkpoints or not metrics.exists():
        return False
    return metrics.stat().st_mtime > min(path.stat().st_mtime for path in checkpoints)


def best_auc(rows: int, seed: int) -> float:
    """The AUC of the true probabilities of the last day."""
    total = train_rows(rows)
    total += 2 * other_rows(total)
    log = make_log(SHAPES["criteo-like"], seed, total, DAYS)
    chances = np.zeros((2, CHANCE_BINS), dtype=np.int64)
    for start in range((DAYS - 1) * log.rows_per_day, total, SLICE):
        chances += bin_chances(log.rows(start, min(start + SLICE, total), threads=2))
    return binned_auc(chances)


def print_end(course: Course, asked: argparse.Namespace, auc: float, best: float) -> list[str]:
    """The table and the verdict; what failed."""
    print(f"\n{'stage':10} {'seconds':>9} {'rows/s':>11} {'peak MB':>9} {'kills':>6} {'disk GB':>8}")
    for stage in course.done.values():
        speed = asked.rows / max(stage.seconds, 1e-9)
        print(
            f"{stage.name:10} {stage.seconds:9,.0f} {speed:11,.0f} {stage.peak / 1e6:9,.0f} {stage.kills:6} "
            f"{stage.disk / 1e9:8.1f}"
        )
    print(f"test AUC {auc:.4f}, best possible {best:.4f}")
    failed = [
        f"{stage.name} took {stage.peak / GIB:.2f} GiB, more than {most / GIB:.2f}"
        for stage in course.done.values()
        if stage.peak > (most := PREPARE_MOST if stage.name == "prepare" else int(asked.memory * GIB))
    ]
    if asked.kill:
        failed += [f"{name} was not killed" for name in ("prepare", "train") if course.done[name].kills != 1]
    if auc < best - asked.gap:
        failed.append(f"the AUC is {best - auc:.4f} below the best")
    print("FAILED: " + "; ".join(failed) if failed else f"passed: {asked.rows:,} rows from nothing to a trained model")
    return failed


def result_row(course: Course, asked: argparse.Namespace, auc: float, best: float, passed: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "rows": asked.rows,
        "cache": asked.cache,
        "kill": asked.kill,
        "passed": passed,
        "auc": round(auc, 5),
    }
    row["best_auc"] = round(best, 5)
    for stage in course.done.values():
        row |= {f"{stage.name}_s": stage.seconds, f"{stage.name}_peak_mb": round(stage.peak / 1e6)}
    row["disk_gb"] = round(max(stage.disk for stage in course.done.values()) / 1e9, 1)
    return row


def shown(words: list[str]) -> str:
    """A command line, shortened where it names many files."""
    return " ".join(words if len(words) < 16 else [*words[:3], "...", *words[-4:]])


if __name__ == "__main__":
    sys.exit(main())
