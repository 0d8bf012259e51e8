"""A run with a cache -> what the cache did: three sentences with the run's own numbers, four charts; nothing without one.

All counts are means over the batches that were planned in an interval, so runs with other intervals can be compared.

`miss_chart`: a run with a cache -> misses over cache size, and where the run stood on that curve; nothing without a cache.

Two curves bound what to expect: a cache that always holds the most frequent ids (counted over the whole train split), and LRU
without look-ahead (misses.json: the first batches of the run, all sizes in one pass). The dot is what training measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter

from hotbed.report.charts import Chart, Series, figure
from hotbed.report.curves import SEEN, epoch_ends
from hotbed.report.formats import count, listing, mapping, number, percent, section, size, text
from hotbed.report.points import CachePoint, usable
from hotbed.report.read import Run, TrainPoint

FILE = "misses.json"
SMALLEST = 1e-6  # share of the ids; a smaller cache is nobody's
MIB = 2.0**20
LITTLE = 0.05  # of the time; waiting less than this is hidden well


def cache(run: Run, static_share: float) -> str:
    """The section, or nothing; `static_share` is the share of ids that data.json measured the skew for."""
    if not any(point.cache for point in run.train):
        return ""
    said = f"{_held(run)}{_hits(run, static_share)}{_moved(run)}{_waited(run)}"
    curve = miss_chart(run)
    charts = "".join(figure(chart) for chart in [*cache_charts(run), *([curve] if curve else [])])
    return section("cache", "What the cache did", said, f'<div class="figures">{charts}</div>')


def cache_charts(run: Run) -> list[Chart]:
    """Hit rate, rows, bytes and waiting over samples seen."""

    def line(name: str, color: int, value: Callable[[CachePoint], float]) -> Series:
        return Series(name, [(p.samples, value(p.cache)) for p in run.train if p.cache], color)

    ends, below = epoch_ends(run.train), _below(run)
    return [
        Chart(
            "hits",
            "Hit rate",
            "Rows that were on the device when their batch was planned, counted once per lookup and once per distinct row "
            "of a window. Every row is there before its batch starts; a miss costs time, never accuracy.",
            SEEN,
            "share found",
            (
                line("of lookups", 1, lambda c: c.lookup_hit_rate),
                line("of distinct rows", 2, lambda c: c.hit_rate),
            ),
            y_format="share",
            zero=True,
            divisions=ends,
        ),
        Chart(
            "rows",
            "Rows per batch",
            "Distinct rows a batch needs, and what had to be done for them: new rows are created on the device, known ones "
            f"are read from {below}, and rows that were changed are written back when they leave.",
            SEEN,
            "rows per batch",
            (
                line("needed", 1, lambda c: c.keys),
                line("made new", 3, lambda c: c.created),
                line(f"read from {below}", 2, lambda c: c.misses - c.created),
                line("written back", 4, lambda c: c.written_back),
            ),
            y_format="count",
            zero=True,
            divisions=ends,
        ),
        Chart(
            "bytes",
            "Traffic per batch",
            f"Records (weights with their optimizer state) copied between {below} and the device, each way.",
            SEEN,
            "MiB per batch",
            (
                line("to the device", 2, lambda c: c.bytes_in / MIB),
                line(f"to {below}", 4, lambda c: c.bytes_out / MIB),
            ),
            y_format="significant",
            zero=True,
            divisions=ends,
        ),
        Chart(
            "stall",
            "Time waited for rows",
            f"Share of the training time in which a batch was ready to train and its rows had not come from {below}.",
            SEEN,
            "share of time",
            (line("share of time", 5, lambda c: c.stall_share),),
            y_format="share",
            zero=True,
            divisions=ends,
        ),
    ]


def _held(run: Run) -> str:
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


def _hits(run: Run, static_share: float) -> str:
    lookups = _mean(run, lambda c: c.lookup_hit_rate)
    if not usable(lookups):
        return ""
    said = f'<p class="finding">Of all lookups of training, <strong>{percent(lookups)} found their row on the device</strong>'
    keys, misses = _mean(run, lambda c: c.keys), _mean(run, lambda c: c.misses)
    if usable(keys) and usable(misses) and keys > 0:
        said += f", and {percent(1 - misses / keys)} of the distinct rows"
    tables = run.config.get("tables")
    if isinstance(tables, dict) and tables.get("cache") == static_share and run.total and usable(run.total.top_share):
        said += (
            f". The most frequent {percent(static_share)} of the ids, kept permanently, would serve up to "
            f"{percent(run.total.top_share)} of the lookups"
        )
    return said + ".</p>"


def _moved(run: Run) -> str:
    names = ("keys", "misses", "created", "written_back", "bytes_in", "bytes_out")
    keys, misses, created, back, into, out = (_mean(run, attrgetter(name)) for name in names)
    if not all(map(usable, (keys, misses, created, back, into, out))):
        return ""
    read, below = round(misses) - round(created), _below(run)  # so that the sentence adds up
    return (
        f"<p>An average batch needed {count(keys)} distinct rows. {count(misses)} were not there: {count(created)} had never "
        f"been used before and were created on the device, {count(read)} came from {below} ({size(into)}). To make room, "
        f"{count(back)} changed rows went back to {below} with their optimizer state ({size(out)}).</p>"
    )


def _waited(run: Run) -> str:
    share = _mean(run, lambda c: c.stall_share, weight=_seconds)
    if not usable(share):
        return ""
    if share < LITTLE:
        meaning = f"they were read from {_below(run)} in parallel with computation"
    else:
        meaning = "a larger cache moves fewer rows, and smaller batches let two windows fit at once"
    return (
        f"<p>Training waited for rows {percent(share)} of its time: {meaning}. Planning and putting rows into their slots is "
        "work of the steps and not in that figure. The losses and the model are bit-identical to those of whole tables; a "
        "cache decides where rows are, not what they are.</p>"
    )


def _below(run: Run) -> str:
    """Where the rows are that are not on the device."""
    tiers = [point.tiers for point in run.train if point.tiers]
    if not tiers:
        return "host memory"
    return "memory or ssd" if tiers[-1].memory_slots else "the ssd"


def _batches(point: TrainPoint) -> float:
    return point.cache.batches if point.cache else math.nan


def _seconds(point: TrainPoint) -> float:
    """Proportional to the time an interval took."""
    return _batches(point) / point.samples_per_s if point.samples_per_s > 0 else math.nan


def _mean(run: Run, value: Callable[[CachePoint], float], weight: Callable[[TrainPoint], float] = _batches) -> float:
    """Over the intervals, each by its weight; nan when none is known."""
    known = [(value(point.cache), weight(point)) for point in run.train if point.cache]
    known = [(one, much) for one, much in known if usable(one) and usable(much) and much > 0]
    total = sum(much for _, much in known)
    return sum(one * much for one, much in known) / total if total > 0 else math.nan


def miss_chart(run: Run) -> Chart | None:
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
        "Lookups that do not find their row, for caches of every size. The dot is this run: below LRU's curve its policy and "
        "look-ahead catch more than LRU; the flatter the curve is there, the less a larger cache would bring. LRU was followed "
        "over the first batches, where many ids are new, so a long run lies lower.",
        "share of the ids in the cache (log scale)",
        "lookups that miss",
        (*series, Series("this run", [dot], 1, "dots")),
        x_format="share",
        y_format="share",
        zero=True,
        log_x=True,
    )


def operating_point(run: Run) -> tuple[float, float] | None:
    """(share of the ids that the cache holds, share of lookups that missed), or None where one is not known."""
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
