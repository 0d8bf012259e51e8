"""A run -> the memory it took against what it was given and what was forecast: a table of tiers and a chart."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hotbed.errors import ConfigError
from hotbed.host.memory import in_words, parse_bytes
from hotbed.report.charts import Chart, Mark, Series, figure
from hotbed.report.curves import SEEN, epoch_ends
from hotbed.report.formats import MISSING, mapping, number, percent, section, size, table
from hotbed.report.points import usable
from hotbed.report.read import Run
from hotbed.report.tiers import unit_of

NAMES = {
    "hit_rate": "distinct rows of a batch that the cache had",
    "lookup_hit_rate": "lookups that hit",
    "bytes_in": "to the device, of a step",
    "bytes_out": "back, of a step",
    "cache_bytes": "the cache with its index",
    "peak_device_bytes": "device memory at its highest",
    "samples_per_s": "samples/s",
}
SHARES = ("hit_rate", "lookup_hit_rate")


def memory(run: Run) -> str:
    """The section, or nothing where no amount is known."""
    rows = [row for row in _rows(run) if any(cell != MISSING for cell in row[1:])]
    points = [point for point in run.train if point.memory]
    if not rows and not points:
        return ""
    listed = table("Bytes by tier", ["what", "given", "forecast", "taken"], rows, kind="wide") if rows else ""
    chart = figure(memory_chart(run)) if points else ""
    return section("memory", "Memory", f'<div class="figures"><div>{listed}</div>{chart}</div>')


def memory_chart(run: Run) -> Chart:
    """Of the process and of the device, over samples seen."""
    points = [(point.samples, point.memory) for point in run.train if point.memory]
    most = max((value for _, one in points for value in one if usable(value)), default=0.0)
    unit, scale = unit_of(most)
    lines = [Series("process", [(x, one.resident_bytes / scale) for x, one in points], 2)]
    if any(usable(one.device_bytes) for _, one in points):
        lines.append(Series("device", [(x, one.device_bytes / scale) for x, one in points], 1))
        lines.append(Series("device, highest so far", [(x, one.device_peak_bytes / scale) for x, one in points], 4))
    budget = given(run, "hbm") if len(lines) > 1 else math.nan
    return Chart(
        "memory-chart",
        "Memory over time",
        "The process with all it has loaded, Python and torch among it; on CUDA what torch has given out on the device.",
        SEEN,
        unit,
        tuple(lines),
        y_format="significant",
        y_marks=(Mark(budget / scale, f"cache {size(budget)}"),) if usable(budget) else (),
        zero=True,
        divisions=epoch_ends(run.train),
    )


def given(run: Run, name: str) -> float:
    """The bytes that a setting of the tables asks for; nan without."""
    amount = mapping(run.config.get("tables")).get(name)
    if not isinstance(amount, str | int) or not amount:
        return math.nan
    with suppress(ConfigError):
        return float(parse_bytes(str(amount).rpartition(":")[2] if name == "ssd" else amount, name))
    return math.nan


def forecast_of(run: Run) -> dict[str, Any]:
    """What forecast.json holds, empty without it."""
    with suppress(OSError, ValueError, RecursionError):
        return dict(mapping(json.loads((run.directory / "forecast.json").read_bytes())))
    return {}


def _rows(run: Run) -> list[list[str]]:
    found = forecast_of(run)
    told, truth = mapping(found.get("forecast")), mapping(found.get("truth"))
    tiers = next((point.tiers for point in reversed(run.train) if point.tiers), None)
    last = next((point.memory for point in reversed(run.train) if point.memory), None)
    peak = number(truth.get("peak_device_bytes"))
    below = tiers.memory_bytes if tiers else math.nan
    on_ssd = tiers.ssd_bytes if tiers else math.nan
    lines = [
        ("cache<small>rows on the device and their index</small>", given(run, "hbm"), cache_bytes(told),
         run.cache.get("device_bytes", math.nan)),
        ("device<small>at its highest, model and kernels too</small>", math.nan, number(told.get("device_bytes")), peak),
        ("memory<small>rows below the cache and their index</small>", given(run, "memory"),
         number(told.get("memory_bytes")), below),
        ("ssd<small>files</small>", given(run, "ssd"), number(told.get("ssd_bytes")) or math.nan, on_ssd),
        ("process<small>with all it has loaded</small>", math.nan, math.nan,
         last.resident_bytes if last else math.nan),
    ]  # fmt: skip
    return [[name, *(size(one) if usable(one) else MISSING for one in amounts)] for name, *amounts in lines]


def cache_bytes(told: Mapping[str, Any]) -> float:
    """Of the cache with its index, as a forecast has them; nan without a cache."""
    parts = told.get("bytes")
    listed = [mapping(part) for part in parts] if isinstance(parts, list) else []
    found = [
        number(one.get("num_bytes")) for one in listed if one.get("name") in ("rows in the cache", "index of the cache")
    ]
    return sum(found) if found else math.nan


def forecast(run: Run) -> str:
    """A table of both."""
    told, true = told_and_true(run)
    if not told:
        return ""
    rows = []
    for name, about in NAMES.items():
        said, happened = told.get(name, math.nan), true.get(name, math.nan)
        if usable(said) or usable(happened):
            rows.append([about, shown(name, said), shown(name, happened), _off(name, said, happened)])
    about = "<p>The forecast was made before the run started, by simulating its first batches.</p>"
    listed = table("Both", ["", "forecast", "truth", "off by"], rows)
    return section("forecast", "Forecast and measurement", about, listed)


def told_and_true(run: Run) -> tuple[dict[str, float], dict[str, float]]:
    """The figures of NAMES that were forecast, and those that happened; both empty without a forecast."""
    found = forecast_of(run)
    told, truth = mapping(found.get("forecast")), mapping(found.get("truth"))
    if not told:
        return {}, {}
    values = {**told, **mapping(told.get("traffic")), "peak_device_bytes": told.get("device_bytes")}
    values["cache_bytes"] = cache_bytes(told)
    both = [{name: number(one.get(name)) for name in NAMES} for one in (values, truth)]
    return both[0], both[1]


def shown(name: str, value: float) -> str:
    """A figure of NAMES in words."""
    if not usable(value):
        return MISSING
    if name in SHARES:
        return percent(value, 2)
    return in_words(value) if "bytes" in name else f"{value:,.0f}"


def _off(name: str, said: float, happened: float) -> str:
    if not usable(said) or not usable(happened):
        return MISSING
    if name in SHARES:
        return f"{100 * (happened - said):+.2f} points"
    return f"{100 * (happened / said - 1):+.1f} %" if said > 0 else MISSING
