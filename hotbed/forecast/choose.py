"""Byte budgets, ranks and links -> precision, placement of tables, k, and the cache; each with what the others would cost.

In this order, as each changes what the next has to pay for. What a run file or an option gives is kept. The precision is the
first that fits, those without rounding first. Of placements and of steps between merges, those that training waits for least;
among values of k within _NEAR of the fastest the smallest, since merging less often is an approximation. Bytes and misses are
those of the forecast; seconds between ranks are projected from its links.

Tables share one cache, in which every row competes with those of all tables. `share_slots` divides it between them at best, by
the miss curve of every table alone, and says which of the two misses less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from hotbed.errors import BudgetError, ConfigError
from hotbed.forecast.curves import Curve, lru_curve, table_curves
from hotbed.forecast.forecast import Forecast, make_forecast
from hotbed.forecast.network import Group
from hotbed.forecast.request import ForecastRequest
from hotbed.forecast.what_if import Advice, advise, flat_of
from hotbed.run.config_check import raise_problems
from hotbed.run.run_file import compose

_PRECISIONS = (
    ("fp32", "same"),
    ("fp32", "int8"),
    ("bf16", "same"),
    ("bf16", "int8"),
)  # in the device's tier, and below
_ROUNDED = {"bf16": "16 bits on the device", "int8": "8 bits below it", "fp16": "16 bits on the device"}
_STEPS = (1, 4, 16, 64)
_NEAR = 1.05  # of the fastest step
_SAVES = 0.98  # of a table's bytes, at most, to place it on one rank

PRECISION = ("tables.precision", "tables.store_precision")
PLACEMENT, K_STEP = "parallel.placement", "parallel.k_step"


class Setting(NamedTuple):
    """One that was chosen."""

    name: str
    value: str
    why: str
    is_default: bool  # it need not be given


class TableShare(NamedTuple):
    """The part of the slots that suits one table."""

    name: str
    slots: int
    share: float  # of its rows that occur
    misses: float  # of its distinct rows of a batch


class Shares(NamedTuple):
    """A cache for every table, or one for all: misses of the distinct rows of a batch, for LRU."""

    tables: list[TableShare]
    apart: float
    together: float


class Choice(NamedTuple):
    """Settings, and the forecast of a run that has them."""

    request: ForecastRequest
    settings: list[Setting]
    cache: Advice | None
    shares: Shares | None
    forecast: Forecast

    @property
    def options(self) -> str:
        """What to add to the command."""
        cache = [] if self.cache is None or self.cache.whole else [self.cache.option]
        given = [f"--set {_quoted(f'{one.name}={one.value}')}" for one in self.settings if not one.is_default]
        return " ".join([*cache, *given])

    def figures(self) -> dict[str, object]:
        """For JSON."""
        shares = None
        if self.shares is not None:
            shares = {**self.shares._asdict(), "tables": [one._asdict() for one in self.shares.tables]}
        return {"settings": [one._asdict() for one in self.settings], "options": self.options, "shares": shares}


def choose(request: ForecastRequest, given: Collection[str]) -> Choice:
    """`given`: names of settings that are kept."""
    settings: list[Setting] = []
    forecast = _try(request)
    if not any(name in given for name in PRECISION):
        request, forecast, chosen = _precision(request, forecast)
        settings += chosen
    if request.world > 1 and not forecast.problems:
        for name, choose_one in ((PLACEMENT, _placement), (K_STEP, _k_step)):
            if name not in given:
                request, forecast, one = choose_one(request, forecast)
                settings.append(one)
    if forecast.problems:  # settings that are refused altogether are an error, as they are without a choice
        return Choice(request, settings, None, None, forecast if forecast.parts else make_forecast(request))
    slots = forecast.setting["slots"]
    shares = None
    if slots is not None and len(request.groups) == 1:
        shares = share_slots(request, int(slots) * request.world)
    return Choice(request, settings, advise(request, forecast), shares, forecast)


def _precision(request: ForecastRequest, forecast: Forecast) -> tuple[ForecastRequest, Forecast, list[Setting]]:
    """The first that fits; that of the request if none does."""
    if not forecast.problems:
        return request, forecast, [Setting(PRECISION[0], "fp32", "fits, without rounding", True)]
    refused = forecast.problems[0]
    for pair in _PRECISIONS[1:]:
        other = _with(request, **dict(zip(PRECISION, pair)))
        found = _try(other)
        if not found.problems:
            rounded = " and ".join(_ROUNDED[one] for one in pair if one in _ROUNDED)
            why = f"fp32 does not fit ({refused}). Rounds rows to {rounded}: no longer the result of fp32"
            values = zip(PRECISION, pair, ("fp32", "same"))
            return other, found, [Setting(name, value, why, False) for name, value, usual in values if value != usual]
    return request, forecast, []


def _placement(request: ForecastRequest, forecast: Forecast) -> tuple[ForecastRequest, Forecast, Setting]:
    """By row, all tables on single ranks, or those tables of which fewer bytes are sent that way."""
    if request.config.parallel.mode != "sharded":
        return request, forecast, Setting(PLACEMENT, "row", "placements are compared for parallel.mode=sharded", True)
    whole = _sent_less_whole(request, forecast)
    values = ["row", "table"] + ([", ".join(["row", *(f"{name}=table" for name in whole)])] if whole else [])
    return _fastest(request, forecast, PLACEMENT, values, "row", _waiting, 1.0)


def _k_step(request: ForecastRequest, forecast: Forecast) -> tuple[ForecastRequest, Forecast, Setting]:
    if forecast.speed is None:
        return request, forecast, Setting(K_STEP, "1", "nothing is known of the speed of a step (--calibrate)", True)
    values = [str(k) for k in _STEPS]
    request, forecast, found = _fastest(request, forecast, K_STEP, values, "1", _step, _NEAR)
    if found.value != "1":
        found = found._replace(why=f"{found.why}. An approximation: docs/kstep.md")
    return request, forecast, found


def _fastest(
    request: ForecastRequest,
    forecast: Forecast,
    name: str,
    values: Sequence[str],
    usual: str,
    seconds: Callable[[Forecast], float],
    near: float,
) -> tuple[ForecastRequest, Forecast, Setting]:
    """The first value, of those that fit, that takes at most `near` of the fewest seconds."""
    tried = [
        (value, request, forecast) if value == usual else (value, other := _with(request, **{name: value}), _try(other))
        for value in values
    ]
    fitting = [one for one in tried if not one[2].problems]
    least = min(seconds(one[2]) for one in fitting)
    value, request, forecast = next(one for one in fitting if seconds(one[2]) <= near * least)
    costs = ", ".join(f"{other} {1e3 * _waiting(found):.3g}" for other, _, found in fitting)
    refused = [other for other, _, found in tried if found.problems]
    why = f"ms a step that training waits for other ranks: {costs}"
    why += f"; does not fit: {', '.join(refused)}" if refused else ""
    return request, forecast, Setting(name, value, why, value == usual)


def _waiting(forecast: Forecast) -> float:
    return 0.0 if forecast.wires is None else forecast.wires.seconds


def _step(forecast: Forecast) -> float:
    return inf if forecast.speed is None else forecast.speed.step


def _sent_less_whole(request: ForecastRequest, forecast: Forecast) -> list[str]:
    """Tables of which fewer bytes are sent if one rank has all of their rows: bags, which then travel as one vector."""
    samples = -(-request.config.data.batch_size // request.world)
    found = []
    for (name, table), one in zip(request.sketch.tables.items(), request.frequencies):
        row, whole = (
            Group([one._replace(placement=place)], table.dim).demand(request.world, samples, "auto")
            for place in ("row", "table")
        )
        alone = Group([one], table.dim)
        if alone.bytes_of(whole) < _SAVES * alone.bytes_of(row):
            found.append(name)
    return found if len(found) < len(request.sketch.tables) else []


def _with(request: ForecastRequest, **sets: str) -> ForecastRequest:
    config, problems = compose(None, flat_of(request.config), [f"{name}={value}" for name, value in sets.items()])
    raise_problems(problems)
    return dataclasses.replace(request, config=config)


def _try(request: ForecastRequest) -> Forecast:
    """A setting that is refused altogether, such as a placement, is one that does not fit."""
    try:
        return make_forecast(request)
    except (BudgetError, ConfigError) as error:
        return Forecast({"slots": None}, [], None, 0, None, None, None, [str(error)], [])


def share_slots(request: ForecastRequest, num_slots: int) -> Shares | None:
    """The slots of one cache, divided between tables so that fewest rows are missed; None if every batch would not fit."""
    given = request.given
    trace = given.trace
    curves = table_curves(trace, given.names, given.ends)
    table_of = np.searchsorted(np.asarray(given.ends), trace.keys, side="right")
    batch_of = np.repeat(np.arange(trace.num_batches), np.diff(trace.offsets))
    uses, least = {}, {}
    for number, name in enumerate(given.names):
        mine = batch_of[table_of == number]
        uses[name], least[name] = mine.shape[0], int(np.bincount(mine, minlength=1).max())
    if sum(least[curve.name] for curve in curves) > num_slots:
        return None
    slots = _divide([(curve, uses[curve.name], least[curve.name]) for curve in curves], num_slots)
    found = [
        TableShare(curve.name, count, count / max(curve.num_rows, 1), curve.at(count))
        for curve, count in zip(curves, slots)
    ]
    apart = sum(one.misses * uses[one.name] for one in found) / max(trace.keys.shape[0], 1)
    return Shares(found, apart, lru_curve(trace).at(num_slots))


def _divide(tables: Sequence[tuple[Curve, int, int]], num_slots: int) -> list[int]:
    """(curve, uses, slots of its largest batch) -> slots of each: along the steepest parts of the curves' convex hulls."""
    slots = [min(least, curve.num_rows) for curve, _, least in tables]
    parts = []
    for number, (curve, uses, _) in enumerate(tables):
        sizes = np.append(slots[number], curve.sizes[curve.sizes > slots[number]])
        misses = uses * np.interp(sizes, curve.sizes, curve.misses)
        for left, right in _hull(sizes, misses):
            length = sizes[right] - sizes[left]
            parts.append(((misses[left] - misses[right]) / length, number, int(length)))
    room = num_slots - sum(slots)
    for _, number, length in sorted(parts, key=lambda part: -part[0]):
        taken = min(length, room)
        slots[number] += taken
        room -= taken
    return slots


def _hull(sizes: np.ndarray, misses: np.ndarray) -> list[tuple[int, int]]:
    """The edges of the lower convex hull, as pairs of points."""
    corners: list[int] = []
    for point in range(sizes.shape[0]):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (misses[b] - misses[a]) * (sizes[point] - sizes[a]) < (misses[point] - misses[a]) * (
                sizes[b] - sizes[a]
            ):
                break
            corners.pop()
        corners.append(point)
    return list(pairwise(corners))


def _quoted(text: str) -> str:
    return f"'{text}'" if " " in text or "," in text else text
