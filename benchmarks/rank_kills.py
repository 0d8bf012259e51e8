"""Kill ranks under torchrun and check that runs end like undisturbed ones: `python -m benchmarks.rank_kills --kills 20`.

One run of W ranks trains undisturbed. Then runs are started with --max-restarts, and ranks drawn at random are killed with
SIGKILL at moments drawn over the life of a run; torchrun starts all ranks again, which resume from the last checkpoint that all
of them have. Every run must come to its end with the same metrics.jsonl but for times, and the same model, bit for bit. Runs
without and with a cache take turns. Exits with 1 at the first run that is not the same.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.crash.runs import SETTINGS as ONE_PROCESS
from benchmarks.crash.runs import differences_of, result_of

SETTINGS = (*ONE_PROCESS, "data.batch_size=48", "parallel.timeout=60")
CACHES = ((), ("--cache", "0.3"))
LONGEST = 300.0  # seconds that a run may take


class Case(NamedTuple):
    """One way to train."""

    world: int = 2
    data: str = "criteo-like:4000"
    epochs: int = 4
    extra: tuple[str, ...] = ()


class RunEnd(NamedTuple):
    """How a run ended."""

    code: int
    text: str
    kills: int
    seconds: float


class Torchrun:
    """`torchrun -m hotbed train` under way."""

    def __init__(self, case: Case, folder: Path, restarts: int) -> None:
        self._log = folder.with_suffix(".txt").open("wb")
        sets = [part for one in SETTINGS for part in ("--set", one)]
        # a port of its own, so that several may run at once
        launch = ["--standalone", "--nproc-per-node", str(case.world), "--max-restarts", str(restarts)]
        train = ["--data", case.data, "--epochs", str(case.epochs), *sets, *case.extra, "--out", str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "hotbed", "train", *train],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def ranks(self) -> list[int]:
        """The processes that train now."""
        pid = self.process.pid
        try:
            found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [int(child) for child in found if b"RANK=" in Path(f"/proc/{child}/environ").read_bytes()]
        except OSError:
            return []

    def ended(self, kills: int, began: float) -> RunEnd:
        """Wait for its end."""
        try:
            code = self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            for pid in [*self.ranks(), self.process.pid]:
                os.kill(pid, signal.SIGKILL)
            code = self.process.wait()
        self._log.close()
        text = Path(self._log.name).read_text(errors="replace")
        return RunEnd(code, text, kills, time.perf_counter() - began)


def train(case: Case, folder: Path, moments: list[tuple[float, int]] | None = None) -> RunEnd:
    """Train to the end; at every moment (seconds after the last one, and a number) a rank is killed."""
    began = time.perf_counter()
    running, kills = Torchrun(case, folder, restarts=len(moments or []) + 1), 0
    for delay, number in moments or []:
        try:
            running.process.wait(delay)
            break  # it has come to its end
        except subprocess.TimeoutExpired:
            kills += _kill(running, number)
    return running.ended(kills, began)


def _kill(running: Torchrun, number: int) -> int:
    ranks = running.ranks()
    if not ranks:
        return 0
    try:
        os.kill(ranks[number % len(ranks)], signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="ranks to kill, over all runs (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of every run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when (%(default)s)")
    asked = parser.parse_args()
    root, draw = Path(tempfile.mkdtemp(prefix="hotbed-ranks-")).resolve(), random.Random(asked.seed)
    whole = train(Case(asked.ranks), root / "whole")
    if whole.code:
        print(whole.text)
        return 1
    expected, kills, number, life = result_of(root / "whole"), 0, 0, whole.seconds
    print(f"undisturbed: {whole.seconds:.1f} s", flush=True)
    while kills < asked.kills:
        run = root / f"killed-{number}"
        some = min(asked.kills - kills, draw.randint(1, 3))
        moments = [(draw.uniform(0.1, 1.0) * life, draw.randrange(asked.ranks)) for _ in range(some)]
        ended = train(Case(asked.ranks, extra=CACHES[number % len(CACHES)]), run, moments)
        different = differences_of(expected, result_of(run)) if ended.code == 0 else [f"exit code {ended.code}"]
        if different:
            print(
                f"FAILED after {kills} kills (--seed {asked.seed}): {', '.join(different)}; {run}\n{ended.text[-4000:]}"
            )
            return 1
        kills, number = kills + ended.kills, number + 1
        life = min(life, ended.seconds / (1 + ended.kills))  # of an attempt; other work may have slowed the first one
        print(f"run {number}: {ended.kills} kills, {ended.seconds:.1f} s; {kills} of {asked.kills}", flush=True)
        shutil.rmtree(run)
    shutil.rmtree(root)
    print(f"passed: {kills} kills in {number} runs of {asked.ranks} ranks, all ended bit-identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
