"""The result of `prepare` in, lines about what to look at out: each names a column and the option that changes it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotbed.data.prepare.prepare import PrepareReport

_MANY_ROWS, _LONE = 1000, 0.9
_VALID_SHARE = "0.1"


def hints(report: PrepareReport) -> list[str]:
    """What went wrong first, then what may be wrong, then what could be better."""
    parts = (_leaks, _mixed, _guesses, _times, _lone_values, _joined, _splits, _unknown_row)
    return [line for part in parts for line in part(report)]


def _leaks(report: PrepareReport) -> Iterator[str]:
    for name, area in report.schema.notes.get("leaks", {}).items():
        yield (
            f"WARNING {name}: this column alone tells the label (AUC {area:.4f} on the train split). If it is filled in "
            f"after the event that is to be predicted, the model is worthless. --drop {_column(report, name)} leaves it out"
        )


def _mixed(report: PrepareReport) -> Iterator[str]:
    from hotbed.data.prepare.quarantine import mixed_hint

    for reason, rows in report.bad_rows.items():
        if hint := mixed_hint(reason):
            yield f"{rows:,} rows were left out: {hint}"


def _guesses(report: PrepareReport) -> Iterator[str]:
    for name, guess in report.guesses:
        quoted = shlex.quote(name)
        if guess.is_certain:
            yield (
                f"{name}: these integers are read as IDS, not as amounts ({guess.why}). --ids {quoted} confirms it; "
                f"--dense {quoted} reads them as amounts"
            )
        else:
            yield (
                f"{name}: these integers are read as amounts, but may be ids: {guess.why}. --ids {quoted} reads them as ids, "
                f"--dense {quoted} confirms amounts, --drop {quoted} leaves the column out"
            )


def _times(report: PrepareReport) -> Iterator[str]:
    for name, kind in report.times.items():
        time = name if kind == "plain" else f"{name}:%d/%m/%Y %H:%M"
        formatted = "" if kind == "plain" else ", with the format that its values have"
        yield (
            f"{name}: its values are times, but each was read as an id. --time {shlex.quote(time)} makes it the time "
            f"column{formatted}; --time-features hour,weekday then learns from it; --drop {shlex.quote(name)} leaves it out"
        )


def _lone_values(report: PrepareReport) -> Iterator[str]:
    """Columns that are useless because nearly every row has a different value."""
    train = report.schema.splits.get("train")
    if train is None or train.rows < _MANY_ROWS:
        return
    for feature in report.schema.features:
        if not feature.multi and feature.distinct >= _LONE * train.rows:
            name = shlex.quote(feature.name)
            yield (
                f"{feature.name}: nearly every row has a different value, so nothing can be learned from it. --drop {name} "
                f"leaves it out; --time {name} makes it the time column"
            )


def _joined(report: PrepareReport) -> Iterator[str]:
    for name, separator in report.joined.items():
        yield (
            f"{name}: its values look like several ids separated by {separator!r}, but each value was read as one id. "
            f"--multi {shlex.quote(f'{name}:{separator}')} splits them"
        )


def _splits(report: PrepareReport) -> Iterator[str]:
    splits = set(report.schema.splits)
    if splits == {"train"}:
        yield "all rows are in train; there is nothing to test on (--splits train=0.8,valid=0.1,test=0.1 reserves some)"
    elif "valid" not in splits:
        named = any("=" in str(source) for source in report.schema.notes.get("sources", ()))
        rule = f"valid={_VALID_SHARE}" if named else "train=0.8,valid=0.1,test=0.1"
        yield (
            "there is no valid split, so training cannot notice when it starts to learn by heart, and keeps the last weights "
            f"instead of the best. --splits {rule} takes one out of train"
        )


def _unknown_row(report: PrepareReport) -> Iterator[str]:
    listed = [one for one in report.schema.features if one.mode == "vocabulary" and not one.unlisted_lookups]
    if listed and report.schema.notes["min_count"] == 1:
        yield (
            "row 0 of a table is the row of values that do not occur in train, and nothing trains it, because every value of "
            "train has its own row. --min-count 2 trains it with the values that occur once; new values are then scored "
            "like those"
        )


def _column(report: PrepareReport, name: str) -> str:
    """The raw column of a feature or a number, as a shell takes it."""
    from hotbed.data.encode import raw_column

    feature = next((one for one in report.schema.features if one.name == name), None)
    return shlex.quote(name if feature is None else raw_column(feature))
