"""A forecast and the files of a run in; what was forecast beside what happened out.

forecast.json in the run folder holds both: `forecast` when the run starts, `truth` when it ends. Counts are those of the lines
of training, so evaluations are left out of them, as they are of the forecast.
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

FILE = "forecast.json"
MISSES = "misses.json"
MISS_ENTRIES = 500_000  # that are followed, 0.3 us each
_SHARES = ("hit_rate", "lookup_hit_rate")


class Pair(NamedTuple):
    """One figure."""

    name: str
    forecast: float | None
    truth: float | None

    @property
    def off(self) -> float | None:
        """Truth less forecast for shares, else how much larger it is."""
        if self.forecast is None or self.truth is None:
            return None
        if self.name in _SHARES:
            return self.truth - self.forecast
        return self.truth / self.forecast - 1 if self.forecast else None


def quick_outlook(asked: ForecastRequest) -> Forecast | None:
    """For a run that is about to start: nothing is measured, little is simulated; None where no forecast can be made."""
    with suppress(HotbedError), torch.random.fork_rng(devices=[]):
        return make_forecast(_quick(asked))
    return None


def _quick(asked: ForecastRequest) -> ForecastRequest:
    return ForecastRequest(asked.config, asked.dataset, asked.world, "known", QUICK_LOOKUPS, asked.shared)


def write_forecast(folder: Path, forecast: Forecast) -> None:
    """When the run starts."""
    _write(folder, {"forecast": forecast.figures()})


def write_misses(folder: Path, asked: ForecastRequest) -> None:
    """Beside the forecast: misses of the batches simulated, with a cache of every size under LRU."""
    with suppress(HotbedError):
        curve = lru_curve(_quick(asked).replay.trace, "lru", MISS_ENTRIES)
        lists = {name: getattr(curve, name).tolist() for name in ("sizes", "misses", "missed_lookups")}
        _write(folder, {**curve._asdict(), **lists}, MISSES)


def write_truth(folder: Path, summary: dict[str, Any], device: torch.device) -> list[Pair]:
    """When it has ended: what happened, in the same file; nothing where no forecast was made."""
    found = _read(folder)
    if "forecast" not in found:
        return []
    truth = truth_of(folder, summary)
    if device.type == "cuda":
        truth["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    _write(folder, {**found, "truth": truth})
    return pairs(found["forecast"], truth)


def truth_of(folder: Path, summary: dict[str, Any]) -> dict[str, float]:
    """Of training alone, from the run's lines and its summary."""
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
    """Figure by figure, those that happened."""
    traffic = forecast.get("traffic") or {}
    cache = [
        part["num_bytes"] for part in forecast["bytes"] if part["name"] in ("rows in the cache", "index of the cache")
    ]
    is_measured = any(part["name"] == WORKSPACE for part in forecast["bytes"])  # without it a part is lacking
    told = {
        "hit_rate": traffic.get("hit_rate"),
        "lookup_hit_rate": traffic.get("lookup_hit_rate"),
        "bytes_in": forecast.get("bytes_in"),
        "bytes_out": forecast.get("bytes_out"),
        "cache_bytes": sum(cache) if cache else None,
        "peak_device_bytes": forecast.get("device_bytes") if is_measured else None,
        "samples_per_s": forecast.get("samples_per_s"),
    }
    return [Pair(name, told[name], truth[name]) for name in told if name in truth]


def _read(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads((folder / FILE).read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _write(folder: Path, content: dict[str, Any], name: str = FILE) -> None:
    """A forecast that cannot be kept ends no run."""
    with suppress(OSError):
        write_file(folder / name, json.dumps(content, indent=1) + "\n")
