"""The trials of `hotbed tune` -> one self-contained page: valid AUC by trial, evaluations, and a table of all settings."""

from __future__ import annotations

from pathlib import Path

from hotbed.report.charts import Chart, ReferenceLine, Series, figure
from hotbed.report.formats import decimal, html_page, section, table, text
from hotbed.run.files import write_text
from hotbed.tune.study import TunedTrial, best_of

_MOST_CURVES = 6  # one colour each


def write_tune_page(path: Path, name: str, trials: list[TunedTrial]) -> None:
    """Write the page; the first trial is that of the defaults."""
    best, first = best_of(trials), next((one for one in trials if one.number == 0), None)
    heading = f'<header><p class="kicker">hotbed tune</p><h1>{text(name, 120)}</h1></header>'
    body = heading + section("result", "Result", _result(best, first), _figures(trials, first), _table(trials, best))
    write_text(path, html_page(f"{name}: {len(trials)} trials", "", body))


def _result(best: TunedTrial | None, first: TunedTrial | None) -> str:
    if best is None or best.valid_auc is None:
        return "<p>No trial has come to its end.</p>"
    gain = ""
    if first is not None and first.valid_auc is not None:
        gain = f" Defaults reach {decimal(first.valid_auc)}, {best.valid_auc - first.valid_auc:.4f} less."
    values = ", ".join(f"{text(path)} = {text(str(value))}" for path, value in best.values.items())
    test = "" if best.test_auc is None else f" Its test AUC is {decimal(best.test_auc)}; trials are not chosen by it."
    return f"<p>Best valid AUC {decimal(best.valid_auc)}, in trial {best.number}: {values}.{gain}{test}</p>"


def _figures(trials: list[TunedTrial], first: TunedTrial | None) -> str:
    done = [one for one in trials if one.valid_auc is not None]
    if not done:
        return ""
    best_so_far, points = 0.0, []
    for one in done:
        if one.state == "complete":
            best_so_far = max(best_so_far, one.valid_auc or 0.0)
        points.append((float(one.number), best_so_far or float("nan")))
    marks = (ReferenceLine(first.valid_auc, "defaults"),) if first is not None and first.valid_auc is not None else ()
    by_trial = Chart(
        "tune-trials",
        "Valid AUC by trial",
        "Every trial with its best evaluation, and the best of all finished trials so far. A pruned trial ended early.",
        "trial",
        "valid AUC",
        (
            Series("trial", [(float(one.number), one.valid_auc or 0.0) for one in done], 1),
            Series("best so far", points, 2),
        ),
        y_marks=marks,
    )
    top = sorted((one for one in done if len(one.evaluations) > 1), key=lambda one: -(one.valid_auc or 0.0))[
        :_MOST_CURVES
    ]
    figures = [figure(by_trial)]
    if top:
        curves = tuple(
            Series(f"trial {one.number}", list(enumerate(map(float, one.evaluations), 1)), 1 + k)
            for k, one in enumerate(top)
        )
        about = f"The evaluations of the {len(top)} best trials."
        figures.append(figure(Chart("tune-curves", "Best trials", about, "evaluation", "valid AUC", curves)))
    return f'<div class="figures">{"".join(figures)}</div>'


def _table(trials: list[TunedTrial], best: TunedTrial | None) -> str:
    paths = list(dict.fromkeys(path for one in trials for path in one.values))
    rows = [
        [
            f"{one.number}{' (best)' if best is not None and one.number == best.number else ''}",
            one.state,
            decimal(one.valid_auc) if one.valid_auc is not None else "",
            decimal(one.test_auc) if one.test_auc is not None else "",
            f"{one.steps:,}",
            f"{one.seconds:.0f}",
            *(text(str(one.values.get(path, ""))) for path in paths),
        ]
        for one in sorted(trials, key=lambda one: -(one.valid_auc or 0.0))
    ]
    head = ["trial", "state", "valid AUC", "test AUC", "steps", "seconds", *map(text, paths)]
    return table("All trials, best first", head, rows)
