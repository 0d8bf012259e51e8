"""forecast.json of a run -> the section that says what was forecast and what happened; "" where there is none."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hotbed.memory import in_words
from hotbed.report.formats import MISSING, percent
from hotbed.report.markup import section, table
from hotbed.report.read import Run
from hotbed.report.series import usable
from hotbed.report.values import mapping, number

_NAMES = {
    "hit_rate": "distinct rows of a batch that the cache had",
    "lookup_hit_rate": "look-ups that hit",
    "bytes_in": "to the device, of a step",
    "bytes_out": "back, of a step",
    "cache_bytes": "the cache with its index",
    "peak_device_bytes": "device memory at its highest",
    "samples_per_s": "samples/s",
}


def forecast(run: Run) -> str:
    """A table of both."""
    found: Any = {}
    with suppress(OSError, ValueError):
        found = json.loads((run.directory / "forecast.json").read_text())
    told, truth = mapping(mapping(found).get("forecast")), mapping(mapping(found).get("truth"))
    if not told:
        return ""
    traffic = mapping(told.get("traffic"))
    values = {**told, **traffic, "peak_device_bytes": told.get("device_bytes"), "cache_bytes": _cache_bytes(told)}
    rows = []
    for name, about in _NAMES.items():
        said, happened = number(values.get(name)), number(truth.get(name))
        if usable(said) or usable(happened):
            rows.append([about, _value(name, said), _value(name, happened)])
    about = "<p>The forecast was made before the run started, by simulating its first batches.</p>"
    return section(
        "forecast", "What the plan forecast, and what happened", about, table("Both", ["", "forecast", "truth"], rows)
    )


def _cache_bytes(told: Any) -> float | None:
    parts = told.get("bytes")
    listed = [mapping(part) for part in parts] if isinstance(parts, list) else []
    found = [
        number(part.get("num_bytes"))
        for part in listed
        if "the cache" in str(part.get("name")) and part.get("tier") == "device"
    ]
    return sum(found) if found else None


def _value(name: str, value: float) -> str:
    if not usable(value):
        return MISSING
    if name.endswith("hit_rate"):
        return percent(value, 2)
    return in_words(value) if "bytes" in name else f"{value:,.0f}"
