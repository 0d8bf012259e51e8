"""A follower of a log that never ends: killed at random moments, watched for its memory, and served while it learns.

    python -m benchmarks.follow [--kills 10] [--hours 24] [--rows 4000] [--seed 0] [--results FILE]

Hours of a synthetic log arrive one by one in a folder, renamed into place. One follower is left alone. Another one, on the same
hours, is killed (SIGKILL) at random moments and resumed; at the end both must have the same lines, rows, weights and model, bit
for bit. The first one's memory is compared at the sixth and at the last hour. Then a server of the run is started, a further
hour arrives, and the seconds are counted until the server scores with a model that has learned it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.crash.processes import ENVIRONMENT, Command
from benchmarks.crash.runs import differences_of, end_of
from benchmarks.results_file import append_rows
from hotbed.checkpoint.chain import find, folders_in
from hotbed.data.prepare.prepare import prepare

START = 1_700_000_400 // 3600 * 3600
SETTINGS = (
    "model.dim=8",
    "model.options.hidden=[16]",
    "model.options.dropout=0.2",
    "data.batch_size=256",
    "train.log_every=8",
    "train.device=cpu",
    "tables.dynamic=true",
    "tables.hbm=16MiB",
    "tables.admit=after 2",
    "tables.expire=unused 5h, every 16",
    "follow.settle_seconds=0",
    "follow.poll_seconds=0.1",
    "follow.checkpoint_minutes=0.02",
)


def write_hour(path: Path, hour: int, rows: int) -> None:
    """Clicks of an hour; a tenth of its users was never seen before. It appears whole."""
    rng = np.random.default_rng(hour)
    user = rng.zipf(1.3, rows) % 2000 + 200 * hour
    ad, price = rng.integers(0, 50, rows), rng.normal(size=rows)
    times = START + 3600 * hour + np.sort(rng.integers(0, 3600, rows))
    click = (rng.random(rows) < 1 / (1 + np.exp(2 - ad / 20 - price))).astype(int)
    lines = [f"{t},{c},u{u},a{a},{p:.4f}" for t, c, u, a, p in zip(times, click, user, ad, price)]
    being_written = path.with_name(f".{path.name}")
    being_written.write_text("\n".join(["ts,click,user,ad,price", *lines]) + "\n")
    being_written.rename(path)


class Arrivals(threading.Thread):
    """Hours that arrive in a folder, one every `every` seconds."""

    def __init__(self, folder: Path, hours: int, rows: int, every: float) -> None:
        super().__init__(daemon=True)
        self._folder, self._hours, self._rows, self._every = folder, hours, rows, every

    def run(self) -> None:
        for hour in range(1, self._hours + 1):
            write_hour(self._folder / f"{hour:05}.csv", hour, self._rows)
            time.sleep(self._every)


def command(root: Path, data: Path, idle: float) -> list[str]:
    sets = [part for one in SETTINGS for part in ("--set", one)]
    logs = ["--follow", str(root / "logs"), "--stop-when-idle", str(idle)]
    return ["train", "--data", str(data), *logs, *sets, "--out", str(root / "run")]


def follow(root: Path, data: Path, given: argparse.Namespace, kills: int, draw: random.Random) -> int:
    """Let a follower live, or kill it so often; it must end by itself. Returns the kills."""
    (root / "logs").mkdir(parents=True)
    arrivals = Arrivals(root / "logs", given.hours, given.rows, given.every)
    arrivals.start()
    done, expected = 0, given.hours * given.every
    while True:
        has_checkpoint = folders_in(root / "run" / "checkpoints")
        arguments = (
            ["train", "--resume", str(root / "run")] if has_checkpoint else command(root, data, 3 * given.every + 5)
        )
        if not has_checkpoint and (root / "run" / "config.json").exists():
            arguments.append("--overwrite")
        wait = 600.0 if done == kills else draw.uniform(0.2, 2 * expected / max(kills, 1)) + 1.5
        ended = Command(arguments, root).ended(wait)
        if ended.code == -signal.SIGKILL and done < kills:
            done += 1
            continue
        if ended.code:
            raise SystemExit(f"the follower ended with {ended.code}:\n{ended.text}")
        arrivals.join()
        return done


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [one for one in found if one["kind"] == kind]


def memory_of(run: Path, hours: int) -> tuple[int, int]:
    """Resident bytes at the sixth hour and at the last."""
    ends = [one["step"] for one in lines_of(run, "hour")]
    lines = [(one["step"], one["memory"]["resident_bytes"]) for one in lines_of(run, "train")]
    early = [used for step, used in lines if step <= ends[min(5, hours - 1)]]
    return max(early), max(used for _, used in lines)


def serving_delay(root: Path, data: Path, given: argparse.Namespace) -> float:
    """Seconds from the arrival of an hour until the server of the run has a model that learned it."""
    environment = {**os.environ, **ENVIRONMENT}
    hotbed = [sys.executable, "-m", "hotbed"]
    follower = subprocess.Popen(
        [*hotbed, "train", "--resume", str(root / "run"), "--stop-when-idle", "600", "--set", "follow.checkpoint_minutes=10"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    server = subprocess.Popen(
        [*hotbed, "serve", str(root / "run"), "--port", str(given.port)],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        before = _served_step(given.port, 0, 120.0)
        now = find(root / "run").manifest.document["progress"]["step"]
        assert before <= now, f"the server has step {before}, the run {now}"
        wanted = now + -(-given.rows // 256)
        write_hour(root / "logs" / f"{given.hours + 1:05}.csv", given.hours + 1, given.rows)
        began = time.monotonic()
        _served_step(given.port, wanted, 120.0)
        return time.monotonic() - began
    finally:
        for process in (follower, server):
            process.terminate()
            process.wait(60)


def _served_step(port: int, least: int, longest: float) -> int:
    """Wait until the server has a model of this step or a later one."""
    deadline, step = time.monotonic() + longest, -1
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            line = next(line for line in text.splitlines() if line.startswith("hotbed_serve_model_step "))
            step = int(float(line.split()[1]))
            if step >= least:
                return step
        except (OSError, StopIteration):
            pass
        time.sleep(0.1)
    raise SystemExit(f"after {longest:.0f} s the server has step {step}, not {least}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="kills at random moments")
    parser.add_argument("--hours", type=int, default=24, help="virtual hours of the log")
    parser.add_argument("--rows", type=int, default=4000, help="of an hour")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two hours")
    parser.add_argument("--seed", type=int, default=0, help="of the log and the kills")
    parser.add_argument("--port", type=int, default=18_431, help="of the server")
    parser.add_argument("--results", default="", help="file to which the results are added")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_hour(root / "raw.csv", 0, 2 * given.rows)
        prepare([root / "raw.csv"], root / "data", label="click", time_column="ts", ids_mode="raw",
                split={"train": 0.8, "valid": 0.2})  # fmt: skip
        for name in ("alone", "killed"):
            (root / name).mkdir()
        follow(root / "alone", root / "data", given, 0, draw)
        kills = follow(root / "killed", root / "data", given, given.kills, draw)
        differences = differences_of(end_of(root / "alone" / "run"), end_of(root / "killed" / "run"))
        early, late = memory_of(root / "alone" / "run", given.hours)
        hours = lines_of(root / "alone" / "run", "hour")
        print(f"{kills} kills; different at the end: {', '.join(differences) or 'nothing'}")
        print(f"{len(hours)} hours; memory {early / 1e6:,.1f} MB after the sixth, {late / 1e6:,.1f} MB at most")
        delay = serving_delay(root / "alone", root / "data", given)
        print(f"a new hour was in the served scores after {delay:.1f} s")
    row = {
        "kills": kills,
        "differences": len(differences),
        "hours": len(hours),
        "early_bytes": early,
        "late_bytes": late,
    }
    if given.results:
        append_rows(given.results, [{**row, "serving_delay_s": round(delay, 1)}])
    raise SystemExit(1 if differences else 0)


if __name__ == "__main__":
    main()
