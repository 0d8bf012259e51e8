"""What to try next, derived from the measurements of a run; and what `hotbed report --analyze` found.

Each rule looks at one measurement, and says what was measured and which option changes it. A run without a finding gets none:
advice that is always shown is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from hotbed.report.formats import bar, count, decimal, listing, mapping, number, percent, section, table, text
from hotbed.report.points import usable
from hotbed.report.read import RunRecord
from hotbed.report.times import mean_parts, without_warmup

STALLED, READER_BOUND = 0.1, 0.25  # shares of the time of a step
RISING = 0.0005  # of AUC, from the last evaluation but one to the last
OVERFIT = 0.002  # of AUC below the best evaluation
FEW_STEPS = 40
OFF = 0.1  # calibration from 1
MOST_FEATURES = 40


class Hint(NamedTuple):
    """A finding and what to do about it."""

    finding: str
    way: str  # HTML


def advice(run: RunRecord) -> str:
    """The section; "" if nothing stands out."""
    hints = list(hints_of(run))
    if not hints:
        return ""
    items = "".join(f"<li><strong>{text(hint.finding, 300)}</strong> {hint.way}</li>" for hint in hints)
    return section("try", "What to try", f'<ul class="hints">{items}</ul>')


def hints_of(run: RunRecord) -> Iterator[Hint]:
    """All findings, the most costly first."""
    yield from _learning(run)
    yield from _speed(run)


def _learning(run: RunRecord) -> Iterator[Hint]:
    broken = [point for point in run.train if not usable(point.loss)]
    if broken:
        yield Hint(
            f"The loss was not a number at step {count(broken[0].step)}.",
            "Lower the learning rates (<code>--lr</code>, <code>--dense-lr</code>), or clip: "
            "<code>--set tables.clip_norm=1</code>.",
        )
    steps = run.train[-1].step if run.train else 0
    if run.finished and 0 < steps < FEW_STEPS:
        yield Hint(
            f"The run made only {count(steps)} steps.",
            "Smaller batches (<code>--batch-size 256</code>) and more <code>--epochs</code> help with a small log.",
        )
    scores = [point.score.auc for point in run.evals if point.split == "valid" and usable(point.score.auc)]
    if len(scores) > 1 and run.finished:
        best = max(scores)
        if scores[-1] < best - OVERFIT:
            yield Hint(
                f"The AUC on valid fell from {decimal(best)} to {decimal(scores[-1])}.",
                "The model overfits: fewer <code>--epochs</code>, <code>--set train.patience=1</code>, "
                "<code>--set tables.l2=1e-6</code>, or a lower <code>--lr</code>.",
            )
        elif scores[-1] - scores[-2] > RISING:
            yield Hint(
                f"The AUC on valid was still rising, by {decimal(scores[-1] - scores[-2])} at the last evaluation.",
                "Train longer: more <code>--epochs</code> with <code>--resume</code>.",
            )
    for split, score in run.final.items():
        if split == "test" and usable(score.calibration) and abs(score.calibration - 1) > OFF:
            yield Hint(
                f"Predictions on test are {decimal(score.calibration, 2)} times the observed rate.",
                "If test is later than train, the rate may have changed: train on newer data. Else try a lower "
                "<code>--lr</code>.",
            )


def _speed(run: RunRecord) -> Iterator[Hint]:
    stalled = run.cache_mean(lambda point: point.stall_share)
    if usable(stalled) and stalled > STALLED:
        yield Hint(
            f"Training waited for rows during {percent(stalled, 0)} of its time.",
            "The cache is too small, or memory too slow: a larger <code>--cache</code>, or smaller rows (<code>--dim</code>); "
            "<code>hotbed plan --what-if cache=5%,10%,20%</code> forecasts each.",
        )
    parts = mean_parts(without_warmup([point.times for point in run.train if point.times]), lambda one: one.thread)
    if parts is not None and sum(parts) > 0 and parts.reader / sum(parts) > READER_BOUND:
        yield Hint(
            f"Training waited for the reader during {percent(parts.reader / sum(parts), 0)} of a step.",
            "More reader threads (<code>--set data.threads=8</code>), a faster disk, or a larger model that hides it.",
        )


def analysis(run: RunRecord) -> str:
    """Contributions of features and the worst errors; "" unless `--analyze` has found them."""
    found = run.analysis
    lost = {str(name): number(value) for name, value in mapping(found.get("contributions")).items()}
    if not lost:
        return ""
    most = max([abs(value) for value in lost.values() if usable(value)] or [1.0]) or 1.0
    shown = [[text(name, 60), decimal(value, 5), bar(max(value, 0.0) / most)] for name, value in lost.items()]
    about = (
        f"<p>AUC that is lost on {count(number(found.get('samples')))} samples of {text(found.get('split'), 60)} when the "
        "values of one feature are exchanged between samples. Features that say the same share their contribution.</p>"
    )
    features = table("Features by contribution", ["feature", "AUC lost", "to the largest"], shown[:MOST_FEATURES])
    errors = [_error(mapping(one)) for one in listing(found.get("worst"))]
    head = ["row of the split", "label", "predicted", "values"]
    worst = table("The worst errors", head, errors) if errors else ""
    return section(
        "analysis", "What it learned from", about, f'<div class="figures"><div>{features}</div><div>{worst}</div></div>'
    )


def _error(one: Any) -> list[str]:
    values = {name: ", ".join(map(str, listing(ids)[:5])) for name, ids in mapping(one.get("ids")).items()}
    shown = "; ".join(f"{name} {value}" for name, value in list(values.items())[:8])
    return [
        count(number(one.get("row"))),
        count(number(one.get("label"))),
        decimal(number(one.get("score"))),
        text(shown, 300),
    ]
