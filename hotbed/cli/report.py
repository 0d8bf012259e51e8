"""`hotbed report`: writes the page of a run again from its files, or one page that compares several runs."""

from __future__ import annotations

from pathlib import Path

from hotbed.cli.console import out, print_json
from hotbed.cli.options import AsJson, DryRun, Out, RunPlaces


def report_command(
    runs: RunPlaces,
    page: Out = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write the report page of a run from the files of its folder, or a page that compares several runs.

    --out is the file to write; left out: RUN/report.html, or compare.html for several runs. A comparison shows the
    settings that differ, the results with their difference to the first run, and the curves of all runs over each other.

    [bold]For example:[/bold]

    hotbed report runs/demo

    hotbed report runs/demo runs/mine --out compare.html
    """
    from hotbed.files import RemotePath, path_of
    from hotbed.report import read_run, write_comparison, write_report
    from hotbed.run.remote_folder import local_copy, nothing

    place = path_of(page) if page is not None else path_of(runs[0]) / "report.html" if len(runs) == 1 else None
    copies = [local_copy(run, nothing) for run in runs]
    remote = place if isinstance(place, RemotePath) else None
    target = copies[0] / "report.html" if remote is not None else page
    if dry_run:
        for run in copies:
            read_run(run)  # an error if it is not a run
        planned = str(place or "compare.html")
        if as_json:
            print_json({"dry_run": True, "page": planned, "runs": [str(run) for run in runs]})
        else:
            out().print(f"dry run: {planned} would be written. Nothing was written.", soft_wrap=True)
        return
    if len(runs) == 1:
        written = write_report(copies[0], target)
    else:
        written = write_comparison(copies, target or Path("compare.html"))
    if remote is not None:
        remote.put(written)
        written = remote
    if as_json:
        print_json({"dry_run": False, "page": str(written), "runs": [str(run) for run in runs]})
        return
    out().print(f"report: {written}", soft_wrap=True)
