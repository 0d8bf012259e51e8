"""A progress bar on the terminal for work that reports (name, done, total)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hotbed.cli.console import err


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
