"""Compares a forecast with what happened.

forecast.json in the run folder holds both: `forecast` when the run starts, `truth` when it ends. Counts are those of training
lines, so evaluations are left out of both.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hotbed.errors import HotbedError
from hotbed.forecast.curves import lru_curve
from hotbed.forecast.forecast import Forecast, make_forecast
from hotbed.forecast.memory import WORKSPACE
from hotbed.forecast.request import QUICK_LOOKUPS, ForecastRequest
from hotbed.host.atomic import write_file
from hotbed.report.memory import SHARES

FILE = "forecast.json"
MISSES = "misses.json"
MISS_ENTRIES = 500_000  # that are tracked, 0.3 us each


class Pair(NamedTuple):
    """One figure."""

    name: str
    forecast: float | None
    truth: float | None

    @property
    def off(self) -> float | None:
        """Truth minus forecast for shares, else the relative difference."""
        if self.forecast is None or self.truth is None:
            return None
        if self.name in SHARES:
            return self.truth - self.forecast
        return self.truth / self.forecast - 1 if self.forecast else None


def quick_forecast(request: ForecastRequest) -> Forecast | None:
    """For a run that is about to start: measures nothing and simulates little; None if no forecast can be made."""
    with suppress(HotbedError), torch.random.fork_rng(devices=[]):
        return make_forecast(_quick(request))
    return None


def _quick(request: ForecastRequest) -> ForecastRequest:
    return ForecastRequest(request.config, request.dataset, request.world, "known", QUICK_LOOKUPS, request.shared)


def write_forecast(folder: Path, forecast: Forecast) -> None:
    """When the run starts."""
    _write(folder, {"forecast": forecast.figures()})


def write_misses(folder: Path, request: ForecastRequest) -> None:
    """In addition to the forecast: misses of the simulated batches with LRU caches of every size."""
    with suppress(HotbedError):
        curve = lru_curve(_quick(request).replay.trace, "lru", MISS_ENTRIES)
        lists = {name: getattr(curve, name).tolist() for name in ("sizes", "misses", "missed_lookups")}
        _write(folder, {**curve._asdict(), **lists}, MISSES)


def write_truth(folder: Path, summary: dict[str, Any], device: torch.device) -> list[Pair]:
    """When the run has ended: add what happened to the file, if there is a forecast."""
    found = _read(folder)
    if "forecast" not in found:
        return []
    truth = truth_of(folder, summary)
    if device.type == "cuda":
        truth["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    _write(folder, {**found, "truth": truth})
    return pairs(found["forecast"], truth)


def truth_of(folder: Path, summary: dict[str, Any]) -> dict[str, float]:
    """What happened in training, from the run's lines and summary."""
    sums: dict[str, float] = {}
    with suppress(OSError, ValueError):
        for text in (folder / "metrics.jsonl").read_text().splitlines():
            line = json.loads(text)
            cache = line.get("cache") if line.get("kind") == "train" else None
            if cache is not None:
                for name in ("keys", "misses", "bytes_in", "bytes_out"):
                    sums[name] = sums.get(name, 0.0) + cache[name] * cache["batches"]
                sums["batches"] = sums.get("batches", 0.0) + cache["batches"]
                sums["hit"] = sums.get("hit", 0.0) + cache["lookup_hit_rate"] * cache["batches"]
    truth: dict[str, float] = {}
    if sums.get("batches"):
        count = sums["batches"]
        truth = {"hit_rate": 1 - sums["misses"] / max(sums["keys"], 1), "lookup_hit_rate": sums["hit"] / count}
        truth |= {name: sums[name] / count for name in ("bytes_in", "bytes_out")}
    if summary.get("cache"):
        truth["cache_bytes"] = summary["cache"]["device_bytes"]
    if summary.get("samples_per_s"):
        truth["samples_per_s"] = summary["samples_per_s"]
    return truth


def pairs(forecast: dict[str, Any], truth: dict[str, float]) -> list[Pair]:
    """Forecast and truth of every figure that has a truth."""
    traffic = forecast.get("traffic") or {}
    cache = [
        part["num_bytes"] for part in forecast["bytes"] if part["name"] in ("rows in the cache", "index of the cache")
    ]
    is_measured = any(part["name"] == WORKSPACE for part in forecast["bytes"])  # else a part is missing
    expected = {
        "hit_rate": traffic.get("hit_rate"),
        "lookup_hit_rate": traffic.get("lookup_hit_rate"),
        "bytes_in": forecast.get("bytes_in"),
        "bytes_out": forecast.get("bytes_out"),
        "cache_bytes": sum(cache) if cache else None,
        "peak_device_bytes": forecast.get("device_bytes") if is_measured else None,
        "samples_per_s": forecast.get("samples_per_s"),
    }
    return [Pair(name, expected[name], truth[name]) for name in expected if name in truth]


def _read(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads((folder / FILE).read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _write(folder: Path, content: dict[str, Any], name: str = FILE) -> None:
    """Write a file; failing to do so must not end the run."""
    with suppress(OSError):
        write_file(folder / name, json.dumps(content, indent=1) + "\n")
