"""Forecasts of a run with other budgets, batch sizes, dims, optimizers or ranks; and a recommendation.

A line of the table is a whole forecast: simulated, and measured if a speed is requested. If whole tables take no more than half
of the free device memory, the recommendation is no cache. Otherwise it is the smallest cache that hardly slows the run down and
fits all budgets.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from hotbed.errors import ConfigError
from hotbed.forecast.curves import sizes_between
from hotbed.forecast.forecast import Forecast, make_forecast
from hotbed.forecast.request import ForecastRequest
from hotbed.forecast.traffic import simulate_run
from hotbed.host.devices import pick_device
from hotbed.host.memory import available_memory, in_words, typed
from hotbed.run.config import ROW_RATES, RunConfig
from hotbed.run.config_check import raise_problems
from hotbed.run.run_file import compose

PATHS = {
    "hbm": "tables.hbm",
    "cache": "tables.cache",
    "memory": "tables.memory",
    "ssd": "tables.ssd",
    "batch_size": "data.batch_size",
    "dim": "model.dim",
    "optimizer": "tables.optimizer",
    "policy": "tables.policy",
    "ranks": "",
}
_ENOUGH = 0.01  # misses, of the distinct rows of a step, that a smaller cache may add


class Variation(NamedTuple):
    """One setting with other values, as a user wrote them."""

    name: str
    values: list[str]


def parse_variation(text: str) -> Variation:
    """'hbm=1GiB,2GiB' -> a variation."""
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    name = "ranks" if name == "world" else name  # of version 0.1
    listed = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or name not in PATHS or not listed:
        raise ConfigError(
            f"--what-if takes NAME=VALUE,VALUE with NAME one of {', '.join(PATHS)}, such as hbm=1GiB,2GiB; not {text!r}"
        )
    return Variation(name, listed)


def vary(request: ForecastRequest, change: Variation) -> list[tuple[str, Forecast]]:
    """The forecast for each value."""
    found = []
    for value in change.values:
        found.append((value, make_forecast(_with(request, change.name, value))))
    return found


def _with(request: ForecastRequest, name: str, value: str) -> ForecastRequest:
    if name == "ranks":
        if not value.isdigit() or not int(value):
            raise ConfigError(f"--what-if ranks={value}: must be a whole number from 1")
        return dataclasses.replace(request, world=int(value))
    sets = [f"{PATHS[name]}={value}"]
    if name == "hbm":
        sets.append("tables.cache=0.0")
    elif name == "cache":
        sets.append("tables.hbm=")
    elif name == "optimizer":
        sets.append(f"tables.lr={ROW_RATES.get(value, 0.1)}")
    elif name == "batch_size":
        sets.append(f"data.eval_batch_size={value}")
    config, problems = compose(None, flat_of(request.config), sets)
    raise_problems(problems)
    return dataclasses.replace(request, config=config)


class Advice(NamedTuple):
    """A setting that fits."""

    num_slots: int
    option: str  # as it is typed: bytes if bytes were given, whose index has a shorter look-ahead, else a share
    misses: float  # rows of a step
    why: str
    whole: str = ""  # why no cache is needed; "" if one is


def advise(request: ForecastRequest, forecast: Forecast) -> Advice | None:
    """The smallest cache within the budget that misses hardly more than the largest; None unless there is one cache.

    Misses are compared, and not hit rates, which are over windows: those are longer in larger caches.
    """
    if forecast.traffic is None or forecast.setting["slots"] is None or len(request.groups) > 1:
        return None
    amounts = request.sketch.amounts
    most = int(forecast.setting["slots"])
    fewest = forecast.traffic.misses
    for size in sizes_between(request.replay.trace.most_keys, most, 6):
        misses = simulate_run(request.seen[0], size, request.course).misses
        if misses <= fewest + _ENOUGH * forecast.traffic.keys or size >= most:
            share = math.ceil(1e4 * size / max(amounts.rows, 1)) / 1e4
            option = f"--hbm {typed(amounts.cached(size))}" if request.ahead.bounded else f"--cache {share:g}"
            why = f"{size:,} slots miss {misses:,.0f} rows a step"
            why += f", and the {most:,} that the budget holds {fewest:,.0f}" if size < most else ""
            return Advice(size, option, misses, why, _no_cache(request))
    return None


def _no_cache(request: ForecastRequest) -> str:
    """Why a run needs no cache; "" if it does."""
    device, whole = pick_device(request.config.train.device), request.sketch.amounts.whole
    free = available_memory(device)
    if free is None or whole > free / 2 or request.sketch.amounts.has_dynamic:
        return ""
    return f"all rows take {in_words(whole)}, and {device} has {in_words(free)} left: nothing is faster"


def flat_of(config: RunConfig) -> dict[str, Any]:
    """{"section.name": value}."""
    sections = dataclasses.asdict(config).items()
    return {f"{section}.{name}": value for section, values in sections for name, value in values.items()}
