"""Where the command line writes: results to stdout, errors and progress to stderr.

Names of files, columns and datasets are printed as they are: no [markup] and no :emoji: is looked for in them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from hotbed.host.compiling import CompileReport

BEGINS = "compiling kernels for this machine, only this once: it may take a minute"
_NOTICED = 2.0  # seconds after which somebody wonders
_TOLD = 1.0  # seconds worth a word at the end
RESULTS = (
    ("AUC", "auc"),
    ("best possible AUC", "best_auc"),
    ("gap to it", "gap"),
    ("log loss", "log_loss"),
    ("normalized entropy", "normalized_entropy"),
    ("calibration", "calibration"),
)
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


@contextmanager
def progress_bar(title: str, unit: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """A progress bar that appears with its first report: (name, done, total)."""
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counter = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counter, TimeRemainingColumn())
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def report(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name or title, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield report


def result_table(title: str, metrics_of_split: Mapping[str, Mapping[str, Any]]) -> Table:
    """One column per split; a row appears when some split knows it."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for split in metrics_of_split:
        table.add_column(split, justify="right")
    for label, name in RESULTS:
        values = [metrics.get(name) for metrics in metrics_of_split.values()]
        if any(value is not None for value in values):
            table.add_row(label, *map(in_digits, values), style="bold" if name == "auc" else None)
    table.add_row("samples", *(f"{metrics['samples']:,}" for metrics in metrics_of_split.values()))
    return table


def in_digits(value: float | None) -> str:
    """Four digits; a dash for what is not known or not defined."""
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


@contextmanager
def told_of_compiling(quiet: bool = False) -> Iterator[CompileReport]:
    """Inside, kernels that have been compiled for some seconds lead to a line on the screen."""
    from hotbed.host.compiling import compiled_within

    with compiled_within(lambda: None if quiet else aside(BEGINS), _NOTICED) as compiled:
        yield compiled


def compiled_text(compiled: CompileReport) -> str:
    """How long it took; "" where nothing was compiled, or hardly anything."""
    if compiled.seconds <= _TOLD:
        return ""
    return f"{compiled.kernels:,} kernels were compiled in {compiled.seconds:,.1f} s, once; no speed here counts it"
