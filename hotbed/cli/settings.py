"""Flags, run file and --set -> the config of a run; for a resumed run, which settings may change."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbed.cli.console import err, progress_bar, waiting
from hotbed.run.config import DataConfig

if TYPE_CHECKING:
    from hotbed.data.dataset import Dataset
    from hotbed.run.config import RunConfig

DEFAULT_DATA = DataConfig().path  # of `hotbed train`
_FLAGS = {  # flag -> setting; all commands that train, or forecast training
    "data": "data.path",
    "batch_size": "data.batch_size",
    "model": "model.name",
    "dim": "model.dim",
    "optimizer": "tables.optimizer",
    "lr": "tables.lr",
    "memory": "tables.memory",
    "ssd": "tables.ssd",
    "policy": "tables.policy",
    "dynamic": "tables.dynamic",
    "admit": "tables.admit",
    "expire": "tables.expire",
    "dense_lr": "dense.lr",
    "device": "train.device",
    "epochs": "train.epochs",
    "seed": "train.seed",
    "positive_weight": "train.positive_weight",
    "checkpoint_every": "train.checkpoint_every",
    "follow": "follow.source",
    "checkpoint_minutes": "follow.checkpoint_minutes",
    "stop_when_idle": "follow.idle_seconds",
    "k_step": "parallel.k_step",
    "merge": "parallel.merge",
    "scale_lr": "parallel.scale_lr",
    "overlap": "parallel.overlap",
    "delay": "parallel.delay",
    "across_only": "parallel.across_only",
}
# All other settings are fixed on --resume: changing them would make it a different run.
_RESUME_MAY_CHANGE = {
    "data.path",  # its content must be the same
    "data.eval_batch_size",
    "data.threads",
    "tables.cache",
    "tables.hbm",
    "tables.memory",
    "tables.ssd",
    "tables.staging",
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
    "parallel.placement",
    "parallel.local_ranks",
    "parallel.bind",
    "parallel.timeout",
    "follow.source",  # the files that were trained keep their names
    "follow.checkpoint_minutes",
    "follow.settle_seconds",
    "follow.poll_seconds",
    "follow.idle_seconds",
    "follow.late",
    "follow.skip",
    "follow.max_bad",
}


def one_dataset(place: str | None, option: str | None) -> str:
    """The dataset given as an argument or as --data; without either, that of `hotbed train`."""
    from hotbed.errors import ConfigError

    if place is not None and option is not None and place != option:
        raise ConfigError(f"two datasets are given, {place} and --data {option}. Leave one out.")
    return place or option or DEFAULT_DATA


def settings_of_flags(*, cache: float | None = None, hbm: str | None = None, **flags: Any) -> dict[str, Any]:
    """The settings by path, of the flags that are given.

    One of `cache` and `hbm` alone replaces whatever a run file says about the size of the cache.
    """
    if cache is not None and hbm is None:
        hbm = ""
    elif hbm is not None and cache is None:
        cache = 0.0
    found = {_FLAGS[name]: value for name, value in flags.items()} | {"tables.cache": cache, "tables.hbm": hbm}
    return {path: value for path, value in found.items() if value is not None}


def read_config(run_file: Path | None, given: dict[str, Any], sets: list[str]) -> RunConfig:
    """The settings of a run file, overridden by flags, then by --set; all mistakes are reported at once."""
    from hotbed.run.config_check import raise_problems
    from hotbed.run.run_file import compose

    config, problems = compose(run_file, given, sets)
    with waiting("loading torch"):
        from hotbed.train.build import option_problems
    raise_problems(problems + option_problems(config))
    return config


def refuse_idle(config: RunConfig, given: Collection[str]) -> None:
    """A ConfigError for flags that have no effect on this run."""
    from hotbed.errors import ConfigError

    flags, tables = {path: "--" + name.replace("_", "-") for name, path in _FLAGS.items()}, config.tables
    if "tables.policy" in given and not (tables.cache or tables.hbm or tables.ssd or tables.dynamic):
        raise ConfigError("--policy chooses the rows that stay in a cache; give --cache, --hbm or --ssd too.")
    ranks = [flags[path] for path in given if path.startswith("parallel.")]
    if ranks and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            f"{', '.join(ranks)}: for several ranks, which torchrun or --ray starts; this is one process."
        )


def suited_config(config: RunConfig, given: Collection[str], dataset: Dataset, say: Callable[[str], None]) -> RunConfig:
    """The config with settings for the size of the log where none is given; `say` gets what was chosen."""
    from hotbed.run.defaults import choose_settings

    chosen = choose_settings(config, given, dataset.schema)
    if chosen.text:
        say(chosen.text)
    return chosen.config


def with_source(config: RunConfig) -> RunConfig:
    """Add the source code of a user's own model; code that the config already holds is kept.

    The name of a model from an installed package is replaced by its location, since the run outlives the package.
    """
    from hotbed.models import is_own, read_source
    from hotbed.models.own_code import has_changed, place_of

    name, kept = config.model.name, config.model.source
    if not is_own(name):
        return config
    if kept:
        if has_changed(name, kept):
            err(always=True).print(
                f"{name} has changed since this run began; the run continues with its original model."
            )
        return config
    model = dataclasses.replace(config.model, name=place_of(name), source=read_source(name)._asdict())
    return dataclasses.replace(config, model=model)


def resumed_config(folder: Path, given: dict[str, Any], sets: list[str], refused: dict[str, Any]) -> RunConfig:
    """The config of a run to resume, with the settings that may change."""
    from hotbed.errors import ConfigError
    from hotbed.models import is_own
    from hotbed.run.config_check import read_tree
    from hotbed.run.folder import read_json
    from hotbed.train.build import changed_settings

    both = [name for name, value in refused.items() if value]
    if both:
        raise ConfigError(f"--resume continues with the settings and folder of its run; leave out {', '.join(both)}.")
    saved = read_json(folder / "config.json")
    if "scale_lr" not in saved.get("parallel", {}):  # version 0.1 had no such setting and did not scale
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
            f"{', '.join(fixed)} cannot be changed with --resume. Start a new run with "
            f"`hotbed train {folder / 'config.json'} --set ...`."
        )
    return after


def open_dataset(name: str) -> Dataset:
    """Open a dataset by name or path; a bar appears while it is built."""
    from hotbed.data.embedded import resolve

    with progress_bar(f"building {name}, once", "rows") as report:
        return resolve(name, progress=lambda done, total: report("", done, total))
