"""Several runs -> one page: settings that differ, results, and charts with one curve per run; the first run is the base.

Runs may be of any kind, finished or not: a value that a run lacks is a dash in its column and no curve in a chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hotbed.report.charts import Chart, Series, Style, figure
from hotbed.report.curves import SEEN, SMOOTH_FROM, headline_split
from hotbed.report.formats import (
    MISSING,
    compact,
    contents,
    count,
    decimal,
    duration,
    html_page,
    note_list,
    percent,
    section,
    significant,
    size,
    table,
    text,
)
from hotbed.report.memory import NAMES, forecast_and_truth, given, shown
from hotbed.report.points import smooth, usable
from hotbed.report.read import RunRecord, TrainPoint
from hotbed.report.sections import flatten, setting_text
from hotbed.report.times import MILLI, WORDS, mean_parts, without_warmup

MOST_RUNS = 12
MOST_SETTINGS = 200
SAME = "same"
LIST_ITEM = (
    '<li class="c{color}"><svg viewBox="0 0 24 10" aria-hidden="true"><path class="curve" d="M1 5H23"/></svg>'
    "<span>{name}</span></li>"
)
COLORS = 6
CALM_FROM = 200  # points; longer curves of several runs would hide each other
CALM = f"Runs of more than {CALM_FROM} lines are smoothed; their own pages show every peak."


class Figure(NamedTuple):
    """One line of the table of results."""

    name: str
    about: str
    value: Callable[[RunRecord], float]
    write: Callable[[float], str]
    difference: Callable[[float, float], str]  # (base, other)


def compare(runs: Sequence[RunRecord]) -> str:
    """The whole page. The same runs give the same bytes."""
    named = [ComparedRun(name, run) for name, run in zip(names_of([run.directory for run in runs]), runs)]
    charts = "".join(figure(chart) for chart in comparison_charts(named))
    curves = section("curves", "How they learned", _switches(named), f'<div class="figures">{charts}</div>')
    parts = (
        _results(named),
        _settings(named),
        curves if charts else "",
        _forecasts(named),
        _steps(named),
        _folders(named),
    )
    title = f"{len(runs)} runs compared"
    heading = f'<header><p class="kicker">hotbed report</p><h1>{title}</h1><p class="lead">{_lead(named)}</p></header>'
    skip = '<a class="skip" href="#results">Skip to the results</a>\n'
    shown_parts = [part for part in parts if part]
    return html_page(title, skip, f"{heading}{_notes(named)}{contents(shown_parts)}\n" + "\n".join(shown_parts))


def names_of(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ; numbered if the paths are equal."""
    parts = [folder.absolute().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(one[-depth:]) for one in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{'/'.join(one[-1:])} ({k})" for k, one in enumerate(parts, start=1)]


def _lead(named: list[ComparedRun]) -> str:
    scored = [(one, run.final[split].auc) for one, run in named if (split := headline_split(run))]
    known = [(name, score) for name, score in scored if usable(score)]
    if not known:
        return "None of the runs was evaluated."
    name, best = max(known, key=lambda pair: pair[1])
    same = [one for one, score in known if score == best]
    if len(same) == len(known) > 1:
        which = "All runs" if len(same) == len(named) else f"The {len(same)} runs that were evaluated"
        return f"{which} have the same AUC, {decimal(best)}."
    if len(same) > 1:
        names = ", ".join(f"<strong>{text(one, 80)}</strong>" for one in same)
        return f"Highest AUC, shared by {len(same)} runs: {names}, {decimal(best)}."
    return f"Highest AUC: <strong>{text(name, 80)}</strong>, {decimal(best)}."


def _notes(named: list[ComparedRun]) -> str:
    notes = []
    for name, run in named:
        if not run.finished:
            why = f" ({text(run.stopped_because, 200)})" if run.stopped_because else ""
            notes.append(f"{text(name, 80)} is not finished{why}; its figures are from its last log lines.")
        notes += [f"{text(name, 80)}: {text(note)}" for note in run.notes]
    sets = {run.dataset for _, run in named}
    if len(sets) > 1:
        listed = ", ".join(text(one, 60) for one in sorted(sets))
        notes.append(f"The runs use different datasets ({listed}): their losses and AUCs cannot be compared.")
    return note_list(notes)


def _switches(named: list[ComparedRun]) -> str:
    items = "".join(LIST_ITEM.format(color=1 + k % 6, name=text(one.name, 60)) for k, one in enumerate(named))
    return f'<p>Switch a run on or off in all charts:</p><ul class="legend" data-switches>{items}</ul>'


def _results(named: list[ComparedRun]) -> str:
    rows = []
    for one in _figures(named):
        values = [one.value(run) for _, run in named]
        if not any(map(usable, values)):
            continue
        cells = []
        for k, value in enumerate(values):
            cell = one.write(value) if usable(value) else MISSING
            if k and usable(value) and usable(values[0]):
                cell += f"<small>{one.difference(values[0], value)}</small>"
            cells.append(cell)
        rows.append([f"{one.name}<small>{one.about}</small>", *cells])
    head = ["", *(text(name, 80) for name, _ in named)]
    return section(
        "results",
        "How they ended",
        table("Results, and the difference to the first run", head, rows, kind="wide versus"),
    )


def _figures(named: list[ComparedRun]) -> list[Figure]:
    splits = dict.fromkeys(split for _, run in named for split in run.final)
    found = [
        Figure(f"{text(split, 40)} {name}", about, _score(split, field), decimal, _apart)
        for split in sorted(splits, key=lambda one: one != "test")
        for name, field, about in (
            ("AUC", "auc", "higher is better"),
            ("log loss", "log_loss", "lower is better"),
            ("calibration", "calibration", "predicted over observed positives"),
        )
    ]
    return [
        *found,
        Figure("samples/s", "of training alone", lambda run: run.samples_per_s, compact, _times),
        Figure("time", "with evaluations and checkpoints", lambda run: run.seconds, duration, _times),
        Figure("samples", "trained", lambda run: run.samples, count, _times),
        Figure("lookups that hit", "of training", hit_rate, lambda share: percent(share, 2), _points),
        Figure("waited for rows", "share of the time of training", stall_share, lambda share: percent(share, 2), _points),
        Figure("rows", "of all tables", lambda run: run.parameters.get("rows", math.nan), count, _times),
        Figure("cache", "on the device, index included", lambda run: run.cache.get("device_bytes", math.nan), size, _times),
        Figure("memory budget", "for rows below the cache", lambda run: given(run, "memory"), size, _times),
        Figure("process", "memory at the end", _resident, size, _times),
        Figure("device memory", "peak", lambda run: forecast_and_truth(run)[1].get("peak_device_bytes", math.nan),
               size, _times),
    ]  # fmt: skip


def hit_rate(run: RunRecord) -> float:
    """The share of lookups that hit, over all of training."""
    return run.cache_mean(lambda cache: cache.lookup_hit_rate)


def stall_share(run: RunRecord) -> float:
    """The share of time spent waiting for rows, over all of training."""
    return run.cache_mean(lambda cache: cache.stall_share)


def _score(split: str, field: str) -> Callable[[RunRecord], float]:
    return lambda run: getattr(run.final[split], field) if split in run.final else math.nan


def _resident(run: RunRecord) -> float:
    return next((one.memory.resident_bytes for one in reversed(run.train) if one.memory), math.nan)


def _apart(base: float, other: float) -> str:
    return _signed(other - base, 4)


def _points(base: float, other: float) -> str:
    apart = _signed(100 * (other - base), 2)
    return apart if apart == SAME else f"{apart} points"


def _signed(difference: float, digits: int) -> str:
    """A difference below the last digit counts as none."""
    said = f"{difference:+.{digits}f}"
    return SAME if float(said) == 0 else said.replace("-", "\u2212")


def _times(base: float, other: float) -> str:
    if other == base:
        return SAME
    return f"{other / base:.2f} times" if base > 0 else ""


def _settings(named: list[ComparedRun]) -> str:
    """The settings that differ."""
    settings = [dict(flatten(run.config)) for _, run in named]
    paths = dict.fromkeys(path for one in settings for path in one)
    rows = []
    for path in paths:
        if any(path not in one or one[path] != settings[0].get(path) for one in settings):
            cells = [setting_text(one[path]) if path in one else MISSING for one in settings]
            rows.append(
                [f"<code>{text(path, 120).replace('.', '.<wbr>')}</code>", *(f"<code>{c}</code>" for c in cells)]
            )
    if not rows:
        return section("config", "Settings", "<p>All settings are the same.</p>")
    more = f"<p>{count(len(rows) - MOST_SETTINGS)} more differ.</p>" if len(rows) > MOST_SETTINGS else ""
    said = f"<p>{count(len(rows))} of {count(len(paths))} settings differ between the runs.</p>"
    head = ["setting", *(text(name, 80) for name, _ in named)]
    listed = table("Settings that differ", head, rows[:MOST_SETTINGS], kind="settings versus")
    return section("config", "Settings", said, listed, more)


def _forecasts(named: list[ComparedRun]) -> str:
    both = [forecast_and_truth(run) for _, run in named]
    if not any(predicted for predicted, _ in both):
        return ""
    rows = []
    for name, about in NAMES.items():
        cells = []
        for predicted, true in both:
            expected, measured = predicted.get(name, math.nan), true.get(name, math.nan)
            pair = f"{shown(name, expected)} / {shown(name, measured)}"
            cells.append(pair if usable(measured) or (usable(expected) and expected) else MISSING)
        if any(cell != MISSING for cell in cells):
            rows.append([about, *cells])
    head = ["", *(text(name, 80) for name, _ in named)]
    return section(
        "forecast",
        "Forecast and measurement",
        table("Forecast / measured", head, rows, kind="wide versus"),
    )


def _steps(named: list[ComparedRun]) -> str:
    means = []
    for _, run in named:
        points = without_warmup([point.times for point in run.train if point.times])
        means.append(mean_parts(points, lambda one: one.device) or mean_parts(points, lambda one: one.thread))
    if not any(means):
        return ""

    def cell(seconds: float) -> str:
        return significant(MILLI * seconds, 3)

    rows = [
        [f"{word}<small>{about}</small>", *(cell(getattr(mean, part)) if mean else MISSING for mean in means)]
        for part, (word, about) in WORDS.items()
    ]
    rows.append(["together", *(cell(sum(mean)) if mean else MISSING for mean in means)])
    head = ["ms per step", *(text(name, 80) for name, _ in named)]
    return section("times", "Where the time goes", table("A mean step, in ms", head, rows, kind="wide versus"))


def _folders(named: list[ComparedRun]) -> str:
    rows = [
        [
            text(name, 80),
            text(run.model, 60),
            text(run.dataset, 80),
            text(run.device, 60),
            f"<code>{text(run.directory)}</code>",
        ]
        for name, run in named
    ]
    head = ["run", "model", "data", "device", "folder"]
    return section("runs", "The runs", table("Folders", head, rows, kind="settings"))


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
