"""`hotbed train` from Python: a model and a dataset in, a trained run out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from hotbed.cli.console import report_compiling
from hotbed.cli.ranks import RunStart, join_ranks
from hotbed.cli.settings import read_config, resumed_config, settings_of_flags
from hotbed.cli.train_run import StartOptions, train_run
from hotbed.errors import ConfigError, ModelError
from hotbed.files import is_remote, path_of
from hotbed.models import is_own, read_source
from hotbed.run.config import FIELDS
from hotbed.run.config_check import unknown
from hotbed.run.folder import read_json
from hotbed.run.remote_run import working_copy

if TYPE_CHECKING:
    from hotbed.scorer import Scorer


class Run(NamedTuple):
    """A run folder and how it ended."""

    folder: Path
    summary: dict[str, Any]  # as in summary.json: final metrics, steps, speed

    def load(self, **settings: Any) -> Scorer:
        """The trained model, ready to score: `hotbed.load` of the folder."""
        from hotbed.scorer import load

        return load(self.folder, **settings)


def fit(
    model: str | type | None = None,
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    epochs: int | None = None,
    device: str | None = None,
    seed: int | None = None,
    cache: float | None = None,
    hbm: str | None = None,
    memory: str | None = None,
    ssd: str | None = None,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    warm_start: str | Path | None = None,
    forecast: bool = True,
    quiet: bool = False,
) -> Run:
    """Train, evaluate, save and report, as `hotbed train` does. Ctrl-C saves; `resume=True` continues.

    Args:
        model: a name of `hotbed models`, or your own: "my_model.py:MyModel" or the class, defined in a file. None: deepfm.
        data: a dataset folder, or criteo-like, criteo-like:ROWS, adult. None: criteo-like.
        out: the run folder; a new one under runs/ when None.
        epochs: passes over the train split.
        device: auto, cpu, cuda or cuda:N.
        seed: same seed, same machine: same bits.
        cache: share of the rows on the device.
        hbm: the cache in bytes of device memory, e.g. "2GiB".
        memory: most host memory for rows behind the cache.
        ssd: folder and bytes for the rest, e.g. "/fast/rows:500GiB".
        settings: any other setting of a run file by its path, e.g. {"model.dim": 32, "model.options.hidden": [64]}.
        overwrite: start again in a folder that holds a run.
        resume: continue the run in `out`, as if it had never stopped. Only some settings may change. If a model is given,
            it must be that of the run.
        warm_start: start from the rows and weights of this run or checkpoint that fit this model.
        forecast: print a forecast first, and compare it with the measurement at the end.
        quiet: print only the result.
    """
    with _FitGuard():
        given = settings_of_flags(
            model=None if model is None else _name_of(model),
            data=None if data is None else str(data),
            epochs=epochs, device=device, seed=seed, cache=cache, hbm=hbm, memory=memory, ssd=ssd,
        )  # fmt: skip
        given |= _flat(settings or {})
        place = None if out is None else path_of(out)
        if resume and place is None:
            raise ConfigError("resume=True continues the run in `out`; give its folder.")
        with join_ranks() as ranks, working_copy(place, resume=resume, overwrite=overwrite) as folder:
            source = None if warm_start is None else Path(warm_start)
            options = StartOptions(quiet, source, forecast and not resume, given=frozenset(given))
            start = None if folder is None else RunStart(folder, resume=resume, overwrite=overwrite)
            if resume and folder is not None:
                if "model.name" in given and _is_model_of(folder, given["model.name"]):
                    del given["model.name"]  # the same model, perhaps named from another folder
                config = resumed_config(folder, given, [], {"overwrite": overwrite, "warm_start": warm_start})
            else:
                config = read_config(None, given, [])
            try:
                with report_compiling(quiet or ranks.rank > 0) as compiled:
                    trained = train_run(config, start, ranks, options, compiled)
            except typer.Exit as stopped:
                raise KeyboardInterrupt(
                    "training was interrupted and saved; fit(..., resume=True) continues it"
                ) from stopped
            summary = read_json(trained / "summary.json")
    return Run(place if place is not None and is_remote(place) else trained, summary)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by path, checked; those of one model or optimizer are collected under its `options`."""
    flat: dict[str, Any] = {}
    for path, value in settings.items():
        head, _, option = path.partition(".options.")
        if option and f"{head}.options" in FIELDS:
            flat[f"{head}.options"] = {**flat.get(f"{head}.options", {}), option: value}
        elif path in FIELDS:
            flat[path] = value
        else:
            raise ConfigError(unknown(path, FIELDS))
    return flat


class _FitGuard:
    """Refuses nested calls of fit: the file of a model is executed when it is loaded, and must not train then."""

    active = False

    def __enter__(self) -> None:
        if _FitGuard.active:
            raise ModelError(
                'the file of the model trains when it is loaded; put that under `if __name__ == "__main__":`'
            )
        _FitGuard.active = True

    def __exit__(self, *error: object) -> None:
        _FitGuard.active = False


def _is_model_of(folder: Path, name: str) -> bool:
    """Whether a name is the model of a run: the same class and, for a user's own model, the same file."""
    began = read_json(folder / "config.json")["model"]
    if not is_own(name):
        return bool(name == began["name"])
    source, kept = read_source(name), began.get("source", {})
    return (source.name, source.file) == (kept.get("name"), kept.get("file"))


def _name_of(model: str | type) -> str:
    if isinstance(model, str):
        return model
    if not isinstance(model, type):
        raise ConfigError(
            f"model must be a name or a class, not an instance (given: a {type(model).__name__}). Give the class, and its "
            "options as settings={'model.options.hidden': 128}."
        )
    try:
        file = inspect.getsourcefile(model)
    except (TypeError, OSError):
        file = None
    if file is None or not Path(file).is_file():
        raise ConfigError(
            f"{model.__name__} is not defined in a file, so a run could not keep it. Write it to one (in a notebook: "
            f"%%writefile my_model.py) and give 'my_model.py:{model.__name__}'."
        )
    if "<locals>" in model.__qualname__:
        raise ConfigError(f"{model.__qualname__} is defined in a function; move it to the top of {Path(file).name}.")
    module = sys.modules.get(model.__module__)
    if (
        module is not None and module.__package__ and model.__module__ != "__main__"
    ):  # of a package: it may import relatively
        return f"{model.__module__}:{model.__qualname__}"
    path = Path(file).resolve()
    here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{here}:{model.__qualname__}"
