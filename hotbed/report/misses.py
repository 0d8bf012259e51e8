"""A run with a cache -> misses over cache size, and where the run stood on that curve; nothing without a cache.

Two curves bound what to expect: a cache that always holds the most frequent ids (counted over the whole train split), and LRU
without look-ahead (misses.json: the first batches of the run, all sizes in one pass). The dot is what training measured.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress

from hotbed.report.charts import Chart, Series
from hotbed.report.read import Run
from hotbed.report.series import usable
from hotbed.report.values import listing, mapping, number

FILE = "misses.json"
SMALLEST = 1e-6  # share of the ids; a smaller cache is nobody's


def miss_chart(run: Run) -> Chart | None:
    """Share of look-ups that miss, over the share of the ids that a cache holds."""
    dot = operating_point(run)
    if dot is None:
        return None
    series = []
    lru = _lru(run)
    if lru:
        series.append(Series("LRU, no look-ahead", lru, 2))
    if run.total is not None:
        held = [(x, 1 - y) for x, y in sorted(run.total.curve) if SMALLEST <= x <= 1 and usable(y)]
        series.append(Series("the most frequent ids", held, 3, "thin"))
    return Chart(
        "miss-curve",
        "Misses over cache size",
        "Look-ups that do not find their row, for caches of every size. The dot is this run: below LRU's curve its policy and "
        "look-ahead catch more than LRU; the flatter the curve is there, the less a larger cache would bring. LRU was followed "
        "over the first batches, where many ids are new, so a long run lies lower.",
        "share of the ids in the cache (log scale)",
        "look-ups that miss",
        (*series, Series("this run", [dot], 1, "dots")),
        x_format="share",
        y_format="share",
        zero=True,
        log_x=True,
    )


def operating_point(run: Run) -> tuple[float, float] | None:
    """(share of the ids that the cache holds, share of look-ups that missed), or None where one is not known."""
    slots = run.cache.get("slots", math.nan)
    distinct = run.total.distinct if run.total is not None else math.nan
    found = [
        (1 - point.cache.lookup_hit_rate, point.cache.batches)
        for point in run.train
        if point.cache and usable(point.cache.lookup_hit_rate) and usable(point.cache.batches)
    ]
    batches = sum(much for _, much in found)
    if not (usable(slots) and usable(distinct) and slots > 0 and distinct > 0 and batches > 0):
        return None
    return min(slots / distinct, 1.0), sum(share * much for share, much in found) / batches


def _lru(run: Run) -> list[tuple[float, float]]:
    found: object = {}
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((run.directory / FILE).read_bytes())
    raw = mapping(found)
    rows = number(raw.get("num_rows"))
    sizes, missed = ([number(one) for one in listing(raw.get(name))] for name in ("sizes", "missed_lookups"))
    if not rows > 0 or len(sizes) != len(missed):
        return []
    points = [(size / rows, share) for size, share in zip(sizes, missed)]
    return sorted((x, y) for x, y in points if SMALLEST <= x <= 1 and usable(y))
