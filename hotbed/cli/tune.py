"""`hotbed tune`: many runs with other settings, the best of them kept; it continues after a kill."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotbed.cli.console import err, out, print_json, report_compiling, waiting
from hotbed.cli.options import AsJson, Data, Device, DryRun, ModelName, Out, RunFile, Seed, Sets, local_only
from hotbed.cli.settings import open_dataset, read_config, settings_of_flags, suited_config, with_source
from hotbed.errors import ExitCode
from hotbed.run.run_file import given_settings

if TYPE_CHECKING:
    from hotbed.tune.study import TunedTrial, TuneRequest


def tune_command(
    run_file: RunFile = None,
    data: Data = None,
    model: ModelName = None,
    trials: int = typer.Option(50, min=1, metavar="N", help="Trials in all, those of earlier calls included."),
    folder: Out = None,
    epochs: int | None = typer.Option(None, help="Passes over the train split."),
    device: Device = None,
    seed: Seed = None,
    sets: Sets = [],  # noqa: B006  never changed
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Try settings and keep the best by valid AUC. It needs Optuna, which the extra `tune` installs.

    The first trial has the settings of `hotbed train`. A trial whose valid AUC falls behind ends early.
    Settings that are given (--set, a run file) are not tuned. After Ctrl-C or a kill the same command continues.
    --out is the folder of the trials; left out: tune/MODEL-DATA. --epochs: of each trial, at most.

    [bold]For example:[/bold]

    hotbed tune --data mydata --trials 2 --epochs 1

    hotbed tune --data mydata --model dcnv2 --set model.dim=8 --out tune/small

    hotbed train tune/deepfm-mydata/best.json --out runs/best
    """
    from hotbed.tune.space import search_space
    from hotbed.tune.study import TuneRequest, check_request, load_optuna, read_results

    local_only(out=folder)
    load_optuna()
    given = settings_of_flags(data=data, model=model, epochs=epochs, device=device, seed=seed)
    config = with_source(read_config(run_file, given, sets))
    named = given_settings(run_file, given, sets)
    dataset = open_dataset(config.data.path)
    config = suited_config(config, named, dataset, _say)
    place = folder or Path("tune") / f"{Path(config.model.name).stem}-{Path(config.data.path).name.replace(':', '-')}"
    request = TuneRequest(config, dataset, search_space(config, named), place)
    check_request(request)
    if dry_run:
        _show_dry_run(request, trials, as_json)
        return
    finished = _tune(request, trials)
    found = read_results(request)
    _show(found, request.folder, as_json)
    if not finished:
        err().print(f"interrupted after {len(found)} of {trials} trials. The same command continues.")
        raise typer.Exit(ExitCode.INTERRUPTED)


def _tune(request: TuneRequest, trials: int) -> bool:
    """Run the trials, a line and a new page after each."""
    with report_compiling():
        with waiting("starting"):
            from hotbed.run.folder import alone
            from hotbed.tune.study import best_of, make_folder, read_results, tune, write_tune_page

        def write_page() -> list[TunedTrial]:
            found, name = read_results(request), f"{request.config.model.name} on {request.config.data.path}"
            write_tune_page(request.folder / "report.html", name, found)
            return found

        def say(trial: TunedTrial) -> None:
            best = best_of(write_page())
            auc = "-" if trial.valid_auc is None else f"{trial.valid_auc:.4f}"
            values = ", ".join(f"{short_name(path, trial.values)} {value}" for path, value in trial.values.items())
            shown = "" if best is None else f"; best {best.valid_auc:.4f} (trial {best.number})"
            _say(f"trial {trial.number} {trial.state}: valid AUC {auc} with {values}{shown}")

        make_folder(request)
        with alone(request.folder):
            finished = tune(request, trials, say)
            write_page()  # also where no trial was left to run
            return finished


def short_name(path: str, paths: Collection[str]) -> str:
    """The last part of the path of a setting; the whole path if another one ends alike (tables.lr, dense.lr)."""
    last = path.rpartition(".")[2]
    return path if sum(other.rpartition(".")[2] == last for other in paths) > 1 else last


def _say(text: str) -> None:
    err().print(text)


def _show_dry_run(request: TuneRequest, trials: int, as_json: bool) -> None:
    paths = [one.path for one in request.space]
    if as_json:
        print_json({"dry_run": True, "out": str(request.folder), "trials": trials, "space": paths})
        return
    out().print(f"{trials} trials would be run in {request.folder}, over {', '.join(paths)}.")


def _show(found: list[TunedTrial], folder: Path, as_json: bool) -> None:
    from hotbed.tune.study import best_of

    best, first = best_of(found), next((one for one in found if one.number == 0), None)
    if as_json:
        shown: dict[str, Any] = {"dry_run": False, "out": str(folder), "trials": len(found)}
        shown["best"] = None if best is None else best._asdict()
        shown["defaults"] = None if first is None else first._asdict()
        print_json(shown)
        return
    if best is None or best.valid_auc is None:
        return
    if first is not None and first.valid_auc is not None:
        gain = best.valid_auc - first.valid_auc
        out().print(
            f"valid AUC {best.valid_auc:.4f} in trial {best.number}; defaults {first.valid_auc:.4f} (gain {gain:.4f})"
        )
    if best.test_auc is not None:
        out().print(f"test AUC {best.test_auc:.4f}")
    out().print(f"report: {folder / 'report.html'}")
    out().print(f"next: hotbed train {shlex.quote(str(folder / 'best.json'))} --out runs/best")
