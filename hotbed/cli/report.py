"""`hotbed report`: the page of a run, written again from its files; of several runs, one page that compares them."""

from __future__ import annotations

from pathlib import Path

import typer

from hotbed.cli.console import out


def report_command(
    runs: list[Path] = typer.Argument(..., help="Run folders; a run that is not finished has a page too."),
    page: Path | None = typer.Option(
        None, "--out", help="Where the page goes: RUN/report.html, or compare.html for several runs."
    ),
) -> None:
    """Write the report page of a run again, from the files of its folder; of several runs, a page that compares them.

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
