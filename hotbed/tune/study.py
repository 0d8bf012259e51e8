"""A config and a dataset in, trials out: each is a run of its own, in a folder of its own, judged by its best valid AUC.

    OUT/tune.json        what is tuned: settings, dataset, ranges; a second call with other ones is refused
    OUT/study.log        the journal of Optuna: every trial with its values and evaluations, appended as they happen
    OUT/trials/0007/     the run of a trial: config.json, metrics.jsonl, summary.json; the model only of the best trial
    OUT/best.json        the settings of the best trial, a run file for `hotbed train`

A trial reports its own evaluations, and ends early (it is pruned) if its valid AUC is below the median of the earlier trials
at the same evaluation. After a kill the same command continues: a trial that was running is run again with its values. The
first trial has the settings of `hotbed train`. One process; the trials of one study run one after the other.

`write_tune_page` writes all trials to one self-contained page: valid AUC by trial, evaluations, and a table of all settings.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hotbed.data.dataset import Dataset
from hotbed.errors import ConfigError, HotbedError, RunError
from hotbed.report.charts import Chart, ReferenceLine, Series, figure
from hotbed.report.formats import decimal, html_page, section, table, text
from hotbed.run.config import RunConfig
from hotbed.run.folder import make_run, write_text
from hotbed.telemetry.observer import Observer, Progress, Record
from hotbed.train.build import build
from hotbed.train.run import run
from hotbed.tune.space import Dimension, Value, apply, default_values

if TYPE_CHECKING:
    import optuna


STARTUP_TRIALS = 6  # that are neither pruned nor guided
_MODEL_FILES = ("model", "model.old", "checkpoints", "best", "forecast.json")


class TunedTrial(NamedTuple):
    """The result of one trial."""

    number: int
    state: str  # complete, pruned or failed
    values: dict[str, Value]
    valid_auc: float | None  # best so far for a pruned trial
    test_auc: float | None
    steps: int
    seconds: float
    evaluations: list[float]  # valid AUC in order


class TuneRequest(NamedTuple):
    """What to tune."""

    config: RunConfig  # of the first trial
    dataset: Dataset
    space: list[Dimension]
    folder: Path


def load_optuna() -> Any:
    """Optuna, or an error that says how to install it."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(f"hotbed tune needs Optuna ({error}). Install it: pip install 'hotbed[tune]'.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def check_request(request: TuneRequest) -> None:
    """Errors that are known before the first trial."""
    valid = request.dataset.schema.splits.get("valid")
    if valid is None or not valid.rows:
        raise ConfigError(
            f"{request.config.data.path} has no valid split, by which trials are compared. Prepare it again: `hotbed prepare "
            "... --splits train=0.8,valid=0.1,test=0.1`, or --splits valid=0.1 if train and test are files of their own."
        )
    if not request.space:
        raise ConfigError("every setting that tune would try is given. Leave out some of them.")
    noted = _description(request)
    path = request.folder / "tune.json"
    if path.is_file():
        before = json.loads(path.read_text())
        differs = [name for name in noted if before.get(name) != noted[name]]
        if differs:
            raise ConfigError(
                f"{request.folder} holds trials with another {', '.join(differs)}. Give the same settings to continue them, or "
                "another --out."
            )
    elif request.folder.is_dir() and any(request.folder.iterdir()):
        raise ConfigError(f"{request.folder} is not empty and holds no trials. Choose another --out.")


def make_folder(request: TuneRequest) -> None:
    """The folder of the trials, with what is tuned, unless it is there. `check_request` comes first."""
    path = request.folder / "tune.json"
    if not path.is_file():
        request.folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(_description(request), indent=1) + "\n")


def tune(request: TuneRequest, trials: int, say: Callable[[TunedTrial], None]) -> bool:
    """Run trials until `trials` of them have ended; False if interrupted. `make_folder` comes first."""
    study = _open_study(request)
    _requeue_lost(study)
    _keep_best(request, study)  # a process may have been killed before it did
    while len(results(study)) < trials:
        if not _run_trial(request, study, say):
            return False
    return True


