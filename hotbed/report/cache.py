"""A run with a cache -> what the cache did: a few sentences with its numbers, four charts; nothing without a cache.

All counts are means over the batches planned in an interval, so runs with different intervals can be compared.

`miss_chart`: misses over cache size, and where the run is on that curve. Two curves bound what to expect: a cache that always
holds the most frequent ids (counted over the whole train split), and LRU without look-ahead (misses.json: the first batches of
the run, all sizes in one pass). The dot is what training measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter

from hotbed.report.charts import Chart, Series, figure
from hotbed.report.curves import over_samples
from hotbed.report.formats import count, listing, mapping, number, percent, section, size, text
from hotbed.report.points import CachePoint, usable
from hotbed.report.read import RunRecord, TrainPoint

FILE = "misses.json"
SMALLEST = 1e-6  # share of the ids; nobody uses a smaller cache
MIB = 2.0**20
LITTLE = 0.05  # of the time; waiting less than this is negligible


def cache(run: RunRecord, static_share: float) -> str:
    """The section, or nothing; `static_share` is the share of ids that data.json measured the skew for."""
    if not any(point.cache for point in run.train):
        return ""
    said = f"{_held(run)}{_hits(run, static_share)}{_moved(run)}{_waited(run)}"
    curve = miss_chart(run)
    charts = "".join(figure(chart) for chart in [*cache_charts(run), *([curve] if curve else [])])
    return section("cache", "What the cache did", said, f'<div class="figures">{charts}</div>')


def cache_charts(run: RunRecord) -> list[Chart]:
    """Hit rate, rows, bytes and waiting over samples seen."""

    def line(name: str, color: int, value: Callable[[CachePoint], float]) -> Series:
        return Series(name, [(p.samples, value(p.cache)) for p in run.train if p.cache], color)

    below = _below(run)
    return [
        over_samples(
            run,
            "hits",
            "Hit rate",
            "Rows that were on the device when their batch was planned, counted once per lookup and once per distinct row "
            "of a window. Every row is there before its batch starts; a miss costs time, never accuracy.",
            "share found",
            (
                line("of lookups", 1, lambda c: c.lookup_hit_rate),
                line("of distinct rows", 2, lambda c: c.hit_rate),
            ),
            y_format="share",
            zero=True,
        ),
        over_samples(
            run,
            "rows",
            "Rows per batch",
            "Distinct rows that a batch needs: new rows are created on the device, known ones are read from "
            f"{below}, and changed rows are written back when they are evicted.",
            "rows per batch",
            (
                line("needed", 1, lambda c: c.keys),
                line("created", 3, lambda c: c.created),
                line(f"read from {below}", 2, lambda c: c.misses - c.created),
                line("written back", 4, lambda c: c.written_back),
            ),
            y_format="count",
            zero=True,
        ),
        over_samples(
            run,
            "bytes",
            "Traffic per batch",
            f"Records (weights with their optimizer state) copied between {below} and the device, each way.",
            "MiB per batch",
            (
                line("to the device", 2, lambda c: c.bytes_in / MIB),
                line(f"to {below}", 4, lambda c: c.bytes_out / MIB),
            ),
            y_format="significant",
            zero=True,
        ),
        over_samples(
            run,
            "stall",
            "Time waited for rows",
            f"Share of the training time in which a batch was ready but its rows had not yet arrived from {below}.",
            "share of time",
            (line("share of time", 5, lambda c: c.stall_share),),
            y_format="share",
            zero=True,
        ),
    ]


def _held(run: RunRecord) -> str:
    slots, rows = run.cache.get("slots", math.nan), run.parameters.get("rows", math.nan)
    if not (usable(slots) and usable(rows) and rows > 0):
        return ""
    saved = ""
    device, whole = run.cache.get("device_bytes", math.nan), run.cache.get("table_bytes", math.nan)
    if usable(device) and usable(whole):
        saved = f", in {size(device)} with their index; the whole tables take {size(whole)}"
    policy = run.config.get("tables")
    name = policy.get("policy") if isinstance(policy, dict) else None
    chosen = f" The policy {text(name, 40)} chose which." if isinstance(name, str) and slots < rows else ""
    return f"<p>The device held {count(slots)} of {count(rows)} rows ({percent(slots / rows)}){saved}.{chosen}</p>"


def _hits(run: RunRecord, static_share: float) -> str:
    lookups = run.cache_mean(lambda c: c.lookup_hit_rate)
    if not usable(lookups):
        return ""
    said = f'<p class="finding">Of all lookups of training, <strong>{percent(lookups)} found their row on the device</strong>'
    keys, misses = run.cache_mean(lambda c: c.keys), run.cache_mean(lambda c: c.misses)
    if usable(keys) and usable(misses) and keys > 0:
        said += f", and {percent(1 - misses / keys)} of the distinct rows"
    tables = run.config.get("tables")
    if isinstance(tables, dict) and tables.get("cache") == static_share and run.total and usable(run.total.top_share):
        said += (
            f". The most frequent {percent(static_share)} of the ids, kept permanently, would serve up to "
            f"{percent(run.total.top_share)} of the lookups"
        )
    return said + ".</p>"


def _moved(run: RunRecord) -> str:
    names = ("keys", "misses", "created", "written_back", "bytes_in", "bytes_out")
    keys, misses, created, back, into, out = (run.cache_mean(attrgetter(name)) for name in names)
    if not all(map(usable, (keys, misses, created, back, into, out))):
        return ""
    read, below = round(misses) - round(created), _below(run)  # so that the sentence adds up
    return (
        f"<p>An average batch needed {count(keys)} distinct rows. {count(misses)} were not there: {count(created)} had never "
        f"been used before and were created on the device, {count(read)} came from {below} ({size(into)}). To make room, "
        f"{count(back)} changed rows went back to {below} with their optimizer state ({size(out)}).</p>"
    )


def _waited(run: RunRecord) -> str:
    share = run.cache_mean(lambda c: c.stall_share, _seconds)
    if not usable(share):
        return ""
    if share < LITTLE:
        meaning = f"they were read from {_below(run)} in parallel with computation"
    else:
        meaning = "a larger cache moves fewer rows, and smaller batches let two windows fit at once"
    return (
        f"<p>Training waited for rows {percent(share)} of its time: {meaning}. Planning and copying rows into their slots "
        "are part of the steps and not in that figure. Losses and model are bit-identical to those of whole tables: a "
        "cache decides where rows are, not what they are.</p>"
    )


def _below(run: RunRecord) -> str:
    """Where rows are that are not on the device."""
    tiers = [point.tiers for point in run.train if point.tiers]
    if not tiers:
        return "host memory"
    return "memory or ssd" if tiers[-1].memory_slots else "the ssd"


def _seconds(point: TrainPoint) -> float:
    """Proportional to the time an interval took."""
    return point.batches / point.samples_per_s if point.samples_per_s > 0 else math.nan


def miss_chart(run: RunRecord) -> Chart | None:
    """Share of lookups that miss, over the share of the ids that a cache holds."""
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
        "Lookups that do not find their row, for caches of every size. The dot is this run: below LRU's curve, its policy and "
        "look-ahead beat LRU; the flatter the curve is there, the less a larger cache would help. LRU was simulated over the "
        "first batches, where many ids are new, so a long run lies lower.",
        "share of the ids in the cache (log scale)",
        "lookups that miss",
        (*series, Series("this run", [dot], 1, "dots")),
        x_format="share",
        y_format="share",
        zero=True,
        log_x=True,
    )


def operating_point(run: RunRecord) -> tuple[float, float] | None:
    """(share of the ids in the cache, share of lookups that missed), or None if one is unknown."""
    slots = run.cache.get("slots", math.nan)
    distinct = run.total.distinct if run.total is not None else math.nan
    missed = run.cache_mean(lambda c: 1 - c.lookup_hit_rate)
    if not (usable(slots) and usable(distinct) and slots > 0 and distinct > 0 and usable(missed)):
        return None
    return min(slots / distinct, 1.0), missed


def _lru(run: RunRecord) -> list[tuple[float, float]]:
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
