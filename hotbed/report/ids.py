"""A run with dynamic ids -> their counts: two sentences, a table of features, three charts; nothing without dynamic ids.

Counts cover training since the run began and are saved with it, so a resumed run shows the same ones.
"""

from __future__ import annotations

import math
from itertools import pairwise

from hotbed.report.charts import Chart, Series, figure
from hotbed.report.curves import over_samples
from hotbed.report.formats import count, long_table, percent, section, text
from hotbed.report.points import IdPoint, usable
from hotbed.report.read import RunRecord

CURVES = 4  # of single tables
HEAD = (
    "feature",
    "seen<small>lookups</small>",
    "admitted<small>ids</small>",
    "rejected<small>lookups</small>",
    "expired<small>ids</small>",
    "rows<small>now</small>",
)


def ids(run: RunRecord) -> str:
    """The section, or nothing."""
    points = [point for point in run.train if point.ids]
    if not points:
        return ""
    last = points[-1].ids
    charts = "".join(figure(chart) for chart in id_charts(run))
    return section("ids", "Dynamic ids", _said(last), f'<div class="figures">{charts}<div>{_table(last)}</div></div>')


def id_charts(run: RunRecord) -> list[Chart]:
    """Rows, admitted and expired ids, and the share of lookups of the shared row, over samples seen."""
    points = [(point.samples, point.ids) for point in run.train if point.ids]
    totals = [(samples, _sum(counts)) for samples, counts in points]
    largest = _by_rows(points[-1][1])[:CURVES] if points else []
    single = [
        Series(
            name, [(samples, counts[name].rows if name in counts else math.nan) for samples, counts in points], color
        )
        for color, name in enumerate(largest, start=2)
    ]
    new = [
        (after, _share(now.rejected - then.rejected, now.seen - then.seen))
        for (_, then), (after, now) in pairwise([(0.0, IdPoint(0, 0, 0, 0, 0)), *totals])
    ]
    return [
        over_samples(
            run,
            "id-rows",
            "Ids with a row",
            f"Of all tables with dynamic ids together{', and of the largest' if len(points[-1][1]) > 1 else ''}.",
            "rows",
            (Series("all", [(x, one.rows) for x, one in totals], 1), *(single if len(points[-1][1]) > 1 else ())),
            y_format="count",
            zero=True,
        ),
        over_samples(
            run,
            "id-changes",
            "Ids that came and went",
            "Ids that got a row and ids that lost it, since the run began; an id that returns is counted again.",
            "ids",
            (
                Series("admitted", [(x, one.admitted) for x, one in totals], 3),
                Series("expired", [(x, one.expired) for x, one in totals], 4),
            ),
            y_format="count",
            zero=True,
        ),
        over_samples(
            run,
            "id-rejected",
            "Lookups of a shared row",
            "Share of the lookups of an interval whose id was not admitted: they use the shared row of its table.",
            "share of lookups",
            (Series("share of lookups", new, 5),),
            y_format="share",
            zero=True,
        ),
    ]


def _said(last: dict[str, IdPoint]) -> str:
    total = _sum(last)
    if not all(map(usable, total)):
        return ""
    tables = "the table" if len(last) == 1 else f"the {count(len(last))} tables"
    back = f" {count(total.expired)} ids lost their row because they were not used." if total.expired else ""
    shared = (
        f" {percent(_share(total.rejected, total.seen))} of the lookups of training came before their id was admitted and "
        "used the shared row of its table."
        if total.rejected
        else ""
    )
    return (
        f'<p class="finding">{count(total.seen)} lookups of training gave rows to {count(total.admitted)} ids of '
        f"{tables} without a vocabulary; <strong>{count(total.rows)} ids have one now</strong>.</p>"
        + (f"<p>{back}{shared}</p>" if back or shared else "")
    )


def _table(last: dict[str, IdPoint]) -> str:
    rows = [[text(name, 60), *map(count, last[name])] for name in _by_rows(last)]
    return long_table("Dynamic ids by feature, most rows first", HEAD, rows, "metrics.jsonl")


def _by_rows(counts: dict[str, IdPoint]) -> list[str]:
    return sorted(counts, key=lambda name: -counts[name].rows if usable(counts[name].rows) else 0.0)


def _sum(counts: dict[str, IdPoint]) -> IdPoint:
    return IdPoint(*(sum(column) for column in zip(*counts.values())))


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
