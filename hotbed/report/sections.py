"""A run -> its page: `render`. Each of the other functions is one section, in reading order."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hotbed.report.advice import advice, analysis
from hotbed.report.cache import cache
from hotbed.report.charts import figure
from hotbed.report.curves import breakdowns, calibration_chart, headline_split, learning_charts, skew_chart
from hotbed.report.formats import (
    MISSING,
    bar,
    compact,
    contents,
    count,
    decimal,
    duration,
    fold,
    html_page,
    long_table,
    note_list,
    percent,
    section,
    table,
    text,
)
from hotbed.report.hours import hours
from hotbed.report.ids import ids
from hotbed.report.memory import forecast, memory
from hotbed.report.points import usable
from hotbed.report.read import RunRecord, Skew, SplitScore
from hotbed.report.tiers import tiers
from hotbed.report.times import times
from hotbed.run.config import DENSE_RATES, FIELDS, ROW_RATES

CACHE_SHARE = 0.015  # of the rows; what the published GPU caches hold, and what data/dataset.py measures
MAX_SETTINGS = 500
MAX_CHANGED = 40


def render(run: RunRecord) -> str:
    """The whole page. The same run gives the same bytes."""
    parts = (
        learning(run),
        quality(run),
        advice(run),
        analysis(run),
        hours(run.hours),
        times(run),
        cache(run, CACHE_SHARE),
        tiers(run),
        ids(run),
        memory(run),
        forecast(run),
        data(run),
        settings_section(run),
        next_commands(run),
        versions(run),
    )
    shown = [part for part in parts if part]
    body = f"{headline(run)}{contents(shown)}\n" + "\n".join(shown)
    return html_page(f"{run.model} on {run.dataset}", '<a class="skip" href="#learning">Skip to the curves</a>\n', body)


def headline(run: RunRecord) -> str:
    """What was trained, how good it is, how long it took."""
    split = headline_split(run)
    return (
        f'<header><p class="kicker">hotbed run report</p><h1>{text(run.model, 80)} on {text(run.dataset, 120)}</h1>'
        f'<p class="lead">{_verdict(run, split)}</p>{_progress(run, split)}</header>{_notes(run)}{_tiles(run, split)}'
    )


def learning(run: RunRecord) -> str:
    """The curves over training."""
    if not run.train and not run.evals:
        return section("learning", "How it learned", '<p class="empty">The run has no measurements yet.</p>')
    charts = "".join(figure(chart) for chart in learning_charts(run))
    return section("learning", "How it learned", f'<div class="figures">{charts}</div>')


def quality(run: RunRecord) -> str:
    """All metrics of all splits, and the calibration plot."""
    if not run.final:
        return section(
            "quality",
            "How good it is",
            '<p class="empty">The run was not evaluated: it stopped before the first evaluation.</p>',
        )
    labels = "".join(f"<p>{text(note[:1].upper() + note[1:], 400)}.</p>" for note in run.label_notes if note)
    parts = f"<div>{_metric_table(run)}{_kept(run)}{labels}</div>"
    if run.calibration:
        parts += figure(calibration_chart(run))
    return section("quality", "How good it is", f'<div class="figures">{parts}</div>', *breakdowns(run))


def data(run: RunRecord) -> str:
    """Rows, ids and their skew, and the hit rate that a small cache could reach."""
    rows, finding = f"{_split_table(run)}{_bad_rows(run)}", _cache_sentence(run.total)
    parts = [f'<div class="figures"><div>{rows}</div><div>{finding}</div></div>'] if rows or finding else []
    if run.features:
        parts.append(f'<div class="figures">{figure(skew_chart(run, CACHE_SHARE))}{_feature_table(run.features)}</div>')
    elif run.splits:
        parts.append("<p>The dataset has no id features.</p>")
    if not parts:
        parts = ['<p class="empty">The run left no description of its dataset.</p>']
    return section("data", "The data", *parts)


def settings_section(run: RunRecord) -> str:
    """Every setting of the run; those that differ from the default are shown first."""
    settings = list(flatten(run.config))
    changed = [
        (path, value) for path, value in settings if path not in FIELDS or value not in _defaults(path, dict(settings))
    ]
    left_out = len(settings) - MAX_SETTINGS
    more = f"<p>{count(left_out)} more settings are in config.json.</p>" if left_out > 0 else ""
    intro = (
        f"<p>{count(len(settings))} settings, {count(len(changed))} of them not at their default." if settings else ""
    )
    hint = " Change one with <code>--set path=value</code>; <code>config.json</code> is also a valid run file.</p>"
    folded = fold("All settings", _settings_table("All settings", settings[:MAX_SETTINGS]) + more)
    shown = _settings_table("Settings that differ from the default", changed[:MAX_CHANGED]) if changed else ""
    modes = "".join(f"<p>parallel.mode=auto: {text(line, 600)}.</p>" for line in run.modes if line)
    return section("config", "Settings", intro + hint if settings else "", modes, shown, folded)


def next_commands(run: RunRecord) -> str:
    """The commands to use next."""
    place = shlex.quote(str(run.directory))
    settings = run.config.get("train")
    epochs = settings.get("epochs") if isinstance(settings, dict) else None
    longer = f" --epochs {epochs + 1}" if run.finished and isinstance(epochs, int) else ""
    commands = [
        (
            "Train longer" if run.finished else "Resume from the last checkpoint",
            f"hotbed train --resume {place}{longer}",
        ),
        ("Measure the model on a dataset", f"hotbed evaluate {place}"),
        ("Score new rows", f"hotbed predict {place} NEW-ROWS --out scores.csv"),
        ("Write this page again", f"hotbed report {place}"),
    ]
    items = "".join(
        f"<li><span>{what}</span><pre tabindex='0'><code>{text(line, 2000)}</code></pre></li>"
        for what, line in commands
    )
    return section("next", "What to do next", f'<ul class="commands">{items}</ul>')


def versions(run: RunRecord) -> str:
    """Versions and device, so that results can be reproduced."""
    rows = [[text(name, 60), text(version, 120)] for name, version in run.versions.items()]
    if run.device:
        rows.append(["device", text(run.device, 120)])
    if not rows:
        return section("versions", "Versions", '<p class="empty">The run recorded no versions.</p>')
    return section("versions", "Versions", table("Versions", ["what", "version"], rows))


def _verdict(run: RunRecord, split: str) -> str:
    if not split:
        return (
            "Not evaluated yet: the run stopped before its first evaluation." if run.train else "Nothing trained yet."
        )
    score, best = run.final[split].auc, run.best_auc.get(split, math.nan)
    when = "" if run.finished else " at its last evaluation"
    said = f"<strong>AUC {decimal(score)}</strong> on {text(split, 60)}{when}"
    if usable(best) and usable(score):
        above = f", {percent((score - 0.5) / (best - 0.5), 0)} of the way from a coin toss" if best > 0.5 else ""
        said += f"{above}. The best any model could reach here is {decimal(best)}; the gap is {decimal(best - score)}."
    else:
        said += "."
    return said


def _progress(run: RunRecord, split: str) -> str:
    """The headline AUC on a line from a coin toss to the best possible (or to 1)."""
    score = run.final[split].auc if split else math.nan
    if not usable(score):
        return ""
    best = run.best_auc.get(split, math.nan)
    known = usable(best) and 0.5 < best <= 1
    end = best if known else 1.0
    share = min(max((score - 0.5) / (end - 0.5), 0.0), 1.0)
    goal = f"{decimal(end)} best possible" if known else "1 perfect"
    return (
        f'<div class="progress" aria-hidden="true"><div class="track"><div style="width:{100 * share:.1f}%"></div></div>'
        f"<span>0.5 coin toss</span><span>{goal}</span></div>"
    )


def _notes(run: RunRecord) -> str:
    notes = [text(note) for note in run.notes]
    broken = [point for point in run.train if not usable(point.loss)]
    if broken:
        notes.append(
            f"The loss was not a finite number at {count(len(broken))} of {count(len(run.train))} points, first at step "
            f"{count(broken[0].step)}. A lower learning rate or gradient clipping usually helps."
        )
    if not run.finished:
        reason = f" ({text(run.stopped_because, 1000)})" if run.stopped_because else ""
        notes.insert(0, f'This run is not finished{reason}. <a href="#next">What to do next</a>')
    return note_list(notes)


def _tiles(run: RunRecord, split: str) -> str:
    score = run.final.get(split, SplitScore())
    gap = run.best_auc.get(split, math.nan) - score.auc
    rows, row_values, dense = (run.parameters.get(name, math.nan) for name in ("rows", "row_values", "dense"))
    stopped = f"stopped: {run.stopped_because}" if run.stopped_because and run.finished else ""
    tiles = [
        (
            f"{split or 'test'} AUC",
            decimal(score.auc),
            f"gap to the best possible {decimal(gap)}" if usable(gap) else "",
        ),
        ("log loss", decimal(score.log_loss), f"normalized entropy {decimal(score.normalized_entropy)}"),
        ("calibration", decimal(score.calibration, 3), "predicted over observed positives"),
        ("samples per second", compact(run.samples_per_s), f"{compact(run.samples)} samples" + _device(run)),
        ("time", duration(run.seconds), stopped or _train_share(run)),
        ("parameters", compact(row_values + dense), f"{compact(rows)} rows, {compact(dense)} dense weights"),
    ]
    items = "".join(
        f'<li><span class="what">{text(what, 80)}</span><span class="value">{text(value)}</span>'
        f'<span class="more">{text(more)}</span></li>'
        for what, value, more in tiles
        if value != MISSING
    )
    return f'<ul class="tiles">{items}</ul>' if items else ""


def _device(run: RunRecord) -> str:
    return f" on {run.device}" if run.device else ""


def _train_share(run: RunRecord) -> str:
    return f"{duration(run.train_seconds)} of it training" if usable(run.train_seconds) else ""


def _kept(run: RunRecord) -> str:
    if not usable(run.best_epoch) or not run.best_epoch < run.epochs:
        return ""
    return (
        f"<p>The weights of epoch {count(run.best_epoch)} of {count(run.epochs)} were kept: the best AUC on valid.</p>"
    )


def _metric_table(run: RunRecord) -> str:
    """Metrics down, splits across; each metric with its meaning."""
    lines: list[tuple[str, str, Callable[[str, SplitScore], str]]] = [
        ("AUC", "chance that a positive is scored above a negative", lambda _, score: decimal(score.auc)),
        ("best possible AUC", "of any model, known for synthetic data", lambda split, _: decimal(best(split))),
        ("PR-AUC", "mean precision; the share of positives by chance", lambda _, score: decimal(score.pr_auc)),
        ("log loss", "mean surprise in nats; lower is better", lambda _, score: decimal(score.log_loss)),
        ("normalized entropy", "log loss over that of the base rate", lambda _, s: decimal(s.normalized_entropy)),
        ("calibration", "predicted over observed positives", lambda _, score: decimal(score.calibration, 3)),
        ("samples", "in the split", lambda _, score: count(score.samples)),
        ("positives", "among them", lambda _, score: count(score.positives)),
    ]

    def best(split: str) -> float:
        return run.best_auc.get(split, math.nan)

    rows = []
    for name, meaning, write in lines:
        cells = [write(split, score) for split, score in run.final.items()]
        if any(cell != MISSING for cell in cells):
            rows.append([f"{name}<small>{meaning}</small>", *cells])
    return table("Metrics of each split", ["metric", *(text(split, 60) for split in run.final)], rows, kind="wide")


def _split_table(run: RunRecord) -> str:
    if not run.splits:
        return ""
    rows = [[text(split.name, 60), count(split.rows), percent(split.positive_rate, 2)] for split in run.splits]
    return table("Rows of each split", ["split", "rows", "positive"], rows)


def _bad_rows(run: RunRecord) -> str:
    if run.bad_rows is None:
        return ""
    total = sum(run.bad_rows.values())
    if not total:
        return "<p>No row of the raw data was rejected.</p>"
    rows_were = "1 row of the raw data was" if total == 1 else f"{count(total)} rows of the raw data were"
    sentence = f"<p>{rows_were} bad and moved to the dataset's <code>quarantine.jsonl</code>.</p>"
    reasons = [[text(reason, 200), count(rows)] for reason, rows in list(run.bad_rows.items())[:20]]
    return sentence + (table("Bad rows by reason", ["reason", "rows"], reasons) if len(reasons) > 1 else "")


def _cache_sentence(total: Skew | None) -> str:
    if total is None or not usable(total.top_share) or not usable(total.distinct):
        return ""
    held = math.ceil(CACHE_SHARE * total.distinct)
    return (
        f'<p class="finding">A cache of {percent(CACHE_SHARE)} of the rows, {count(held)} of {count(total.distinct)} ids, '
        f"filled with the most frequent ones could serve up to <strong>{percent(total.top_share)} of all lookups</strong>; "
        f"the other {percent(1 - total.top_share)} would have to come from slower memory.</p>"
    )


def _feature_table(features: tuple[Skew, ...]) -> str:
    largest = sorted(features, key=lambda f: -f.distinct if usable(f.distinct) else math.inf)
    rows = [[text(f.name, 60), count(f.distinct), count(f.rows), bar(f.top_share)] for f in largest]
    head = ["feature", "distinct ids", "table rows", f"lookups on the top {percent(CACHE_SHARE)}"]
    return f"<div>{long_table('Id features, most distinct ids first', head, rows, 'data.json')}</div>"


def _settings_table(caption: str, settings: list[tuple[str, Any]]) -> str:
    rows = []
    for path, value in settings:
        about = FIELDS[path].metadata.get("about", "") if path in FIELDS else ""
        name = text(path, 120).replace(".", ".<wbr>")
        rows.append([f"<code>{name}</code>", f"<code>{setting_text(value)}</code>", text(about)])
    return table(caption, ["setting", "value", "what it does"], rows, kind="settings")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every setting."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if path == "model.source.code":  # of a user's own model; too long for the page
            digest = hashlib.sha256(str(value).encode()).hexdigest()[:12]
            yield path, f"{len(str(value).splitlines())} lines, {digest}"
        elif isinstance(value, Mapping) and value and path.count(".") < 8:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def _defaults(path: str, settings: Mapping[str, Any]) -> list[Any]:
    """The default values of a setting: its default, or what 0 stands for."""
    made = FIELDS[path]
    if path == "data.eval_batch_size":
        return [made.default, settings.get("data.batch_size")]
    usual = {"tables.lr": ROW_RATES, "dense.lr": DENSE_RATES}.get(path, {})
    optimizer = str(settings.get(path.replace(".lr", ".optimizer")))
    default = made.default_factory() if callable(made.default_factory) else made.default
    return [default, *([usual[optimizer]] if optimizer in usual else [])]


def setting_text(value: Any) -> str:
    """A setting as in config.json."""
    return text(value if isinstance(value, str) else json.dumps(value), 300)
