"""Opening a dataset by name or path, with a bar while an embedded one is built for the first time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hotbed.cli.console import err
from hotbed.run.config import DataConfig

if TYPE_CHECKING:
    from hotbed.data.dataset import Dataset

DEFAULT_DATA = DataConfig().path  # that `hotbed train` takes


def open_dataset(name: str) -> Dataset:
    """Resolve a name; the bar appears with the first rows that are made."""
    from hotbed.data.embedded import resolve

    bar = Progress(
        TextColumn(f"building {name}, once"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeRemainingColumn(),
        console=err(),
        transient=True,
        disable=not err().is_terminal,
    )

    def show(done: int, total: int) -> None:
        if not bar.tasks:
            bar.start()
            bar.add_task("", total=total)
        bar.update(bar.tasks[0].id, completed=done)

    try:
        return resolve(name, progress=show)
    finally:
        if bar.tasks:
            bar.stop()