def results(study: optuna.Study) -> list[TunedTrial]:
    """The trials that have ended, in order; those that were lost are not among them."""
    optuna = load_optuna()
    states = {
        optuna.trial.TrialState.COMPLETE: "complete",
        optuna.trial.TrialState.PRUNED: "pruned",
        optuna.trial.TrialState.FAIL: "failed",
    }
    found = []
    for one in study.get_trials(deepcopy=False):
        if one.state not in states or one.user_attrs.get("lost"):
            continue
        evaluations = [one.intermediate_values[step] for step in sorted(one.intermediate_values)]
        best = one.value if one.state == optuna.trial.TrialState.COMPLETE else max(evaluations, default=None)
        about = one.user_attrs
        found.append(
            TunedTrial(
                *(one.number, states[one.state], about.get("values", {}), best, about.get("test_auc")),
                *(about.get("steps", 0), about.get("seconds", 0.0), evaluations),
            )
        )
    return found


def read_results(request: TuneRequest) -> list[TunedTrial]:
    """The trials of a folder."""
    return results(_open_study(request))


def best_of(found: list[TunedTrial]) -> TunedTrial | None:
    """The finished trial with the highest valid AUC; the earliest of equals."""
    done = [one for one in found if one.state == "complete" and one.valid_auc is not None]
    return max(done, key=lambda one: (one.valid_auc or 0.0, -one.number), default=None)


def _description(request: TuneRequest) -> dict[str, Any]:
    space = [one._asdict() | {"values": list(one.values)} for one in request.space]
    return {"config": dataclasses.asdict(request.config), "data": request.dataset.fingerprint, "space": space}


def _open_study(request: TuneRequest) -> optuna.Study:
    load_optuna()
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    path = str(request.folder / "study.log")
    lock = Path(f"{path}.lock")
    lock.unlink(missing_ok=True)  # of a process that was killed: the folder is locked by this one
    storage = optuna.storages.JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))
    study = optuna.create_study(
        storage=storage,
        study_name="hotbed",
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=1),
    )
    seen = len(study.get_trials(deepcopy=False))
    # another seed after a restart: the same one would draw the same values again
    study.sampler = optuna.samplers.TPESampler(seed=request.config.train.seed + seen, n_startup_trials=STARTUP_TRIALS)
    if not seen:
        values = default_values(request.config)
        study.enqueue_trial({one.path: values[one.path] for one in request.space})
    return study


def _requeue_lost(study: optuna.Study) -> None:
    """Trials that a killed process left running are run again."""
    optuna = load_optuna()
    for one in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        _lose(study, one.number, dict(one.params))


def _lose(study: optuna.Study, number: int, params: dict[str, Any]) -> None:
    """Forget a trial that did not end, and queue its values again."""
    optuna = load_optuna()
    storage, identity = study._storage, study.get_trials(deepcopy=False)[number]._trial_id
    storage.set_trial_user_attr(identity, "lost", True)
    study.tell(number, state=optuna.trial.TrialState.FAIL)
    study.enqueue_trial(params)


class _PrunedError(Exception):
    """The trial is not worth finishing."""


