"""A run over an ssd -> what its tiers did: a few sentences with its numbers, six charts; nothing without an ssd.

Counts are means over the batches of an interval. Wear, the bytes that a process has written, starts at zero when a run is
resumed; here the processes of a run are added up, without what each wrote after its last line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter

from hotbed.report.charts import Chart, ReferenceLine, Series, figure
from hotbed.report.curves import over_samples
from hotbed.report.formats import count, percent, section, size
from hotbed.report.points import TierPoint, usable
from hotbed.report.read import RunRecord

UNITS = (("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40))
LITTLE_LIVE = 0.5  # of the records; below it, compaction lags behind


def tiers(run: RunRecord) -> str:
    """The section, or nothing."""
    if not any(point.tiers for point in run.train):
        return ""
    said = f"{_hits(run)}{_moved(run)}{_wear(run)}{_room(run)}"
    charts = "".join(figure(chart) for chart in tier_charts(run))
    return section("tiers", "What the tiers did", said, f'<div class="figures">{charts}</div>')


def tier_charts(run: RunRecord) -> list[Chart]:
    """Hit rates, rows, bytes, wear, and use of ssd and memory, over samples seen."""
    return [_hit_chart(run), _row_chart(run), _byte_chart(run), _wear_chart(run), _ssd_chart(run), _memory_chart(run)]


def _line(run: RunRecord, name: str, color: int, value: Callable[[TierPoint], float]) -> Series:
    return Series(name, [(p.samples, value(p.tiers)) for p in run.train if p.tiers], color)


def _hit_chart(run: RunRecord) -> Chart:
    device = [(p.samples, p.cache.hit_rate) for p in run.train if p.cache and p.tiers]
    return over_samples(
        run,
        "tier-hits",
        "Hit rate by tier",
        "Of the distinct rows of a window, those that were on the device; of the rows that were requested below it, those that "
        "were in memory. The rest came from the ssd. A row that was never used before is created on the device.",
        "share found",
        (Series("on the device", device, 1), _line(run, "in memory, of the others", 2, lambda t: t.memory_hit_rate)),
        y_format="share",
        zero=True,
    )


def _row_chart(run: RunRecord) -> Chart:
    return over_samples(
        run,
        "tier-rows",
        "Rows per batch below the device",
        "Rows that were read from memory and from the ssd, and rows that left memory for the ssd.",
        "rows per batch",
        (
            _line(run, "from memory", 2, lambda t: t.from_memory),
            _line(run, "from the ssd", 3, lambda t: t.from_ssd),
            _line(run, "to the ssd", 4, lambda t: t.to_ssd),
        ),
        y_format="count",
        zero=True,
    )


def _byte_chart(run: RunRecord) -> Chart:
    unit, scale = _unit(run, lambda t: max(t.bytes_from_memory, t.bytes_read, t.bytes_written))
    return over_samples(
        run,
        "tier-bytes",
        "Traffic per batch below the device",
        "Records with their optimizer state; on the ssd with checksums, and with what compaction copies.",
        f"{unit} per batch",
        (
            _line(run, "from memory", 2, lambda t: t.bytes_from_memory / scale),
            _line(run, "read from the ssd", 3, lambda t: t.bytes_read / scale),
            _line(run, "written to the ssd", 4, lambda t: t.bytes_written / scale),
            _line(run, "of that by compaction", 5, lambda t: t.bytes_compacted / scale),
        ),
        y_format="significant",
        zero=True,
    )


def _wear_chart(run: RunRecord) -> Chart:
    wear = _over_processes(run, lambda t: t.wear)
    unit, scale = unit_of(max((y for _, y in wear if usable(y)), default=0.0))
    return over_samples(
        run,
        "tier-wear",
        "Total written to the ssd",
        "Wear: every byte that was written there, by training, evaluations, checkpoints and compaction. Checkpoints link the "
        "files instead of writing them again.",
        unit,
        (Series("written", [(x, y / scale) for x, y in wear], 4),),
        y_format="significant",
        zero=True,
    )


def _ssd_chart(run: RunRecord) -> Chart:
    cap = _last(run, lambda t: t.ssd_cap)
    unit, scale = unit_of(cap)
    return over_samples(
        run,
        "tier-ssd",
        "Use of the ssd",
        "All files, and the records in them that are the newest version of their row. Mostly stale segments are rewritten.",
        unit,
        (
            _line(run, "files", 3, lambda t: t.ssd_bytes / scale),
            _line(run, "live rows", 2, lambda t: t.ssd_live_bytes / scale),
        ),
        y_format="significant",
        y_marks=(ReferenceLine(cap / scale, f"cap {size(cap)}"),) if usable(cap) else (),
        zero=True,
    )


def _memory_chart(run: RunRecord) -> Chart:
    budget = _last(run, lambda t: t.memory_budget)
    unit, scale = unit_of(budget)
    return over_samples(
        run,
        "tier-memory",
        "Use of memory",
        "Rows and their index, which the budget covers; and the growth of the whole process since its first line.",
        unit,
        (
            _line(run, "rows and their index", 2, lambda t: t.memory_bytes / scale),
            Series("growth of the process", [(x, y / scale) for x, y in _growth(run)], 6),
        ),
        y_format="significant",
        y_marks=(ReferenceLine(budget / scale, f"budget {size(budget)}"),) if usable(budget) else (),
        zero=True,
    )


def _hits(run: RunRecord) -> str:
    memory, ssd = _total(run, lambda t: t.from_memory), _total(run, lambda t: t.from_ssd)
    if not (usable(memory) and usable(ssd)) or memory + ssd <= 0:
        return ""
    if _last(run, lambda t: t.memory_slots) == 0:
        return f"<p>Memory is the cache of this run. {count(ssd)} rows that were not in it came from the ssd.</p>"
    return (
        f'<p class="finding">Of {count(memory + ssd)} rows that training requested below the device, '
        f"<strong>{percent(memory / (memory + ssd))} were in memory</strong>, and {count(ssd)} came from the ssd.</p>"
    )


def _moved(run: RunRecord) -> str:
    read, written, compacted = (_total(run, attrgetter(f"bytes_{name}")) for name in ("read", "written", "compacted"))
    if not all(map(usable, (read, written, compacted))):
        return ""
    return (
        f"<p>Training read {size(read)} from the ssd and wrote {size(written)} to it, {size(compacted)} of that to rewrite "
        "files that were mostly stale.</p>"
    )


def _wear(run: RunRecord) -> str:
    wear, compactions = (_over_processes(run, attrgetter(name)) for name in ("wear", "compactions"))
    if not wear or not usable(wear[-1][1]) or not usable(compactions[-1][1]):
        return ""
    done = compactions[-1][1]
    times = "compaction ran once" if done == 1 else f"compaction ran {count(done)} times"
    return f"<p>Including evaluations and checkpoints, {size(wear[-1][1])} were written to the ssd (wear); {times}.</p>"


def _room(run: RunRecord) -> str:
    used, cap, share = (_last(run, attrgetter(name)) for name in ("ssd_bytes", "ssd_cap", "live_share"))
    if not all(map(usable, (used, cap, share))) or cap <= 0:
        return ""
    behind = " Compaction lagged behind." if share < LITTLE_LIVE else ""
    memory, budget = _last(run, lambda t: t.memory_bytes), _last(run, lambda t: t.memory_budget)
    held = f" Rows in memory and their index took {size(memory)} of {size(budget)}" if usable(memory + budget) else ""
    resident = _last(run, lambda t: t.resident_bytes)
    if held:
        held += f"; the whole process took {size(resident)}." if usable(resident) else "."
    return (
        f"<p>At the end files took {size(used)} of {size(cap)} ({percent(used / cap)}), and {percent(share)} of their "
        f"records were live.{behind}{held}</p>"
    )


def _growth(run: RunRecord) -> list[tuple[float, float]]:
    """Resident memory minus that of the first line of a process."""
    points, began, last = [], math.nan, math.inf
    for point in run.train:
        if point.tiers is not None:
            now = point.tiers
            if now.wear < last or not usable(began):
                began = now.resident_bytes
            last = now.wear if usable(now.wear) else last
            points.append((point.samples, max(0.0, now.resident_bytes - began)))
    return points


def _over_processes(run: RunRecord, value: Callable[[TierPoint], float]) -> list[tuple[float, float]]:
    """A count that starts at zero in every process, summed over all processes."""
    points, before, last = [], 0.0, 0.0
    for point in run.train:
        if point.tiers is None:
            continue
        now = value(point.tiers)
        if usable(now):
            before += last if now < last else 0.0
            last = now
        points.append((point.samples, before + now))
    return points


def _total(run: RunRecord, value: Callable[[TierPoint], float]) -> float:
    """The sum over batches of a mean per batch; nan if none is known."""
    known = [value(point.tiers) * point.batches for point in run.train if point.tiers]
    known = [one for one in known if usable(one)]
    return sum(known) if known else math.nan


def _last(run: RunRecord, value: Callable[[TierPoint], float]) -> float:
    """The last known value."""
    known = [value(point.tiers) for point in run.train if point.tiers]
    return next((one for one in reversed(known) if usable(one)), math.nan)


def _unit(run: RunRecord, value: Callable[[TierPoint], float]) -> tuple[str, float]:
    known = [value(point.tiers) for point in run.train if point.tiers]
    return unit_of(max((one for one in known if usable(one)), default=0.0))


def unit_of(most: float) -> tuple[str, float]:
    """The largest unit in which the largest amount is 1 or more."""
    fits = [unit for unit in UNITS if usable(most) and most >= unit[1]]
    return fits[-1] if fits else UNITS[0]
