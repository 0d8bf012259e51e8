"""A run -> the memory it used, its budgets and its forecast: a table of tiers and a chart."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hotbed.errors import ConfigError
from hotbed.host.memory import in_words, parse_bytes
from hotbed.report.charts import Chart, ReferenceLine, Series, figure
from hotbed.report.curves import over_samples
from hotbed.report.formats import MISSING, mapping, number, percent, section, size, table
from hotbed.report.points import usable
from hotbed.report.read import RunRecord
from hotbed.report.tiers import unit_of

NAMES = {
    "hit_rate": "distinct rows of a batch found in the cache",
    "lookup_hit_rate": "lookups that hit",
    "bytes_in": "to the device, per step",
    "bytes_out": "back, per step",
    "cache_bytes": "the cache with its index",
    "peak_device_bytes": "peak device memory",
    "samples_per_s": "samples/s",
}
SHARES = ("hit_rate", "lookup_hit_rate")


def memory(run: RunRecord) -> str:
    """The section; nothing if no amount is known."""
    rows = [row for row in _rows(run) if any(cell != MISSING for cell in row[1:])]
    points = [point for point in run.train if point.memory]
    if not rows and not points:
        return ""
    listed = table("Bytes by tier", ["what", "budget", "forecast", "used"], rows, kind="wide") if rows else ""
    chart = figure(memory_chart(run)) if points else ""
    return section("memory", "Memory", f'<div class="figures"><div>{listed}</div>{chart}</div>')


def memory_chart(run: RunRecord) -> Chart:
    """Memory of the process and of the device, over samples seen."""
    points = [(point.samples, point.memory) for point in run.train if point.memory]
    most = max((value for _, one in points for value in one if usable(value)), default=0.0)
    unit, scale = unit_of(most)
    lines = [Series("process", [(x, one.resident_bytes / scale) for x, one in points], 2)]
    if any(usable(one.device_bytes) for _, one in points):
        lines.append(Series("device", [(x, one.device_bytes / scale) for x, one in points], 1))
        lines.append(Series("device, highest so far", [(x, one.device_peak_bytes / scale) for x, one in points], 4))
    budget = given(run, "hbm") if len(lines) > 1 else math.nan
    return over_samples(
        run,
        "memory-chart",
        "Memory over time",
        "The whole process, including Python and torch; on CUDA also what torch has allocated on the device.",
        unit,
        tuple(lines),
        y_format="significant",
        y_marks=(ReferenceLine(budget / scale, f"cache {size(budget)}"),) if usable(budget) else (),
        zero=True,
    )


def given(run: RunRecord, name: str) -> float:
    """The bytes of a budget in the settings of the tables; nan without one."""
    amount = mapping(run.config.get("tables")).get(name)
    if not isinstance(amount, str | int) or not amount:
        return math.nan
    with suppress(ConfigError):
        return float(parse_bytes(str(amount).rpartition(":")[2] if name == "ssd" else amount, name))
    return math.nan


def forecast_of(run: RunRecord) -> dict[str, Any]:
    """The content of forecast.json; empty without it."""
    with suppress(OSError, ValueError, RecursionError):
        return dict(mapping(json.loads((run.directory / "forecast.json").read_bytes())))
    return {}


def _rows(run: RunRecord) -> list[list[str]]:
    found = forecast_of(run)
    predicted, truth = mapping(found.get("forecast")), mapping(found.get("truth"))
    tiers = next((point.tiers for point in reversed(run.train) if point.tiers), None)
    last = next((point.memory for point in reversed(run.train) if point.memory), None)
    peak = number(truth.get("peak_device_bytes"))
    below = tiers.memory_bytes if tiers else math.nan
    on_ssd = tiers.ssd_bytes if tiers else math.nan
    lines = [
        ("cache<small>rows on the device and their index</small>", given(run, "hbm"), cache_bytes(predicted),
         run.cache.get("device_bytes", math.nan)),
        ("device<small>peak, with model and kernels</small>", math.nan, number(predicted.get("device_bytes")), peak),
        ("memory<small>rows below the cache and their index</small>", given(run, "memory"),
         number(predicted.get("memory_bytes")), below),
        ("ssd<small>files</small>", given(run, "ssd"), number(predicted.get("ssd_bytes")) or math.nan, on_ssd),
        ("process<small>including Python and torch</small>", math.nan, math.nan,
         last.resident_bytes if last else math.nan),
    ]  # fmt: skip
    return [[name, *(size(one) if usable(one) else MISSING for one in amounts)] for name, *amounts in lines]


def cache_bytes(predicted: Mapping[str, Any]) -> float:
    """Forecast bytes of the cache with its index; nan without a cache."""
    parts = predicted.get("bytes")
    listed = [mapping(part) for part in parts] if isinstance(parts, list) else []
    found = [
        number(one.get("num_bytes")) for one in listed if one.get("name") in ("rows in the cache", "index of the cache")
    ]
    return sum(found) if found else math.nan


def forecast(run: RunRecord) -> str:
    """The section that compares forecast and measurement; nothing without a forecast."""
    predicted, true = forecast_and_truth(run)
    if not predicted:
        return ""
    rows = []
    for name, about in NAMES.items():
        expected, measured = predicted.get(name, math.nan), true.get(name, math.nan)
        if usable(expected) or usable(measured):
            rows.append([about, shown(name, expected), shown(name, measured), _off(name, expected, measured)])
    about = "<p>The forecast was made before the run started, by simulating its first batches.</p>"
    listed = table("Figures, forecast and measured", ["figure", "forecast", "measured", "difference"], rows)
    return section("forecast", "Forecast and measurement", about, listed)


def forecast_and_truth(run: RunRecord) -> tuple[dict[str, float], dict[str, float]]:
    """The figures of NAMES, forecast and measured; both empty without a forecast."""
    found = forecast_of(run)
    predicted, truth = mapping(found.get("forecast")), mapping(found.get("truth"))
    if not predicted:
        return {}, {}
    values = {**predicted, **mapping(predicted.get("traffic")), "peak_device_bytes": predicted.get("device_bytes")}
    values["cache_bytes"] = cache_bytes(predicted)
    both = [{name: number(one.get(name)) for name in NAMES} for one in (values, truth)]
    return both[0], both[1]


def shown(name: str, value: float) -> str:
    """A figure of NAMES as text."""
    if not usable(value):
        return MISSING
    if name in SHARES:
        return percent(value, 2)
    return in_words(value) if "bytes" in name else f"{value:,.0f}"


def _off(name: str, expected: float, measured: float) -> str:
    if not usable(expected) or not usable(measured):
        return MISSING
    if name in SHARES:
        return f"{100 * (measured - expected):+.2f} points"
    return f"{100 * (measured / expected - 1):+.1f} %" if expected > 0 else MISSING
