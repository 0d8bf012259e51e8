"""Programs in processes of their own, without the seconds in which each of them would import torch.

    assert run_python("import sys; print(sys.argv[1])", "x").stdout == "x\\n"

They are forked from a process that has imported all of hotbed and has run none of it. So this tells nothing of what a program
imports, of variables that are read on import, and of how an interpreter ends: tests of these start a Python.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tests.distributed.ranks import _context

LONGEST = 120.0  # seconds
# the command `hotbed`; what it says to stderr can be read as it is written, too
HOTBED = "import os, sys; os.dup2(1, 2); from hotbed.cli import main; main(sys.argv[1:])"


class Program:
    """`python -c code arguments`, under way. `stdout` is read as it is written, stderr when the program has ended."""

    def __init__(
        self, code: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        _context.set_forkserver_preload(["tests.distributed.ahead"])
        ours, theirs = _context.Pipe(duplex=False)
        handle, path = tempfile.mkstemp(prefix="stderr-")
        os.close(handle)
        self._errors = Path(path)
        place = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
        words = [str(one) for one in arguments]
        self._process = _context.Process(target=_run, args=(code, words, place, theirs, path), daemon=True)
        self._process.start()
        theirs.close()
        self.stdout = open(os.dup(ours.fileno()), encoding="utf-8")  # noqa: SIM115  closed in `ended`
        ours.close()
        self._result: subprocess.CompletedProcess[str] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def signal(self, number: signal.Signals) -> None:
        """Does nothing if the program has ended; that may happen at any moment, and the fork server reaps it."""
        if self._result is None and self._process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self._process.pid or 0, number)

    def kill(self) -> None:
        self._process.kill()

    def ended(self, timeout: float = LONGEST) -> subprocess.CompletedProcess[str]:
        """Its exit code, and what it printed that was not read before; killed if that takes too long."""
        if self._result is not None:
            return self._result
        watch = threading.Timer(timeout, self.kill)
        watch.start()
        with self.stdout:
            out = self.stdout.read()
        self._process.join()
        watch.cancel()
        watch.join()
        code, err = self._process.exitcode, self._errors.read_text()
        assert code is not None
        self._errors.unlink()
        self._process.close()
        self._result = subprocess.CompletedProcess("python", code, out, err)
        return self._result


def run_python(
    code: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """To its end."""
    return Program(code, *arguments, cwd=cwd, env=env).ended()


def _run(code: str, arguments: list[str], place: tuple[str, dict[str, str]], out: Connection, err: str) -> None:
    """In the new process."""
    handle = os.open(err, os.O_WRONLY | os.O_TRUNC)
    os.dup2(out.fileno(), 1)
    os.dup2(handle, 2)
    out.close()
    os.close(handle)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    folder, environment = place
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
