"""`hotbed report`: writes the page of a run again from its files, or one page that compares several runs."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from hotbed.cli.console import out, print_json, progress_bar, report_compiling, waiting
from hotbed.cli.options import AsJson, DryRun, Out, RunPlaces

ANALYSIS = "analysis.json"


def report_command(
    runs: RunPlaces,
    page: Out = None,
    analyze: bool = typer.Option(
        False,
        "--analyze",
        help="Also measure what each feature contributes to the AUC, by permutation, and find the worst errors.",
    ),
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write the report page of a run from the files of its folder, or a page that compares several runs.

    --out is the file to write; left out: RUN/report.html, or compare.html for several runs. A comparison shows the
    settings that differ, the results with their difference to the first run, and the curves of all runs over each other.

    --analyze scores up to 100,000 samples of the test split (else valid) once for each feature, keeps the result as
    analysis.json in the run folder, and shows it on the page.

    [bold]For example:[/bold]

    hotbed report runs/demo

    hotbed report runs/mine --analyze

    hotbed report runs/demo runs/mine --out compare.html
    """
    from hotbed.files import RemotePath, path_of
    from hotbed.report import read_run, write_comparison, write_report
    from hotbed.run.remote_folder import for_scoring, local_copy, nothing

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
            out().print(f"dry run: {planned} would be written. Nothing was written.")
        return
    if analyze:
        for run, copy in zip(runs, copies):
            analyze_run(local_copy(run, for_scoring), copy)
            if isinstance(whole := path_of(run), RemotePath):
                (whole / ANALYSIS).put(copy / ANALYSIS)
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
    out().print(f"report: {written}")


def analyze_run(run: Path, folder: Path) -> None:
    """Write analysis.json of a run to a folder."""
    with report_compiling():
        with waiting("loading the model"):
            from hotbed.cli.evaluate import SCORE_BATCH, ModelOptions, open_model
            from hotbed.cli.settings import open_dataset
            from hotbed.data.loader.loader import Loader
            from hotbed.run.folder import find_data_or_say, write_text
            from hotbed.run.model_card import read_card
            from hotbed.train.evaluation import analyze
            from hotbed.train.model_folder import check_same_ids

            card = read_card(run / "model")
            dataset = open_dataset(find_data_or_say(card["dataset"], run))
            model = open_model(run, None, "auto", ModelOptions(None, None, SCORE_BATCH))
            check_same_ids(model.folder, dataset)
            split = next(name for name in ("test", "valid", "train") if name in dataset.schema.splits)
            loader = Loader(dataset, split, batch_size=SCORE_BATCH)
        with progress_bar("exchanging features", "features") as report:
            found = analyze(model.learner, loader, dataset.schema, split, lambda done, all: report("", done, all))
    write_text(folder / ANALYSIS, json.dumps({**found.figures(), "steps": card.get("steps")}) + "\n")
