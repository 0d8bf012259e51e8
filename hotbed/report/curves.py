"""A run -> its charts: which series, which words. Drawing is charts.py's business."""

from __future__ import annotations

import math
from itertools import pairwise

from hotbed.report.charts import Chart, Mark, Series
from hotbed.report.formats import decimal
from hotbed.report.points import smooth, usable
from hotbed.report.read import EvalPoint, Run, Skew, TrainPoint

SMOOTH_FROM = 20  # points; fewer need no smoothing
MAX_DIVISIONS = 12  # ends of epochs
SKEW_CURVES = 5  # features drawn beside the total
SEEN = "samples seen"


def learning_charts(run: Run) -> list[Chart]:
    """Loss, AUC, speed and learning rate over samples seen."""
    divisions = epoch_ends(run.train)
    return [
        Chart(
            "loss",
            "Training loss",
            "Mean log loss of each logging interval; lower is better.",
            SEEN,
            "nats per sample",
            (
                *_noisy("loss", [(p.samples, p.loss) for p in run.train]),
                *_eval_series(run.evals, "log_loss", "log loss on"),
            ),
            divisions=divisions,
        ),
        Chart(
            "auc",
            "AUC",
            _auc_caption(run),
            SEEN,
            "AUC",
            (
                *_noisy("train, last interval", [(p.samples, p.auc) for p in run.train]),
                *_eval_series(run.evals, "auc", ""),
            ),
            y_marks=_best_marks(run),
            divisions=divisions,
        ),
        Chart(
            "speed",
            "Throughput",
            "Samples trained per second; evaluations and checkpoints are not counted.",
            SEEN,
            "samples per second",
            (Series("samples per second", [(p.samples, p.samples_per_s) for p in run.train], 3),),
            y_format="count",
            zero=True,
            divisions=divisions,
        ),
        Chart(
            "lr",
            "Learning rate",
            "Of the dense weights, as the schedule set it; that of the rows rises and falls with it.",
            SEEN,
            "learning rate",
            (Series("learning rate", [(p.samples, p.lr) for p in run.train], 4),),
            y_format="significant",
            zero=True,
            divisions=divisions,
        ),
    ]


def calibration_chart(run: Run) -> Chart:
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


def skew_chart(run: Run, cache_share: float) -> Chart:
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
        x_marks=(Mark(cache_share, f"{100 * cache_share:g} % of the ids"),),
        zero=True,
        log_x=True,
    )


def headline_split(run: Run) -> str:
    """The split the headline speaks of: test, else valid, else whichever was measured; "" when none was."""
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


def _auc_caption(run: Run) -> str:
    said = "0.5 is a coin toss, 1 is perfect order."
    if run.train:
        said += " Training AUC is that of the last interval, on rows just before they are learned from"
        said += (
            "; after the first epoch the model has seen them before."
            if run.train[-1].epoch > run.train[0].epoch
            else "."
        )
    return said


def _best_marks(run: Run) -> tuple[Mark, ...]:
    split = headline_split(run) or next(iter(run.best_auc), "")
    best = run.best_auc.get(split, math.nan)
    return (Mark(best, f"best possible {decimal(best)}"),) if usable(best) else ()


def epoch_ends(train: tuple[TrainPoint, ...]) -> tuple[float, ...]:
    """Samples seen at the ends of epochs, where they are few enough to draw."""
    ends = tuple(before.samples for before, after in pairwise(train) if after.epoch != before.epoch)
    return ends if len(ends) <= MAX_DIVISIONS else ()


def _cumulative(skew: Skew) -> list[tuple[float, float]]:
    return sorted((x, y) for x, y in skew.curve if 1e-12 < x <= 1 and usable(y))
