"""Times, memory, cache, tiers and ids of one line of metrics.jsonl, as numbers; nan for missing values.

`smooth` and `thin` turn long curves into curves that fit on a page; thinning keeps every peak. A point whose y is nan is a gap
and stays a gap. Logs have up to 100,000 lines and a page some fifty curves, so numpy does the searching.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hotbed.report.formats import mapping, number

MAX_POINTS = 1000
LARGEST = 1e30  # beyond this a value is broken, and axis arithmetic would overflow

Point = TypeVar("Point", "StepParts", "MemoryPoint", "CachePoint", "TierPoint", "IdPoint")
Curve = Sequence[tuple[float, float]]  # x rising, y


class StepParts(NamedTuple):
    """Seconds of a mean step, by what it was spent on (hotbed.telemetry.clock)."""

    reader: float
    plan: float
    wait: float
    copy: float
    look_up: float
    model: float
    update: float
    dense: float
    other: float


class TimesPoint(NamedTuple):
    """Times of an interval: of the training thread, and of the steps measured on a CUDA stream."""

    steps: float
    thread: StepParts
    device: StepParts | None
    ready: float  # batches that were ready when training needed one


class MemoryPoint(NamedTuple):
    """Bytes at the end of an interval."""

    resident_bytes: float  # of the process
    device_bytes: float  # allocated by torch on the device; nan on a CPU
    device_peak_bytes: float


class CachePoint(NamedTuple):
    """What the cache did in an interval (train/watch.py): shares, and means over the batches planned."""

    batches: float
    hit_rate: float  # of the distinct keys of windows
    lookup_hit_rate: float
    keys: float
    misses: float
    created: float
    evictions: float
    written_back: float
    bytes_in: float
    bytes_out: float
    stall_share: float


class TierPoint(NamedTuple):
    """Memory and ssd in an interval (train/watch.py): means over its batches; then their state at its end."""

    memory_hit_rate: float  # of the rows requested below the device; nan where memory is the cache
    from_memory: float
    from_ssd: float
    to_ssd: float
    bytes_from_memory: float
    bytes_read: float
    bytes_written: float
    bytes_compacted: float
    wear: float  # bytes that this process has written to the ssd
    compactions: float  # of this process
    memory_slots: float  # rows that memory can hold over the ssd; 0: memory is the cache
    memory_bytes: float
    memory_budget: float
    resident_bytes: float  # of the process, with all it has loaded
    ssd_bytes: float
    ssd_cap: float
    ssd_live_bytes: float
    live_share: float


class IdPoint(NamedTuple):
    """Counts of the dynamic ids of a table since the run began, and its rows."""

    seen: float
    admitted: float
    rejected: float
    expired: float
    rows: float


def times_point(raw: Mapping[str, Any]) -> TimesPoint | None:
    if not raw:
        return None
    device = mapping(raw.get("device"))
    return TimesPoint(
        number(raw.get("steps")), _point(StepParts, raw), point_of(StepParts, device), number(raw.get("ready"))
    )


def point_of(kind: type[Point], raw: Mapping[str, Any]) -> Point | None:
    """The numbers of a point by the names of its fields; None without any."""
    return _point(kind, raw) if raw else None


def id_points(raw: Mapping[str, Any]) -> dict[str, IdPoint]:
    """The counts of each table."""
    return {name: _point(IdPoint, mapping(counts)) for name, counts in raw.items()}


def _point(kind: type[Point], raw: Mapping[str, Any]) -> Point:
    return kind(*(number(raw.get(name)) for name in kind._fields))


def usable(y: float) -> bool:
    """Whether a value can be drawn."""
    return -LARGEST < y < LARGEST


def smooth(curve: Curve, share: float = 0.015) -> list[tuple[float, float]]:
    """Weighted mean over about `share` of the points on either side, so that the curve does not lag."""
    keep = math.exp(-1 / max(1.0, share * len(curve)))
    forward = _weighted_sums(curve, keep)
    backward = reversed(_weighted_sums(curve[::-1], keep))
    return [
        (x, (before[0] + after[0] - y) / (before[1] + after[1] - 1) if usable(y) else math.nan)
        for (x, y), before, after in zip(curve, forward, backward)
    ]


def _weighted_sums(curve: Curve, keep: float) -> list[tuple[float, float]]:
    """After each point: the sum of all values so far, with weights that decay with distance, and the sum of the weights."""
    total = weight = 0.0
    sums = []
    for _, y in curve:
        total, weight = keep * total, keep * weight
        if usable(y):
            total, weight = total + y, weight + 1
        sums.append((total, weight))
    return sums


def thin(curve: Curve, limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most `limit` points: the ends, and the lowest and highest of each stretch between them."""
    if len(curve) <= limit:
        return list(curve)
    stretches = (limit - 2) // 2
    inner = len(curve) - 2
    ys = np.array([y for _, y in curve])
    drawn = np.abs(ys) < LARGEST
    lows, highs = np.where(drawn, ys, np.inf), np.where(drawn, ys, -np.inf)
    kept = [0]
    for start, stop in pairwise(1 + inner * k // stretches for k in range(stretches + 1)):
        low, high = start + int(lows[start:stop].argmin()), start + int(highs[start:stop].argmax())
        kept += sorted({low, high})  # of a gap both are its first point
    return [curve[index] for index in (*kept, len(curve) - 1)]


def sample(curve: Curve, limit: int = 40) -> list[tuple[float, float]]:
    """At most `limit` evenly spaced points, including both ends: for tables."""
    if len(curve) <= limit:
        return list(curve)
    return [curve[round(k * (len(curve) - 1) / (limit - 1))] for k in range(limit)]
