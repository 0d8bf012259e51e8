"""`hotbed report`: the page of a run, written again from its files."""

from __future__ import annotations

from pathlib import Path

import typer

from hotbed.cli.console import out


def report_command(
    run: Path = typer.Argument(..., help="Run folder; a run that is not finished has a page too."),
) -> None:
    """Write the report page of a run again, from the files of its folder.

    [bold]For example:[/bold]

    hotbed report runs/demo
    """
    from hotbed.report import write_report

    out().print(f"report: {write_report(run)}", soft_wrap=True)
