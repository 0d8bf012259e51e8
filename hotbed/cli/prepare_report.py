"""The result of `prepare` in; its tables and JSON out, and hints about what to look at.

Each hint names a column and the option that changes it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbed.cli.console import compiled_text, err, out, print_json

if TYPE_CHECKING:
    from hotbed.data.prepare.look import FirstLook
    from hotbed.data.prepare.prepare import PrepareReport
    from hotbed.data.schema import Schema
    from hotbed.host.compiling import CompileReport

_MANY_ROWS, _LONE = 1000, 0.9
_VALID_SHARE = "0.1"
_SOME_PAIRS = 0.001


def figures_of(report: PrepareReport) -> dict[str, Any]:
    """The report as JSON has it."""
    splits = {name: {"rows": one.rows, "positives": one.positives} for name, one in report.schema.splits.items()}
    features = [
        {"name": one.name, "rows": one.rows, "distinct": one.distinct, "multi": bool(one.multi), "table": one.table}
        for one in report.schema.features
    ]
    return {
        "dry_run": False,
        "out": str(report.path),
        "splits": splits,
        "features": features,
        "dense": [one.name for one in report.schema.dense],
        "bad_rows": dict(report.bad_rows),
        "left_out": report.left_out,
        "raw_bytes": report.raw_bytes,
        "seconds": report.seconds,
    }


def print_columns(found: FirstLook, out_dir: Path, as_json: bool) -> None:
    """How the columns would be read, by the first rows."""
    layout = found.layout
    dense, ids = [one.name for one in layout.dense], [one.name for one in layout.features]
    if as_json:
        features = [
            {"name": one.name, "rows": None, "distinct": None, "multi": None, "table": one.table}
            for one in layout.features
        ]
        print_json({"dry_run": True, "out": str(out_dir), "splits": {}, "features": features, "dense": dense})
        return
    said = [f"dry run: label {layout.label}", f"numbers: {', '.join(dense) or '-'}", f"ids: {', '.join(ids) or '-'}"]
    out().print("\n".join([*said, f"{out_dir} would be written. Nothing was written."]))


def print_report(report: PrepareReport, compiled: CompileReport) -> None:
    """Splits, features, bad rows, speed, hints and the next command."""
    schema, console = report.schema, out()
    _print_splits(report)
    if schema.features:
        _print_features(schema)
    _show_collisions(report)
    if schema.dense:
        numbers = ", ".join(f"{one.name} (log)" if one.transform == "log" else one.name for one in schema.dense)
        console.print(f"numbers: {numbers}")
        if schema.raw_format in ("csv", "parquet") and any(one.transform == "log" for one in schema.dense):
            console.print("log: whole numbers, read as amounts; --ids A,B reads those that are ids as ids")
    if schema.tasks:
        shown = ", ".join(f"{one.name} ({one.kind})" for one in schema.tasks)
        console.print(f"further labels: {shown}; `hotbed train --model mmoe` learns them too")
    _print_bad_rows(report)
    seconds = max(report.seconds - compiled.seconds, 1e-9)
    megabytes = report.raw_bytes / 1e6
    console.print(f"{megabytes:,.1f} MB in {seconds:.1f} s ({megabytes / seconds:,.1f} MB/s)")
    if compiled.kernels:
        console.print(compiled_text(compiled))
    for line in hints(report):
        err().print(line)
    dynamic = " --dynamic" if any(feature.mode == "raw" for feature in schema.features) else ""
    console.print(f"next: hotbed train --data {report.path}{dynamic}")


def _print_splits(report: PrepareReport) -> None:
    from rich.table import Table

    splits = Table("split", "rows", "positive", "files", title=str(report.path), title_justify="left")
    for name, split in report.schema.splits.items():
        share = f"{split.positives:,} ({split.positives / split.rows:.1%})"
        splits.add_row(name, f"{split.rows:,}", share, str(len(split.files)))
    out().print(splits)


def _print_features(schema: Schema) -> None:
    from rich.table import Table

    shared = any(feature.mode == "vocabulary" and feature.unlisted_lookups for feature in schema.features)
    features = Table(
        "feature", "distinct ids in train", "table rows", *(["lookups of row 0"] if shared else []), "made of"
    )
    for feature in schema.features:
        made = f"{feature.source}s, many per row" if feature.multi else feature.source
        if feature.length:
            made = f"{feature.source}s in order, the {feature.keep} {feature.length} of a row"
        shown = "dynamic" if feature.mode == "raw" else f"{feature.rows:,}"
        if feature.shares:
            shown = f"those of {feature.shares}"
        about = "about " if feature.counting == "sketch" else ""
        unknown = feature.unlisted_lookups / max(feature.lookups, 1) if feature.mode == "vocabulary" else 0.0
        unknown_shown = [f"{unknown:.1%}" if unknown else ""] if shared else []
        features.add_row(feature.name, f"{about}{feature.distinct:,}", shown, *unknown_shown, made)
    out().print(features)
    for feature in schema.features:
        if feature.counting == "sketch":
            out().print(
                f"{feature.name}: too many distinct ids for --memory; only ids that occur more than {feature.count_error:,} "
                "times are listed",
            )


def _print_bad_rows(report: PrepareReport) -> None:
    from rich.table import Table

    if report.bad_rows:
        bad = Table("bad rows", "reason", title="left out, see quarantine.jsonl", title_justify="left")
        for reason, rows in report.bad_rows.items():
            bad.add_row(f"{rows:,}", reason)
        out().print(bad)
    else:
        out().print("no bad rows")
    if report.left_out:
        out().print(f"{report.left_out:,} good rows are in no split (see --splits)")


def _show_collisions(report: PrepareReport) -> None:
    """How many ids are expected to share a row or an id by chance."""
    from hotbed.data.hash import expected_collisions, expected_sharing

    for feature in report.schema.features:
        if feature.mode == "hash" and feature.distinct > 1:
            sharing = expected_sharing(feature.distinct, feature.rows)
            out().print(
                f"{feature.name}: about {sharing:,.0f} of its {feature.distinct:,} ids share one of {feature.rows:,} rows with "
                "another id (--hash-rows)",
            )
        if feature.source == "string" and (pairs := expected_collisions(feature.distinct)) >= _SOME_PAIRS:
            out().print(
                f"{feature.name}: strings are hashed to 64-bit ids; of {feature.distinct:,} strings longer than 8 bytes, "
                f"about {pairs:.2g} pairs share an id",
            )


def hints(report: PrepareReport) -> list[str]:
    """What went wrong first, then what may be wrong, then what could be better."""
    parts = (
        _one_class,
        _leaks,
        _mixed,
        _guesses,
        _times,
        _numbers,
        _spaced,
        _lone_values,
        _joined,
        _splits,
        _unknown_row,
    )
    return [line for part in parts for line in part(report)]


def _one_class(report: PrepareReport) -> Iterator[str]:
    train = report.schema.splits.get("train")
    if train is not None and train.rows and train.positives in (0, train.rows):
        value = int(train.positives > 0)
        yield (
            f"WARNING {report.schema.label}: this label is {value} in every row of train, so nothing can be learned. --label "
            f"names another column, --positive {shlex.quote(f'{report.schema.label}>=2')} makes a label of larger numbers"
        )


def _leaks(report: PrepareReport) -> Iterator[str]:
    for name, area in report.schema.notes.get("leaks", {}).items():
        yield (
            f"WARNING {name}: this column alone gives the label away (AUC {area:.4f} on the train split). If it is filled in "
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
    from hotbed.data.times import is_ambiguous

    clock = report.schema.notes.get("time")
    amounts, leaks = {one.name for one in report.schema.dense}, report.schema.notes.get("leaks", {})
    for name, kind in report.times.items():
        if name in leaks:
            continue
        quoted = shlex.quote(name)
        read = "as an amount" if name in amounts else "as an id"
        if clock:
            later = "later times are beyond those of train" if name in amounts else "later times are unknown ids"
            yield (
                f"{name}: its values are times, but each was read {read}, and {later}. --drop {quoted} leaves it out; the time "
                f"column is {clock['column']}"
            )
            continue
        time = {"plain": name, "format": f"{name}:%d/%m/%Y %H:%M"}.get(kind, f"{name}:{kind}")
        formatted = ", with the format that its values have" if kind == "format" else ""
        if is_ambiguous(kind):
            formatted = ", if days come before months; else %m is before %d"
        yield (
            f"{name}: its values are times, but each was read {read}. --time {shlex.quote(time)} makes it the time "
            f"column{formatted}; --time-features hour,weekday then learns from it; --drop {quoted} leaves it out"
        )


def _numbers(report: PrepareReport) -> Iterator[str]:
    for name, odd in report.numbers.items():
        quoted = shlex.quote(name)
        yield (
            f"{name}: most of its values look like numbers, but not all are plain, such as {odd!r}, so each was read as an id. "
            f"Written as 1234.5, or empty where missing, they are amounts; --ids {quoted} confirms ids, --drop {quoted} leaves "
            "the column out"
        )


def _spaced(report: PrepareReport) -> Iterator[str]:
    for name, value in report.spaced.items():
        yield (
            f"{name}: spaces at the ends of its values are a part of the ids, such as {value!r}. The same value without "
            "them is another id, also in `hotbed predict` and `serve`. Remove them from the log if they mean nothing"
        )


def _lone_values(report: PrepareReport) -> Iterator[str]:
    """Columns that are useless because nearly every row has a different value."""
    train = report.schema.splits.get("train")
    if train is None or train.rows < _MANY_ROWS:
        return
    for feature in report.schema.features:
        if not feature.multi and feature.distinct >= _LONE * train.rows and feature.name not in report.numbers:
            yield (
                f"{feature.name}: nearly every row has a different value, so nothing can be learned from it. "
                f"--drop {shlex.quote(feature.name)} leaves it out"
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
            "there is no valid split, so training cannot notice when it starts to overfit, and keeps the last weights "
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
