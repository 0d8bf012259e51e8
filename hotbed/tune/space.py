"""The settings that `hotbed tune` tries, and their ranges: those that matter most for the AUC and that the user did not give.

Values are drawn by Optuna (`suggest`) and end up in a RunConfig (`apply`). Every range holds the value that `hotbed train`
would take, so that the first trial is the run that tuning is compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hotbed.models import MODELS, model_card
from hotbed.run.config import RunConfig

Value = float | int | str
_HIDDEN = ("64", "128,64", "256,128", "256,128,64")
_BATCHES = (128, 256, 512, 1024, 2048, 4096)
_DIMS = (4, 8, 16, 32)
_L2 = (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
_OPTIONS = ".options."


class Suggests(Protocol):
    """A trial of Optuna."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


class Dimension(NamedTuple):
    """One setting: a range (`low` to `high`) or a list of values."""

    path: str
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    values: tuple[Value, ...] = ()

    def suggest(self, trial: Suggests) -> Value:
        if self.values:
            value: Value = trial.suggest_categorical(self.path, self.values)
            return value
        return float(f"{trial.suggest_float(self.path, self.low, self.high, log=self.is_log):.3g}")


def search_space(config: RunConfig, given: Collection[str]) -> list[Dimension]:
    """The settings to try with a model; none of `given`, and no option of the model that the config sets."""
    defaults = default_values(config)
    rate = config.tables.lr
    every = [
        Dimension("data.batch_size", values=_with(_BATCHES, config.data.batch_size)),
        Dimension("tables.lr", rate / 8, rate * 4, is_log=True),
        Dimension("dense.lr", config.dense.lr / 5, config.dense.lr * 5, is_log=True),
        Dimension("tables.l2", values=_with(_L2, config.tables.l2)),
        Dimension("model.dim", values=_with(_DIMS, config.model.dim)),
        Dimension("model.options.dropout", 0.0, 0.6),
        Dimension("model.options.hidden", values=_with(_HIDDEN, str(defaults.get("model.options.hidden", _HIDDEN[1])))),
    ]
    fixed = {*given, *(f"model{_OPTIONS}{name}" for name in config.model.options)}
    if config.model.name == "lr":  # its rows have one column
        fixed.add("model.dim")
    return [one for one in every if one.path in defaults and one.path not in fixed]


def default_values(config: RunConfig) -> dict[str, Value]:
    """The values of the first trial: those of the config, and the model's own for its options."""
    values: dict[str, Value] = {
        "data.batch_size": config.data.batch_size,
        "tables.lr": config.tables.lr,
        "dense.lr": config.dense.lr,
        "tables.l2": config.tables.l2,
        "model.dim": config.model.dim,
    }
    if config.model.name in MODELS:
        options = {**model_card(config.model.name).options, **config.model.options}
        if "dropout" in options:
            values["model.options.dropout"] = float(options["dropout"])
        if "hidden" in options:
            values["model.options.hidden"] = ",".join(map(str, options["hidden"]))
    return values


def apply(config: RunConfig, values: Mapping[str, Value]) -> RunConfig:
    """The config with the values of a trial."""
    sections: dict[str, dict[str, Any]] = {}
    options = dict(config.model.options)
    for path, value in values.items():
        section, _, name = path.partition(".")
        if _OPTIONS in path:
            option = path.partition(_OPTIONS)[2]
            options[option] = [int(width) for width in str(value).split(",")] if option == "hidden" else value
        else:
            sections.setdefault(section, {})[name] = value
    sections.setdefault("model", {})["options"] = options
    changed = {name: dataclasses.replace(getattr(config, name), **found) for name, found in sections.items()}
    return dataclasses.replace(config, **changed)


def _with(values: Sequence[Value], default: Value) -> tuple[Value, ...]:
    return tuple(values) if default in values else (default, *values)
