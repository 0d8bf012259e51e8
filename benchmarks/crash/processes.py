"""The command `hotbed` in a process of its own that can be killed.

Importing torch takes seconds; so one process imports everything, does nothing else, and is forked for every command.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from benchmarks.crash.stages import no_marks, num_changes, open_stages, watch

PRELOADED = (
    "benchmarks.crash.stages",
    "hotbed.build",
    "hotbed.cli.checkpoint",
    "hotbed.cli.train",
    "hotbed.cli",
    "hotbed.report",
    "hotbed.train.run",
    "hotbed.train.warm_start",
    "torch.utils.tensorboard",
)
# Small tensors: threads that wait for each other cost more than they bring. What libraries read when they are loaded.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))


class Ended(NamedTuple):
    """How a command ended."""

    code: int  # negative: of a signal
    text: str  # what it printed
    stages: list[str]  # open when it ended
    num_changes: int


class Command:
    """`hotbed` with these arguments, under way. `root` is where it may change files."""

    def __init__(self, arguments: Sequence[str], root: Path, fatal_change: int = 0) -> None:
        self._log, self._marks = root / "output.txt", root / "marks"
        no_marks(self._marks)
        paths = self._log, self._marks, root
        self.process: ForkServerProcess = _context.Process(target=_hotbed, args=(list(arguments), paths, fatal_change))
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.process.start()

    def ended(self, kill_after: float | None = None) -> Ended:
        """Wait for its end, or kill it after so many seconds."""
        self.process.join(kill_after)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        assert code is not None
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return Ended(code, text, open_stages(self._marks), num_changes(self._marks))


def _hotbed(arguments: list[str], paths: tuple[Path, Path, Path], fatal_change: int) -> None:
    """In the new process."""
    log, marks, root = paths
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.argv = ["hotbed", *arguments]
    watch(marks, root, fatal_change)
    from hotbed.cli import main

    main(arguments)
