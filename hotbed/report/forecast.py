"""forecast.json of a run -> the section that says what was forecast and what happened; "" where there is none."""

from __future__ import annotations

import math

from hotbed.host.memory import in_words
from hotbed.report.formats import MISSING, percent
from hotbed.report.markup import section, table
from hotbed.report.memory import cache_bytes, forecast_of
from hotbed.report.read import Run
from hotbed.report.series import usable
from hotbed.report.values import mapping, number

NAMES = {
    "hit_rate": "distinct rows of a batch that the cache had",
    "lookup_hit_rate": "look-ups that hit",
    "bytes_in": "to the device, of a step",
    "bytes_out": "back, of a step",
    "cache_bytes": "the cache with its index",
    "peak_device_bytes": "device memory at its highest",
    "samples_per_s": "samples/s",
}
SHARES = ("hit_rate", "lookup_hit_rate")


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
    return section("forecast", "What the plan forecast, and what happened", about, listed)


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
