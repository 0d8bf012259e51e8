"""A run that followed a log -> its hours: AUC before they were learned, drift, and new ids; nothing for other runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hotbed.report.charts import Chart, Series, figure
from hotbed.report.formats import NAN, count, decimal, long_table, mapping, name_of, number, percent, section, text

MOST_FEATURES = 4  # drawn one by one


class HourPoint(NamedTuple):
    """One line of kind "hour"."""

    hour: str  # 2026-11-16 05:00
    step: int
    samples: float
    positives: float = NAN
    auc: float = NAN
    log_loss: float = NAN
    calibration: float = NAN
    late_rows: float = NAN
    bad_rows: float = NAN
    score_drift: float = NAN
    id_drift: float = NAN
    drift_most: tuple[tuple[str, float], ...] = ()
    new_ids: tuple[tuple[str, float], ...] = ()

    @property
    def new_share(self) -> float:
        """Mean over features."""
        known = [share for _, share in self.new_ids if math.isfinite(share)]
        return sum(known) / len(known) if known else NAN


def hour_point(raw: Mapping[str, Any], step: int) -> HourPoint | None:
    """A line of metrics.jsonl; None without an hour."""
    hour, drift = name_of(raw.get("hour")), mapping(raw.get("drift"))
    if not hour:
        return None
    names = ("positives", "auc", "log_loss", "calibration", "late_rows", "bad_rows")
    return HourPoint(
        hour,
        step,
        number(raw.get("hour_samples")),
        **{name: number(raw.get(name)) for name in names},
        score_drift=number(drift.get("score")),
        id_drift=number(drift.get("ids")),
        drift_most=_pairs(raw.get("drift_most")),
        new_ids=_pairs(raw.get("new_ids")),
    )


def hours(points: tuple[HourPoint, ...]) -> str:
    """The section, or nothing."""
    if not points:
        return ""
    charts = "".join(figure(chart) for chart in hour_charts(points))
    return section(
        "hours", "Hour by hour", _said(points), f'<div class="figures">{charts}</div>', f"<div>{_table(points)}</div>"
    )


def hour_charts(points: tuple[HourPoint, ...]) -> list[Chart]:
    """AUC, drift and new ids over the hours of the log."""
    numbered = list(enumerate(points, 1))
    at = f"hours since {points[0].hour}"
    names = [name for name, _ in sorted(points[-1].new_ids, key=lambda pair: -pair[1])[:MOST_FEATURES]]
    shares = [
        Series(name, [(n, dict(one.new_ids).get(name, NAN)) for n, one in numbered], color)
        for color, name in enumerate(names, start=2)
    ]
    return [
        Chart(
            "hour-auc",
            "AUC of an hour",
            "Every batch is scored before it is learned, so this is the AUC on data the model has not seen.",
            at,
            "AUC",
            (Series("AUC", [(n, one.auc) for n, one in numbered], 1),),
        ),
        Chart(
            "hour-drift",
            "Drift against the hour before",
            "Scores: population stability index, where 0.1 is worth a look and 0.25 a change. Ids: Jensen-Shannon divergence, "
            "mean over features.",
            at,
            "drift",
            (
                Series("scores", [(n, one.score_drift) for n, one in numbered], 3),
                Series("ids", [(n, one.id_drift) for n, one in numbered], 4),
            ),
            zero=True,
        ),
        Chart(
            "hour-new",
            "New ids",
            "Share of the lookups of an hour whose id has no row of its own before them.",
            at,
            "share of lookups",
            (Series("mean of the features", [(n, one.new_share) for n, one in numbered], 1), *shares),
            y_format="share",
            zero=True,
        ),
    ]


def _said(points: tuple[HourPoint, ...]) -> str:
    last = points[-1]
    late = sum(one.late_rows for one in points if math.isfinite(one.late_rows))
    behind = f" {count(late)} rows came after their hour was closed." if late else ""
    return (
        f'<p class="finding">{count(len(points))} hours were trained as they arrived. The last, {text(last.hour)}, had '
        f"<strong>AUC {decimal(last.auc)}</strong> before it was learned.</p><p>{percent(last.new_share)} of its lookups were "
        f"of new ids, on average over the features.{behind}</p>"
    )


def _table(points: tuple[HourPoint, ...]) -> str:
    head = ("hour", "samples", "AUC", "log loss", "calibration", "score drift", "id drift", "new ids", "late", "bad")
    rows = [
        [
            text(one.hour),
            count(one.samples),
            decimal(one.auc),
            decimal(one.log_loss),
            decimal(one.calibration),
            decimal(one.score_drift),
            decimal(one.id_drift),
            percent(one.new_share),
            count(one.late_rows),
            count(one.bad_rows),
        ]
        for one in reversed(points)
    ]
    return long_table("Hours, newest first", head, rows, "metrics.jsonl")


def _pairs(value: object) -> tuple[tuple[str, float], ...]:
    return tuple((name_of(name), number(share)) for name, share in mapping(value).items())
