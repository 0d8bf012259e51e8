"""`hotbed report`: writes the page of a run again from its files, or one page that compares several runs."""

from __future__ import annotations

from pathlib import Path

import typer

from hotbed.cli.console import out


def report_command(
    runs: list[Path] = typer.Argument(..., help="Run folders, finished or not."),
    page: Path | None = typer.Option(
        None, "--out", help="The file to write. Left out: RUN/report.html, or compare.html for several runs."
    ),
) -> None:
    """Write the report page of a run from the files of its folder, or a page that compares several runs.

    A comparison shows the settings that differ, the results with their difference to the first run, and the curves of all
    runs over each other.

    [bold]For example:[/bold]

    hotbed report runs/demo

    hotbed report runs/plain runs/cached runs/dynamic --out compare.html
    """
    from hotbed.files import RemotePath, path_of
    from hotbed.report import write_comparison, write_report
    from hotbed.run.remote_folder import local_copy, nothing

    place = path_of(page) if page is not None else path_of(runs[0]) / "report.html" if len(runs) == 1 else None
    copies = [local_copy(run, nothing) for run in runs]
    remote = place if isinstance(place, RemotePath) else None
    target = copies[0] / "report.html" if remote is not None else page
    if len(runs) == 1:
        written = write_report(copies[0], target)
    else:
        written = write_comparison(copies, target or Path("compare.html"))
    if remote is not None:
        remote.put(written)
        written = remote
    out().print(f"report: {written}", soft_wrap=True)
