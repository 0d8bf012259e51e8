"""Several runs -> charts with one curve per run: loss, AUC, speed, hits, stalls, over samples seen and over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hotbed.report.charts import Chart, Series, Style
from hotbed.report.curves import SEEN, SMOOTH_FROM
from hotbed.report.points import smooth, usable
from hotbed.report.read import RunRecord, TrainPoint

LIST_ITEM = (
    '<li class="c{color}"><svg viewBox="0 0 24 10" aria-hidden="true"><path class="curve" d="M1 5H23"/></svg>'
    "<span>{name}</span></li>"
)
COLORS = 6
CALM_FROM = 200  # points; longer curves of several runs would hide each other
CALM = f"Runs of more than {CALM_FROM} lines are smoothed; their own pages show every peak."


class ComparedRun(NamedTuple):
    """A run by the name of its column and its curves."""

    name: str
    run: RunRecord


def comparison_charts(named: Sequence[ComparedRun]) -> list[Chart]:
    """The charts for which some run has values."""
    step = _over_samples
    charts = [
        Chart("loss", "Training loss", "Smoothed log loss of logging intervals; lower is better.", SEEN,
              "nats per sample", _curves(named, lambda run: _smoothed(step(run, lambda p: p.loss)))),
        Chart("valid", "AUC on valid", "At every evaluation.", SEEN, "AUC", _curves(named, _evaluated)),
        Chart("loss-time", "Training loss over time", "The same loss over wall-clock time.",
              "seconds", "nats per sample", _curves(named, lambda run: _smoothed(_over_time(run, lambda p: p.loss)))),
        Chart("valid-time", "AUC on valid over time", "Over wall-clock time, including evaluations and checkpoints.", "seconds",
              "AUC", _curves(named, _evaluated_by_clock)),
        Chart("speed", "Throughput", f"Samples trained per second; evaluations are not counted. {CALM}", SEEN,
              "samples per second", _curves(named, lambda run: _calm(step(run, lambda p: p.samples_per_s))),
              y_format="count", zero=True),
        Chart("hits", "Lookups that hit", f"Rows that were on the device when their batch was planned. {CALM}", SEEN,
              "share found",
              _curves(named, lambda run: _calm(step(run, lambda p: p.cache.lookup_hit_rate if p.cache else None))),
              y_format="share", zero=True),
        Chart("stall", "Time waited for rows", f"Share of the time of training. {CALM}", SEEN, "share of time",
              _curves(named, lambda run: _calm(step(run, lambda p: p.cache.stall_share if p.cache else None))),
              y_format="share", zero=True),
        Chart("traffic", "Traffic per batch", f"Rows copied to the device and back. {CALM}", SEEN, "MiB per batch",
              _curves(named, lambda run: _calm(step(
                  run, lambda p: (p.cache.bytes_in + p.cache.bytes_out) / 2**20 if p.cache else None))),
              y_format="significant", zero=True),
        Chart("process", "Memory of the process", "Including Python and torch.", SEEN, "MiB",
              _curves(named, lambda run: step(run, lambda p: p.memory.resident_bytes / 2**20 if p.memory else None)),
              y_format="significant", zero=True),
    ]  # fmt: skip
    return [chart for chart in charts if chart.series]


Curve = list[tuple[float, float]]


def _curves(named: Sequence[ComparedRun], of: Callable[[RunRecord], Curve]) -> tuple[Series, ...]:
    """A curve for each run that has points; colours as in the list of runs."""
    found = []
    for k, one in enumerate(named):
        points = of(one.run)
        style: Style = "line" if k < COLORS else "thin"
        if any(usable(y) for _, y in points):
            found.append(Series(one.name, points, 1 + k % COLORS, style))
    return tuple(found)


def _over_samples(run: RunRecord, value: Callable[[TrainPoint], float | None]) -> Curve:
    return [(point.samples, y) for point in run.train if (y := value(point)) is not None]


def _over_time(run: RunRecord, value: Callable[[TrainPoint], float | None]) -> Curve:
    return [(point.seconds, y) for point in run.train if usable(point.seconds) and (y := value(point)) is not None]


def _smoothed(points: Curve) -> Curve:
    return points if len(points) < SMOOTH_FROM else smooth(points)


def _calm(points: Curve) -> Curve:
    return points if len(points) <= CALM_FROM else smooth(points)


def _evaluated(run: RunRecord) -> Curve:
    return [(point.samples, point.score.auc) for point in run.evals if point.split == "valid"]


def _evaluated_by_clock(run: RunRecord) -> Curve:
    found = [
        (point.seconds, point.score.auc) for point in run.evals if point.split == "valid" and usable(point.seconds)
    ]
    return sorted(found)
