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
    from hotbed.report import write_comparison, write_report

    if len(runs) == 1:
        written = write_report(runs[0], page)
    else:
        written = write_comparison(runs, page or Path("compare.html"))
    out().print(f"report: {written}", soft_wrap=True)