class _Report(Observer):
    """An observer that reports evaluations to Optuna, and ends a trial that falls behind."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial
        self._evaluations = 0
        self.steps = 0

    def step(self, progress: Progress) -> None:
        self.steps = progress.step

    def record(self, record: Record) -> None:
        if record.get("kind") == "eval" and record.get("split") == "valid":
            self._evaluations += 1
            self._trial.report(float(record["auc"]), self._evaluations)
            if self._trial.should_prune():
                raise _PrunedError


def _run_trial(request: TuneRequest, study: optuna.Study, say: Callable[[TunedTrial], None]) -> bool:
    """One trial; False if it was interrupted."""
    optuna = load_optuna()
    trial = study.ask()
    values = {one.path: one.suggest(trial) for one in request.space}
    trial.set_user_attr("values", values)
    config = apply(request.config, values)
    folder = request.folder / "trials" / f"{trial.number:04d}"
    report = _Report(trial)
    try:
        make_run(folder, overwrite=True)
        built = build(config, request.dataset, folder, [report])
        write_text(folder / "config.json", config.to_json())
        summary = run(built.training, built.subject).summary
        trial.set_user_attr("steps", report.steps)
        trial.set_user_attr("seconds", round(summary["seconds"], 2))
        if not summary["finished"]:
            _lose(study, trial.number, dict(trial.params))
            return False
        trial.set_user_attr("test_auc", summary["final"].get("test", {}).get("auc"))
        study.tell(trial, summary["final"]["valid"]["auc"])
    except _PrunedError:
        trial.set_user_attr("steps", report.steps)
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    except KeyboardInterrupt:  # the second signal
        _lose(study, trial.number, dict(trial.params))
        raise
    except (RunError, ConfigError) as error:  # it diverged, or does not fit
        trial.set_user_attr("error", str(error))
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    _keep_best(request, study)
    found = results(study)
    if best_of(found) is None and len(found) >= STARTUP_TRIALS:
        raise HotbedError(
            f"none of the first {STARTUP_TRIALS} trials finished: {_errors(study)}. Correct the settings."
        )
    say(found[-1])
    return True


def _keep_best(request: TuneRequest, study: optuna.Study) -> None:
    """Remove the model of every trial but the best, and write its settings."""
    best = best_of(results(study))
    keep = None if best is None else request.folder / "trials" / f"{best.number:04d}"
    for one in (request.folder / "trials").glob("*"):
        if one != keep:
            for name in _MODEL_FILES:
                path = one / name
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    if best is not None:
        write_text(request.folder / "best.json", apply(request.config, best.values).to_json())


def _errors(study: optuna.Study) -> str:
    found = [one.user_attrs["error"] for one in study.get_trials(deepcopy=False) if "error" in one.user_attrs]
    return found[0] if found else "all were pruned"


_MOST_CURVES = 6  # one colour each


def write_tune_page(path: Path, name: str, trials: list[TunedTrial]) -> None:
    """Write the page; the first trial is that of the defaults."""
    best, first = best_of(trials), next((one for one in trials if one.number == 0), None)
    heading = f'<header><p class="kicker">hotbed tune</p><h1>{text(name, 120)}</h1></header>'
    body = heading + section("result", "Result", _result(best, first), _figures(trials, first), _table(trials, best))
    write_text(path, html_page(f"{name}: {len(trials)} trials", "", body))


def _result(best: TunedTrial | None, first: TunedTrial | None) -> str:
    if best is None or best.valid_auc is None:
        return "<p>No trial has finished yet.</p>"
    gain = ""
    if first is not None and first.valid_auc is not None:
        gain = f" Defaults reach {decimal(first.valid_auc)}, {best.valid_auc - first.valid_auc:.4f} less."
    values = ", ".join(f"{text(path)} = {text(str(value))}" for path, value in best.values.items())
    test = "" if best.test_auc is None else f" Its test AUC is {decimal(best.test_auc)}; trials are not chosen by it."
    return f"<p>Best valid AUC {decimal(best.valid_auc)}, in trial {best.number}: {values}.{gain}{test}</p>"


def _figures(trials: list[TunedTrial], first: TunedTrial | None) -> str:
    done = [one for one in trials if one.valid_auc is not None]
    if not done:
        return ""
    best_so_far, points = 0.0, []
    for one in done:
        if one.state == "complete":
            best_so_far = max(best_so_far, one.valid_auc or 0.0)
        points.append((float(one.number), best_so_far or float("nan")))
    marks = (ReferenceLine(first.valid_auc, "defaults"),) if first is not None and first.valid_auc is not None else ()
    by_trial = Chart(
        "tune-trials",
        "Valid AUC by trial",
        "Every trial with its best evaluation, and the best of all finished trials so far. A pruned trial ended early.",
        "trial",
        "valid AUC",
        (
            Series("trial", [(float(one.number), one.valid_auc or 0.0) for one in done], 1),
            Series("best so far", points, 2),
        ),
        y_marks=marks,
    )
    top = sorted((one for one in done if len(one.evaluations) > 1), key=lambda one: -(one.valid_auc or 0.0))[
        :_MOST_CURVES
    ]
    figures = [figure(by_trial)]
    if top:
        curves = tuple(
            Series(f"trial {one.number}", list(enumerate(map(float, one.evaluations), 1)), 1 + k)
            for k, one in enumerate(top)
        )
        about = f"The evaluations of the {len(top)} best trials."
        figures.append(figure(Chart("tune-curves", "Best trials", about, "evaluation", "valid AUC", curves)))
    return f'<div class="figures">{"".join(figures)}</div>'


def _table(trials: list[TunedTrial], best: TunedTrial | None) -> str:
    paths = list(dict.fromkeys(path for one in trials for path in one.values))
    rows = [
        [
            f"{one.number}{' (best)' if best is not None and one.number == best.number else ''}",
            one.state,
            decimal(one.valid_auc) if one.valid_auc is not None else "",
            decimal(one.test_auc) if one.test_auc is not None else "",
            f"{one.steps:,}",
            f"{one.seconds:.0f}",
            *(text(str(one.values.get(path, ""))) for path in paths),
        ]
        for one in sorted(trials, key=lambda one: -(one.valid_auc or 0.0))
    ]
    head = ["trial", "state", "valid AUC", "test AUC", "steps", "seconds", *map(text, paths)]
    return table("All trials, best first", head, rows)
