"""What the command line says of a run's settings -> its config; of a run that goes on, what may change on the way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hotbed.cli.console import err, waiting
from hotbed.run.config import DataConfig

if TYPE_CHECKING:
    from hotbed.data.dataset import Dataset
    from hotbed.run.config import RunConfig

DEFAULT_DATA = DataConfig().path  # that `hotbed train` takes
# Changing these on --resume would make another run of it, not the same one longer.
_RESUME_MAY_CHANGE = {
    "data.path",  # what is there must be the same
    "data.eval_batch_size",
    "data.threads",
    "tables.cache",
    "tables.hbm",
    "tables.memory",
    "tables.ssd",
    "tables.policy",
    "tables.window",
    "tables.look_ahead",
    "tables.lr",
    "tables.l2",
    "tables.weight_decay",
    "tables.clip_norm",
    "dense.lr",
    "dense.weight_decay",
    "dense.recorded",
    "train.epochs",
    "train.max_steps",
    "train.device",
    "train.log_every",
    "train.eval_every",
    "train.patience",
    "train.plateau_factor",
    "train.checkpoint_every",
    "train.checkpoint_full_every",
    "train.keep_checkpoints",
    "parallel.mode",
    "parallel.local_ranks",
    "parallel.timeout",
}


def cache_flags(cache: float | None, hbm: str | None) -> dict[str, float | str | None]:
    """One flag alone takes the place of whatever a run file says about the size of the cache."""
    if cache is not None and hbm is None:
        return {"tables.cache": cache, "tables.hbm": ""}
    if hbm is not None and cache is None:
        return {"tables.cache": 0.0, "tables.hbm": hbm}
    return {"tables.cache": cache, "tables.hbm": hbm}


def read_config(run_file: Path | None, given: dict[str, Any], sets: list[str]) -> RunConfig:
    """The settings of a run file, then of flags, then of --set; all mistakes at once."""
    from hotbed.run.config import raise_problems
    from hotbed.run.run_file import compose

    config, problems = compose(run_file, given, sets)
    with waiting("loading torch"):
        from hotbed.train.build import option_problems
    raise_problems(problems + option_problems(config))
    return config


def with_source(config: RunConfig) -> RunConfig:
    """With the text of the user's own model, if it has one; a text that is there already is what the run means.

    The name that an installed package gave to a model is replaced by its place: the run outlives the package.
    """
    from hotbed.models import is_own, read_source
    from hotbed.models.own_code import has_changed, place_of

    name, kept = config.model.name, config.model.source
    if not is_own(name):
        return config
    if kept:
        if has_changed(name, kept):
            err().print(
                f"{name} has changed since this run began; it goes on with the model it began with.", soft_wrap=True
            )
        return config
    model = dataclasses.replace(config.model, name=place_of(name), source=read_source(name)._asdict())
    return dataclasses.replace(config, model=model)


def resumed_config(folder: Path, given: dict[str, Any], sets: list[str], refused: dict[str, Any]) -> RunConfig:
    """The config of a run with what may change on the way."""
    from hotbed.errors import ConfigError
    from hotbed.models import is_own
    from hotbed.run.config import read_tree
    from hotbed.run.folder import read_json
    from hotbed.train.build import changed_settings

    both = [name for name, value in refused.items() if value]
    if both:
        raise ConfigError(f"--resume continues with the settings and folder of its run; leave out {', '.join(both)}.")
    saved = read_json(folder / "config.json")
    if "scale_lr" not in saved.get("parallel", {}):  # of version 0.1: it had no such setting, and did not scale
        given = {"parallel.scale_lr": False, **given}
        saved = {**saved, "parallel": {**saved.get("parallel", {}), "scale_lr": False}}
    before = read_tree(saved)
    if is_own(before.model.name) and not before.model.source:
        raise ConfigError(
            f"{folder / 'config.json'} does not hold the text of its model {before.model.name} (model.source)."
        )
    after = read_config(folder / "config.json", given, sets)
    fixed = [path for path in changed_settings(before, after) if path not in _RESUME_MAY_CHANGE]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)} cannot change on --resume; it would be another run. Start a new one with "
            f"`hotbed train {folder / 'config.json'} --set ...`."
        )
    return after


def open_dataset(name: str) -> Dataset:
    """Resolve a name; the bar appears with the first rows that are made."""
    from hotbed.data.embedded import resolve

    bar = Progress(
        TextColumn(f"building {name}, once"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeRemainingColumn(),
        console=err(),
        transient=True,
        disable=not err().is_terminal,
    )

    def show(done: int, total: int) -> None:
        if not bar.tasks:
            bar.start()
            bar.add_task("", total=total)
        bar.update(bar.tasks[0].id, completed=done)

    try:
        return resolve(name, progress=show)
    finally:
        if bar.tasks:
            bar.stop()
