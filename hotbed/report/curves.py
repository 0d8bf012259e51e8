"""A run -> its charts (charts.py draws them), and tables of metrics within groups, by slice and of further tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from hotbed.report.charts import Chart, ReferenceLine, Series
from hotbed.report.formats import count, decimal, listing, mapping, number, table, text
from hotbed.report.points import smooth, usable
from hotbed.report.read import EvalPoint, RunRecord, Skew, TrainPoint

SMOOTH_FROM = 20  # points; fewer need no smoothing
MAX_DIVISIONS = 12  # ends of epochs
SKEW_CURVES = 5  # features drawn in addition to the total
SEEN = "samples seen"
_SLICE = ("auc", "log_loss", "calibration")
_TASK = (*_SLICE, "rmse", "mae", "r2")


def over_samples(
    run: RunRecord, identifier: str, title: str, caption: str, y_label: str, series: Iterable[Series], **options: Any
) -> Chart:
    """A chart over the samples seen, with the ends of epochs."""
    return Chart(identifier, title, caption, SEEN, y_label, tuple(series), divisions=epoch_ends(run.train), **options)


def learning_charts(run: RunRecord) -> list[Chart]:
    """Loss, AUC, speed and learning rate over samples seen."""
    return [
        over_samples(
            run,
            "loss",
            "Training loss",
            "Mean log loss of each logging interval; lower is better.",
            "nats per sample",
            (
                *_noisy("loss", [(p.samples, p.loss) for p in run.train]),
                *_eval_series(run.evals, "log_loss", "log loss on"),
            ),
        ),
        over_samples(
            run,
            "auc",
            "AUC",
            _auc_caption(run),
            "AUC",
            (
                *_noisy("train, last interval", [(p.samples, p.auc) for p in run.train]),
                *_eval_series(run.evals, "auc", ""),
            ),
            y_marks=_best_marks(run),
        ),
        over_samples(
            run,
            "speed",
            "Throughput",
            "Samples trained per second; evaluations and checkpoints are not counted.",
            "samples per second",
            (Series("samples per second", [(p.samples, p.samples_per_s) for p in run.train], 3),),
            y_format="count",
            zero=True,
        ),
        over_samples(
            run,
            "lr",
            "Learning rate",
            "Of the dense weights, as set by the schedule; that of the rows is scaled in the same way.",
            "learning rate",
            (Series("learning rate", [(p.samples, p.lr) for p in run.train], 4),),
            y_format="significant",
            zero=True,
        ),
    ]


def calibration_chart(run: RunRecord) -> Chart:
    """Predicted against observed share of positives."""
    bins = [b for b in run.calibration if b.samples > 0 and 0 <= b.prediction <= 1 and 0 <= b.label <= 1]
    spread = tuple(1.96 * math.sqrt(b.label * (1 - b.label) / b.samples) for b in bins)
    return Chart(
        "calibration",
        "Calibration",
        "Each dot is a group of samples with similar predictions; the bars are 95 % intervals. Dots on the line: well "
        "calibrated. Above it predictions are too low, below it too high.",
        "mean prediction",
        "share of positives",
        (Series("share of positives", [(b.prediction, b.label) for b in bins], 1, "dots", spread),),
        x_format="share",
        y_format="share",
        zero=True,
        diagonal="perfectly calibrated",
    )


def skew_chart(run: RunRecord, cache_share: float) -> Chart:
    """How much of all lookups the most frequent ids take."""
    largest = sorted(run.features, key=lambda f: -f.distinct if usable(f.distinct) else 0.0)[:SKEW_CURVES]
    total = [Series("all features", _cumulative(run.total), 1)] if run.total else []
    return Chart(
        "skew",
        "Skew of the ids",
        "Ids sorted by how often they are looked up in training: the share of lookups that the most frequent ids take "
        f"together. Drawn: all features, and the {len(largest)} with the most distinct ids.",
        "share of ids, most frequent first (log scale)",
        "share of lookups",
        (*total, *(Series(f.name, _cumulative(f), 2 + k, "thin") for k, f in enumerate(largest))),
        x_format="share",
        y_format="share",
        x_marks=(ReferenceLine(cache_share, f"{100 * cache_share:g} % of the ids"),),
        zero=True,
        log_x=True,
    )


def headline_split(run: RunRecord) -> str:
    """The split of the headline: test, else valid, else any that was evaluated; "" if none was."""
    measured = [*("test", "valid"), *run.final]
    return next((name for name in measured if name in run.final), "")


def _noisy(name: str, points: list[tuple[float, float]]) -> tuple[Series, ...]:
    if len(points) < SMOOTH_FROM:
        return (Series(name, points, 1),)
    return Series(name, points, 1, "faint"), Series("smoothed", smooth(points), 1)


def _eval_series(evals: tuple[EvalPoint, ...], metric: str, prefix: str) -> list[Series]:
    splits = dict.fromkeys(point.split for point in evals)
    return [
        Series(
            f"{prefix} {split}".strip(),
            [(p.samples, getattr(p.score, metric)) for p in evals if p.split == split],
            2 + index % 5,
        )
        for index, split in enumerate(splits)
    ]


def _auc_caption(run: RunRecord) -> str:
    said = "0.5 is a coin toss, 1 is perfect order."
    if run.train:
        said += " Training AUC is that of the last interval, on samples before the model has learned from them"
        said += (
            "; after the first epoch the model has seen them before."
            if run.train[-1].epoch > run.train[0].epoch
            else "."
        )
    return said


def _best_marks(run: RunRecord) -> tuple[ReferenceLine, ...]:
    split = headline_split(run) or next(iter(run.best_auc), "")
    best = run.best_auc.get(split, math.nan)
    return (ReferenceLine(best, f"best possible {decimal(best)}"),) if usable(best) else ()


def epoch_ends(train: tuple[TrainPoint, ...]) -> tuple[float, ...]:
    """Samples seen at the ends of epochs; empty if there are too many to draw."""
    ends = tuple(before.samples for before, after in pairwise(train) if after.epoch != before.epoch)
    return ends if len(ends) <= MAX_DIVISIONS else ()


def _cumulative(skew: Skew) -> list[tuple[float, float]]:
    return sorted((x, y) for x, y in skew.curve if 1e-12 < x <= 1 and usable(y))


def breakdowns(run: RunRecord) -> list[str]:
    """Breakdowns of the split that the page begins with; empty if none were requested."""
    split = headline_split(run)
    more = mapping(run.more.get(split))
    found = []
    if grouped := mapping(more.get("grouped_auc")):
        found.append(
            f"<p>AUC within {text(grouped.get('feature'), 60)} on {text(split, 60)}: {decimal(number(grouped.get('auc')))}, "
            f"the mean over {count(number(grouped.get('groups')))} groups with both labels "
            f"({count(number(grouped.get('samples')))} samples).</p>"
        )
    for name, slices in mapping(more.get("by")).items():
        rows = [_row(one, text(mapping(one).get("value"), 60), _SLICE) for one in listing(slices)]
        head = [text(name, 60), "samples", "AUC", "log loss", "calibration"]
        found.append(table(f"Metrics by {text(name, 60)}", head, rows, kind="wide"))
    if tasks := mapping(more.get("tasks")):
        rows = [_row(metrics, text(name, 60), _TASK) for name, metrics in tasks.items()]
        head = ["task", "samples", "AUC", "log loss", "calibration", "RMSE", "MAE", "R2"]
        found.append(table("Further tasks", head, rows, kind="wide"))
    return found


def _row(metrics: Any, name: str, wanted: tuple[str, ...]) -> list[str]:
    known = mapping(metrics)
    return [name, count(number(known.get("samples"))), *(decimal(number(known.get(one))) for one in wanted)]
