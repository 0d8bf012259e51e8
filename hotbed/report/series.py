"""Long curves -> curves a page can hold: smoothing, and thinning that keeps every peak.

A point whose y is nan is a gap; it stays a gap. Logs have up to some 100,000 lines and a page some fifty curves, so that
stretches are searched by numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

MAX_POINTS = 1000
LARGEST = 1e30  # beyond this a value is broken, and axis arithmetic would overflow

Curve = Sequence[tuple[float, float]]  # x rising, y


def usable(y: float) -> bool:
    """Whether the value can be drawn."""
    return -LARGEST < y < LARGEST


def smooth(curve: Curve, share: float = 0.015) -> list[tuple[float, float]]:
    """Mean over about `share` of the points to either side, nearer ones weighing more, so that it does not lag behind."""
    keep = math.exp(-1 / max(1.0, share * len(curve)))
    forward = _weighted_sums(curve, keep)
    backward = reversed(_weighted_sums(curve[::-1], keep))
    return [
        (x, (before[0] + after[0] - y) / (before[1] + after[1] - 1) if usable(y) else math.nan)
        for (x, y), before, after in zip(curve, forward, backward)
    ]


def _weighted_sums(curve: Curve, keep: float) -> list[tuple[float, float]]:
    """After each point: the sum of all values so far, each faded by its distance, and the sum of their weights."""
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
    """At most `limit` points, evenly spaced, both ends among them: for tables."""
    if len(curve) <= limit:
        return list(curve)
    return [curve[round(k * (len(curve) - 1) / (limit - 1))] for k in range(limit)]
