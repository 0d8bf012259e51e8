"""The command `hotbed` in a process of its own that can be killed.

Importing torch takes seconds; so one process imports everything, does nothing else, and is forked for every command.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from benchmarks.crash.stages import no_marks, num_changes, open_stages, watch

# Small tensors: threads that wait for each other cost more than they bring. What libraries read when they are loaded.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
LONGEST = 120.0  # seconds that a command may take
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.crash.ahead"])


class CommandEnd(NamedTuple):
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

    def ended(self, kill_after: float = LONGEST) -> CommandEnd:
        """Wait for its end, or kill it after `kill_after` seconds."""
        self.process.join(kill_after)
        return self._result()

    def ended_in(self, stage: str, kill_after: float) -> CommandEnd:
        """Wait for its end, or kill it `kill_after` seconds after it was seen in this stage."""
        deadline = time.monotonic() + LONGEST
        while self.process.exitcode is None and stage not in open_stages(self._marks) and time.monotonic() < deadline:
            time.sleep(0.0005)
        self.process.join(kill_after)
        return self._result()

    def _result(self) -> CommandEnd:
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        assert code is not None
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return CommandEnd(code, text, open_stages(self._marks), num_changes(self._marks))


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
