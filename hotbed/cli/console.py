"""Where the command line writes: results to stdout, errors and progress to stderr.

Names of files, columns and datasets are printed as they are: no [markup] and no :emoji: is looked for in them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.text import Text

_live: list[Console] = []  # those that show something that moves


def out() -> Console:
    """Results. Made on each call, so that it follows a redirected stdout."""
    return Console(highlight=False, markup=False, emoji=False)


def err() -> Console:
    """Errors and progress."""
    return Console(file=cast(IO[str], _Lasting(sys.stderr)), highlight=False, markup=False, emoji=False)


@contextmanager
def live(console: Console) -> Iterator[None]:
    """Inside, a bar or a spinner of this console is on the screen: `aside` writes above it."""
    _live.append(console)
    try:
        yield
    finally:
        _live.remove(console)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner, on a terminal."""
    console = err()
    with console.status(Text(text)), live(console):
        yield


def aside(text: str) -> None:
    """A line of progress, from any thread, whatever else moves on the screen."""
    (_live[-1] if _live else err()).print(text, soft_wrap=True)


def fail(message: str, code: int = 2) -> int:
    """Print `error: message` as plain text, unwrapped, and hand back the exit code."""
    console = err()
    console.print("error:", style="bold red", end=" ")
    console.print(message, soft_wrap=True)
    return code


class _Lasting:
    """A stream that may lose its reader, or fill its disk, without ending the run that reports to it."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            if self._stream is not None:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
