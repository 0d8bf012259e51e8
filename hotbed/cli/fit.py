"""`hotbed train` from Python: a model and a dataset in, a trained run out, with all that the command does on the way."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from hotbed.cli.console import told_of_compiling
from hotbed.cli.ranks import Start, joined
from hotbed.cli.settings import cache_flags, read_config, resumed_config
from hotbed.cli.train import StartOptions, train_run
from hotbed.errors import ConfigError, ModelError
from hotbed.models import is_own, read_source
from hotbed.run.config import FIELDS, unknown
from hotbed.run.folder import read_json

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
    """Train, evaluate, keep and report, as `hotbed train` does; Ctrl-C saves, and `resume=True` goes on.

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
        resume: continue the run in `out`, as if it had never stopped; of the settings above, those that may change. A model
            that is given must be that of the run.
        warm_start: begin with the rows and weights of this run or checkpoint, as far as they fit.
        forecast: print a forecast first, and compare it with the measurement at the end.
        quiet: print only the result.
    """
    with _Fitting():
        flags = {
            "model.name": None if model is None else _name_of(model),
            "data.path": None if data is None else str(data),
            "train.epochs": epochs,
            "train.device": device,
            "train.seed": seed,
            **cache_flags(cache, hbm),
            "tables.memory": memory,
            "tables.ssd": ssd,
        }
        given = {path: value for path, value in flags.items() if value is not None} | _flat(settings or {})
        folder = None if out is None else Path(out)
        if resume and folder is None:
            raise ConfigError("resume=True continues the run in `out`; give its folder.")
        with joined() as ranks:
            manner = StartOptions(quiet, None if warm_start is None else Path(warm_start), forecast and not resume)
            asked = None if folder is None else Start(folder, resume=resume, overwrite=overwrite)
            if resume and folder is not None:
                if "model.name" in given and _is_model_of(folder, given["model.name"]):
                    del given["model.name"]  # the same one, named from another folder perhaps
                config = resumed_config(folder, given, [], {"overwrite": overwrite, "warm_start": warm_start})
            else:
                config = read_config(None, given, [])
            try:
                with told_of_compiling(quiet or ranks.rank > 0) as compiled:
                    folder = train_run(config, asked, ranks, manner, compiled)
            except typer.Exit as stopped:
                raise KeyboardInterrupt(
                    "training was interrupted and saved; fit(..., resume=True) goes on"
                ) from stopped
    return Run(folder, read_json(folder / "summary.json"))


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by path, checked; those of a model or an optimizer alone gathered under its `options`."""
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


class _Fitting:
    """Around a call of fit: the file of a model is executed again, and must not train by itself."""

    active = False

    def __enter__(self) -> None:
        if _Fitting.active:
            raise ModelError(
                'the file of the model trains when it is loaded; put that under `if __name__ == "__main__":`'
            )
        _Fitting.active = True

    def __exit__(self, *error: object) -> None:
        _Fitting.active = False


def _is_model_of(folder: Path, name: str) -> bool:
    """Whether a name stands for the class and, if it is a user's own, the file that a run began with."""
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
            f"model is a name or a class, not an object; given: one of {type(model).__name__}. It is built here: give the "
            "class, and its options as settings={'model.options.hidden': 128}."
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
