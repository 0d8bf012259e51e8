"""Calls of pytest without the seconds in which each would import torch: they are forked from a process that has done so.

In: arguments, variables and a file for the output, a line of JSON each on stdin. Out: the process's number, then its exit code.
Nothing of hotbed or of the tests is imported before the fork, so a change of the sources is seen. On two busy cores a call
takes 1.5 s of processor time instead of 7.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "numba",
    "numba.core.registry",
    "pyarrow.parquet",
    "rich.console",
)


class WarmPytest:
    """Of one tree, one call at a time."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.mutants.warm"]
        self._process = subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, arguments: Sequence[str], more: Mapping[str, str], output: Path, limit: float) -> int | None:
        """The exit code; None where `limit` seconds were not enough."""
        asked, answers = _pipe(self._process.stdin), _pipe(self._process.stdout)
        asked.write(json.dumps([list(arguments), dict(more), str(output)]) + "\n")
        asked.flush()
        number = int(answers.readline())
        late = threading.Event()

        def stop() -> None:
            late.set()
            _end(number)

        watch = threading.Timer(limit, stop)
        watch.start()
        code = int(answers.readline())
        watch.cancel()
        _end(number)  # what it left at work
        return None if late.is_set() else code


def _end(number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "the process has pipes"
    return stream


def main() -> None:
    for name in _PRELOADED:
        with suppress(ImportError):  # a small tree may do without
            importlib.import_module(name)
    for line in sys.stdin:
        arguments, more, output = json.loads(line)
        number = os.fork()
        if number == 0:
            _run(arguments, more, output)
        print(number, flush=True)
        _, status = os.waitpid(number, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(arguments: list[str], more: dict[str, str], output: str) -> None:
    """In the new process; does not return."""
    code = 3  # pytest's word for an error of its own
    try:
        os.setsid()
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.environ.update(more)
        import pytest

        code = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
