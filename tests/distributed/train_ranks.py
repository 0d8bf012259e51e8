"""`hotbed train` in W processes that are told apart as torchrun does, forked from one that has imported everything.

torchrun itself takes several seconds to start a rank, and is left to the test of its restarts.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.distributed.ranks import _context

LONGEST = 90.0  # seconds
HELD = 17  # steps
Prepare = Callable[[], None]  # in the new process, before it trains


def nothing() -> None:
    """Ranks as they are."""


def held() -> None:
    """After HELD steps rank 1 waits until it is let go: a run that a test disturbs has not ended before, however busy it is."""
    from hotbed.train.loop import Training

    step, gone_on = Training._step, _sign(Path(sys.argv[sys.argv.index("--out") + 1]))

    def wait_and_step(training: Training, batch: Any) -> None:
        while os.environ["RANK"] == "1" and training.progress.step == HELD and not gone_on.exists():
            time.sleep(0.01)
        step(training, batch)

    Training._step = wait_and_step  # type: ignore[method-assign]


def let_go(run: Path) -> None:
    """The rank that is `held` goes on, and those of a restart do not wait."""
    _sign(run).touch()


def _sign(run: Path) -> Path:
    return run.with_name(f"{run.name}-goes-on")


def every_checkpoint() -> None:
    """None is left out because the one before is still being written, as on a slow disk or busy cores."""
    from hotbed.checkpoint.saver import Saver

    Saver.busy = False  # type: ignore[assignment, method-assign]


class TrainRanks:
    """Ranks under way; each prints into a file of its own."""

    def __init__(self, arguments: Sequence[str], folder: Path, world: int = 2, prepare: Prepare = nothing) -> None:
        _context.set_forkserver_preload(["tests.distributed.ahead"])
        # As torchrun's agent does, this process keeps the store: it outlives the ranks.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        self._logs = [folder.with_name(f"{folder.name}-{rank}.txt") for rank in range(world)]
        self.ranks: list[ForkServerProcess] = []
        for rank, log in enumerate(self._logs):
            numbers: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "OMP_NUM_THREADS": 1}
            place["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            named = {name: str(value) for name, value in (numbers | place).items()}
            self.ranks.append(_context.Process(target=_train, args=(named, list(arguments), log, prepare)))
            self.ranks[-1].start()

    def wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + LONGEST
        while not path.exists():
            assert all(rank.exitcode is None for rank in self.ranks), self.texts()
            assert time.monotonic() < deadline, f"no {path}: {self.texts()}"
            time.sleep(0.002)

    def wait_for_checkpoint(self, run: Path, step: int) -> None:
        """Until all ranks have it."""
        for rank in range(len(self.ranks)):
            self.wait_for(run / f"checkpoints/rank-{rank}-of-{len(self.ranks)}/{step:012}")

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def texts(self) -> list[str]:
        """What every rank has printed."""
        return [log.read_text() if log.exists() else "" for log in self._logs]

    def ended(self, kept: Sequence[int] = ()) -> list[int | None]:
        """The exit codes; ranks in `kept` are ended when the others are, as torchrun does."""
        deadline = time.monotonic() + LONGEST
        for number, rank in enumerate(self.ranks):
            if number not in kept:
                rank.join(max(0.0, deadline - time.monotonic()))
        codes = [rank.exitcode for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
            rank.join()
        return codes


def _train(environment: dict[str, str], arguments: list[str], log: Path, prepare: Prepare) -> None:
    """In the new process."""
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    import torch

    torch.set_num_threads(1)
    sys.argv = ["hotbed", *arguments]
    prepare()
    from hotbed.cli import main

    main(arguments)
