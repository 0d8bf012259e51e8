"""Where the command line writes: results to stdout, errors and progress to stderr.

Names of files, columns and datasets are printed literally: [markup] and :emoji: have no meaning in them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotbed.files.uri import hide

if TYPE_CHECKING:
    from hotbed.host.compiling import CompileReport

COMPILING = "compiling kernels for this machine, once for each kind of command; this may take a minute"
_NOTICE_AFTER = 2.0  # seconds of compiling after which a line is printed
_WORTH_REPORTING = 1.0  # seconds of compiling that are mentioned at the end
RESULTS = (
    ("AUC", "auc"),
    ("best possible AUC", "best_auc"),
    ("gap to it", "gap"),
    ("PR-AUC", "pr_auc"),
    ("log loss", "log_loss"),
    ("normalized entropy", "normalized_entropy"),
    ("calibration", "calibration"),
)
_live: list[Console] = []  # consoles with a bar or spinner on the screen
_voice: list[bool] = [False, False, False]  # quiet, verbose, log as JSON


def speak(quiet: bool = False, verbose: bool = False, log_json: bool = False) -> None:
    """How much commands print from here on, and how, by `--quiet`, `--verbose` and `--log-json`."""
    if log_json or is_log_json():
        from hotbed.cli.log_json import handle_logging

        handle_logging(log_json)
    _voice[:] = quiet, verbose and not quiet, log_json


def is_quiet() -> bool:
    """Whether only results and errors are printed."""
    return _voice[0]


def is_verbose() -> bool:
    """Whether all progress is printed."""
    return _voice[1]


def is_log_json() -> bool:
    """Whether lines on stderr are JSON."""
    return _voice[2]


class TextConsole(Console):
    """A console that never breaks a line of text, and shows no secret; tables take the width of the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        objects = tuple(_without_secrets(one) for one in objects)
        if all(isinstance(one, str | Text) for one in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)


def _without_secrets(printed: Any) -> Any:
    if isinstance(printed, Text):
        return printed if hide(printed.plain) == printed.plain else hide(printed.plain)
    return hide(printed) if isinstance(printed, str) else printed


def out() -> Console:
    """The console for results; created on each call, so that it follows a redirected stdout."""
    return TextConsole(highlight=False, markup=False, emoji=False)


def err(always: bool = False) -> Console:
    """The console for progress and notes, which --quiet silences, and for errors (`always`)."""
    stream = cast(IO[str], ResilientStream(sys.stderr))
    if is_log_json():
        from hotbed.cli.log_json import JsonConsole

        return JsonConsole(file=stream, force_terminal=False, quiet=is_quiet() and not always)
    return TextConsole(file=stream, highlight=False, markup=False, emoji=False, quiet=is_quiet() and not always)


def print_json(figures: Any) -> None:
    """The result of a command as JSON; numbers that JSON does not have become null."""
    typer.echo(json.dumps(printable(figures), indent=1))


def printable(value: Any) -> Any:
    """What JSON can hold and a reader may see: no nan, no secret of a URI."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): printable(one) for name, one in value.items()}
    return [printable(one) for one in value] if isinstance(value, list | tuple) else hide(str(value))


@contextmanager
def live(console: Console) -> Iterator[None]:
    """While a bar or spinner of this console is on the screen; `print_progress` writes above it."""
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


def print_progress(text: str) -> None:
    """Print a line of progress, from any thread, above a bar or spinner."""
    (_live[-1] if _live else err()).print(text)


def fail(message: str, code: int, traceback: str | None = None) -> int:
    """Print `error: message` as plain text, unwrapped, and return the exit code; a traceback is for --log-json."""
    if is_log_json():
        from hotbed.cli.log_json import log_event

        log_event("error", "error", message=message, exit_code=int(code), traceback=traceback)
        return code
    console = err(always=True)
    console.print("error:", style="bold red", end=" ")
    console.print(message)
    return code


class ResilientStream:
    """A stream whose errors are ignored: a closed pipe or a full disk must not end the run."""

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
    if is_log_json():
        from hotbed.cli.log_json import ProgressLines

        lines = ProgressLines()
        yield lambda name, done, total: lines.report(name or title, done, total, unit=unit)
        return
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counter = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counter, TimeRemainingColumn())
    bar = Progress(*columns, console=err(), transient=True, disable=not err().is_terminal)
    tasks: dict[str, Any] = {}

    def report(name: str, done: int, total: int | None) -> None:
        if not tasks:
            bar.start()
        if name not in tasks:
            tasks[name] = bar.add_task(name or title, total=total)
        bar.update(tasks[name], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bar.stop()


def table_of_numbers(title: str | None, *headings: str, left: Collection[str] = ()) -> Table:
    """An empty table of numbers, which stand to the right; columns named in `left` hold text."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def result_table(title: str, metrics_of_split: Mapping[str, Mapping[str, Any]]) -> Table:
    """One column per split; a metric that no split has is left out."""
    table = table_of_numbers(title, "", *metrics_of_split, left=("",))
    for label, name in RESULTS:
        values = [metrics.get(name) for metrics in metrics_of_split.values()]
        if any(value is not None for value in values):
            table.add_row(label, *map(in_digits, values), style="bold" if name == "auc" else None)
    table.add_row("samples", *(f"{metrics['samples']:,}" for metrics in metrics_of_split.values()))
    return table


def print_more(more: Mapping[str, Any], title: str = "") -> None:
    """Grouped AUC, metrics by slice and of further tasks, as `evaluate` found them."""
    prefix = f"{title}: " if title else ""
    if grouped := more.get("grouped_auc"):
        seen = f"mean over {grouped['groups']:,} groups with both labels, {grouped['samples']:,} samples"
        out().print(
            f"{prefix}AUC within {grouped['feature']}: {in_digits(grouped['auc'])} ({seen})",
        )
    for name, slices in more.get("by", {}).items():
        table = Table(
            name, "samples", "AUC", "log loss", "calibration", title=f"{prefix}by {name}", title_justify="left"
        )
        for one in slices:
            numbers = (in_digits(one[metric]) for metric in ("auc", "log_loss", "calibration"))
            table.add_row(one["value"], f"{one['samples']:,}", *numbers)
        out().print(table)
    if tasks := more.get("tasks"):
        table = Table(
            "task",
            "AUC",
            "log loss",
            "calibration",
            "RMSE",
            "MAE",
            "R2",
            title=f"{prefix}further tasks",
            title_justify="left",
        )
        for name, metrics in tasks.items():
            names = ("auc", "log_loss", "calibration", "rmse", "mae", "r2")
            table.add_row(name, *(in_digits(metrics.get(metric)) for metric in names))
        out().print(table)


_OFF, _SURE = 0.1, 3.0
_IN_ORDER, _FEWEST = 0.6, 100  # AUC and positives from which bad probabilities are worth a line


def calibration_notes(metrics_of_split: Mapping[str, Mapping[str, Any]], *, base_rate: bool = False) -> list[str]:
    """A line for every split whose probabilities are too extreme, or off by more than a tenth and than chance explains.

    The number of positives varies by its square root. `base_rate`: training began at the share of positives.
    """
    way = "Newer data may help"
    if not base_rate:
        way = "--set train.base_rate=true starts at the share of positives of train; newer data may help"
    notes = []
    for split, metrics in metrics_of_split.items():
        ratio, positives = metrics.get("calibration"), metrics.get("positives", 0)
        if ratio is None or math.isnan(ratio) or not positives:
            continue
        if abs(ratio - 1) > max(_OFF, _SURE / math.sqrt(positives)):
            size = f"{ratio:.3g} times as high" if ratio > 1 else f"only {ratio:.2g} times as high"
            notes.append(
                f"calibration is off on {split}: predicted probabilities are {size} as the share of positives. The order of "
                f"scores (AUC) is unaffected. {way}"
            )
        entropy, area = metrics.get("normalized_entropy"), metrics.get("auc")
        if entropy and area and entropy > 1 and area > _IN_ORDER and positives >= _FEWEST:
            notes.append(
                f"probabilities on {split} are too extreme: their log loss is {entropy:.2f} times that of always predicting "
                f"the share of positives. The order of scores (AUC {area:.4f}) is right. "
                "Fewer epochs (--epochs) make them milder"
            )
    return notes


def print_calibration(metrics_of_split: Mapping[str, Mapping[str, Any]], *, base_rate: bool = False) -> None:
    """Say where calibration is off."""
    for note in calibration_notes(metrics_of_split, base_rate=base_rate):
        err().print(note)


def in_digits(value: float | None) -> str:
    """Four digits; a dash if the value is unknown or undefined."""
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


@contextmanager
def report_compiling(quiet: bool = False) -> Iterator[CompileReport]:
    """Print a line once kernels have been compiling for some seconds."""
    from hotbed.host.compiling import compiled_within

    with compiled_within(lambda: None if quiet else print_progress(COMPILING), _NOTICE_AFTER) as compiled:
        yield compiled


def compiled_text(compiled: CompileReport) -> str:
    """How long compiling took; "" if there was little or nothing to compile."""
    if compiled.seconds <= _WORTH_REPORTING:
        return ""
    return f"{compiled.kernels:,} kernels were compiled in {compiled.seconds:,.1f} s, once; the speeds above do not include it"
