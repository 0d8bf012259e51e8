"""`hotbed prepare`: raw logs to a dataset directory, with a progress bar while it runs and a table when it is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotbed.cli.console import (
    compiled_text,
    err,
    fail,
    is_log_json,
    live,
    out,
    print_json,
    print_progress,
    report_compiling,
)
from hotbed.cli.options import AsJson, DryRun, MaxBad, Memory, Out, Overwrite, RayCluster, ReadCache, share, words
from hotbed.cli.prepare_hints import hints
from hotbed.errors import ConfigError, ExitCode, HotbedError, exit_code_of

if TYPE_CHECKING:
    from hotbed.data.prepare.parse import PrepareProgress
    from hotbed.data.prepare.prepare import FirstLook, PrepareReport
    from hotbed.host.compiling import CompileReport


def prepare_command(
    raw: Annotated[
        list[str],
        typer.Argument(
            metavar="RAW...",
            help="Raw files, folders of them (day=2026-11-16/ makes a column), patterns in quotes, Delta tables, or a folder "
            "written by Hugging Face save_to_disk; local or as URIs (s3://, gs://, abfs://, hdfs://). split=path sets the "
            "split (train=a.csv test=b.csv).",
        ),
    ],
    out_dir: Out = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="criteo, csv, parquet (also Arrow), libsvm or lists (user item item ...). Left out: guessed from "
            "the first file."
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="The column to learn. Left out: label, click, clicked, is_click, target or y."
        ),
    ] = None,
    positive: Annotated[
        str | None,
        typer.Option(
            metavar="VALUE",
            help="If the label has two words, the one that means 1: --positive '>50K'. If it is a number, a condition: "
            "--positive 'rating>=4'.",
        ),
    ] = None,
    dense: Annotated[
        str,
        typer.Option(
            metavar="A,B", help="Columns that are numbers. '*': all others. Default: columns that look like numbers."
        ),
    ] = "",
    ids: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Columns that are ids, even if they look like numbers. '*': all others. Default: text columns.",
        ),
    ] = "",
    multi: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN:SEP", help="A column with several ids per row, and their separator: 'tags:|'. Repeatable."
        ),
    ] = None,
    sequence: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN:SEP:N[:first]",
            help="A column with ids in order, such as a history, and how many of a row are kept: 'history:|:50' keeps the "
            "last 50, 'history:|:50:first' the first. A column of lists: 'history::50'. Repeatable.",
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN[:regression]",
            help="A further label that models of several tasks learn: 0 and 1, or numbers ('watched:regression'). Repeatable.",
        ),
    ] = None,
    weight: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="How much each row counts in training: numbers from 0.")
    ] = None,
    drop: Annotated[str, typer.Option(metavar="A,B", help="Columns to leave out (row numbers, leaks).")] = "",
    integers: Annotated[
        str,
        typer.Option(
            help="Integers become log (log-scaled numbers), bucket (ids of log-sized buckets) or both.",
        ),
    ] = "log",
    splits: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="train=0.8,valid=0.1,test=0.1 assigns rows at random, always in the same way; "
            "train=50000,test=10000 takes them in file order; days:valid=1,test=1 takes the last days of --time. "
            "With files named train=a.csv test=b.csv, valid=0.1 takes a share of train. Left out: all rows are train.",
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN[:UNIT]",
            help="The time column; rows must be sorted by it, over all files (the rows of a small file are sorted here). It is "
            "not used as a feature. UNIT of numbers: s (default), ms, us, ns, hour, day, yyyymmdd or yymmddhh. Text: 2014-10-21"
            " 5:30, or a format of strptime: 'seen:%d.%m.%Y %H:%M'.",
        ),
    ] = None,
    time_features: Annotated[
        str, typer.Option(metavar="A,B", help="Ids made of --time: hour, weekday or both, in UTC.")
    ] = "",
    keep_negatives: Annotated[
        float | None,
        typer.Option(
            parser=share,
            metavar="SHARE",
            help="Keep only this share of the rows of train whose label is 0, e.g. 0.1 of a log with few positives. "
            "Predicted probabilities are corrected for it; other splits keep all rows.",
        ),
    ] = None,
    min_count: Annotated[
        int, typer.Option(metavar="N", help="Ids seen fewer times in train share the row of unknown ids.")
    ] = 1,
    ids_mode: Annotated[
        str,
        typer.Option(
            help="vocabulary: a row for every id of train. hash: ids share N rows by the hashing trick. "
            "raw: 64-bit ids as they are, for `hotbed train --dynamic`.",
        ),
    ] = "vocabulary",
    hash_rows: Annotated[int | None, typer.Option(metavar="N", help="Rows of each table with --ids-mode hash.")] = None,
    max_bad: MaxBad = "1%",
    delimiter: Annotated[
        str | None,
        typer.Option(metavar="CHAR", help="Between CSV values (tab: '\\t'). Left out: found in the header."),
    ] = None,
    memory: Memory = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Worker threads. Left out: one per core, if --memory allows it."),
    ] = None,
    ray: RayCluster = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    read_cache: ReadCache = None,
) -> None:
    """Turn raw logs into a dataset folder (--out) that `hotbed train` reads.

    [bold]For example:[/bold]

    hotbed prepare clicks.csv --label click --out mydata --splits train=0.8,valid=0.1,test=0.1

    hotbed prepare train=clicks.csv test=new.csv --label click --ids '*' --drop request_id --out mine

    hotbed prepare day_0.tsv.gz --format criteo --out criteo --dry-run

    [bold]How it works:[/bold]

    Strings become 64-bit ids by a stable hash; an empty value has an id of its own.
    Rows that cannot be read go to DIR/quarantine.jsonl.
    Files may be compressed (.gz .bz2 .xz .zst).
    --memory is for the whole job; left out: 2GiB, which counts 14.9 million distinct ids per feature exactly, and allows
    more workers the larger it is.
    If a feature has more distinct ids than --memory can count, the frequent ones are kept; schema.json says how many.
    DIR appears only when the dataset is complete.
    If the job is killed, the same command resumes it.
    Many machines: --ray. The result is the same to the byte, and Ray repeats the tasks of machines that are lost.
    --memory is then of one task.
    """
    from hotbed.data.prepare.prepare import MEMORY, look_at, prepare
    from hotbed.files.settings import set_read_cache

    set_read_cache(read_cache)
    if out_dir is None:
        raise ConfigError("--out DIR is needed: the dataset folder to write.")
    if dry_run:
        _show_columns(
            look_at(
                raw,
                format=format,
                label=label,
                positive=positive,
                dense=words(dense),
                ids=words(ids),
                multi=dict(_multi(one) for one in multi or ()),
                sequence=sequence or (),
                task=task or (),
                weight=weight,
                drop=words(drop),
                integers=integers,
                time_column=time,
                time_features=words(time_features),
                max_bad=max_bad,
                delimiter="\t" if delimiter == "\\t" else delimiter,
            ),
            out_dir,
            as_json,
        )
        return
    try:
        _check_alone()
        with _progress_bar() as progress, report_compiling() as compiled:
            report = prepare(
                raw,
                out_dir,
                format=format,
                label=label,
                positive=positive,
                dense=words(dense),
                ids=words(ids),
                multi=dict(_multi(one) for one in multi or ()),
                sequence=sequence or (),
                task=task or (),
                weight=weight,
                drop=words(drop),
                integers=integers,
                split=splits,
                time_column=time,
                time_features=words(time_features),
                keep_negatives=1.0 if keep_negatives is None else keep_negatives,
                min_count=min_count,
                ids_mode=ids_mode,
                hash_rows=hash_rows,
                max_bad=max_bad,
                delimiter="\t" if delimiter == "\\t" else delimiter,
                memory=memory or MEMORY,
                workers=workers,
                overwrite=overwrite,
                ray=ray,
                progress=progress,
                say=print_progress,
            )
    except HotbedError as error:
        raise typer.Exit(fail(f"{error}{_kept(out_dir)}", exit_code_of(error))) from None
    except KeyboardInterrupt:
        stopped = f"stopped; nothing was written to {out_dir}.{_kept(out_dir)}"
        raise typer.Exit(fail(stopped, ExitCode.INTERRUPTED)) from None
    if as_json:
        print_json(_figures(report))
    else:
        _show(report, compiled)


def _figures(report: PrepareReport) -> dict[str, Any]:
    """The report as JSON has it."""
    splits = {name: {"rows": one.rows, "positives": one.positives} for name, one in report.schema.splits.items()}
    features = [
        {"name": one.name, "rows": one.rows, "distinct": one.distinct, "multi": bool(one.multi)}
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


def _show_columns(found: FirstLook, out_dir: Path, as_json: bool) -> None:
    """How the columns would be read, by the first rows."""
    layout = found.layout
    dense, ids = [one.name for one in layout.dense], [one.name for one in layout.features]
    if as_json:
        features = [{"name": name, "rows": None, "distinct": None, "multi": None} for name in ids]
        print_json({"dry_run": True, "out": str(out_dir), "splits": {}, "features": features, "dense": dense})
        return
    said = [f"dry run: label {layout.label}", f"numbers: {', '.join(dense) or '-'}", f"ids: {', '.join(ids) or '-'}"]
    out().print("\n".join([*said, f"{out_dir} would be written. Nothing was written."]), soft_wrap=True)


def _check_alone() -> None:
    """Processes of torchrun would all write the same dataset."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "torchrun started several processes, and prepare is one. For many machines: hotbed prepare --ray ..."
        )


def _kept(out_dir: Path) -> str:
    """A sentence about unfinished work that can be resumed, if there is any."""
    work = out_dir.parent / f".{out_dir.name}.partial"
    try:
        there = (work / "job.json").is_file()
    except (OSError, ValueError):  # not a valid file name
        there = False
    return f"\nWhat is finished is kept in {work}: the same command resumes it." if there else ""


def _multi(text: str) -> tuple[str, str]:
    name, colon, separator = text.rpartition(":")
    if not colon or not name or not separator:
        raise ConfigError(f"--multi {text!r} is not COLUMN:SEPARATOR, such as 'tags:|'.")
    return name, separator


@contextmanager
def _progress_bar() -> Iterator[Callable[[PrepareProgress], None]]:
    if is_log_json():
        from hotbed.cli.log_json import ProgressLines

        lines = ProgressLines()
        yield lambda progress: lines.report(*progress[:3], rows=progress.rows)
        return
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    share, seen = TextColumn("{task.percentage:3.0f}%"), TextColumn("{task.fields[seen]}")
    columns = (TextColumn("{task.description}"), BarColumn(), share, seen, TimeRemainingColumn())
    with Bar(*columns, console=err(), transient=True, disable=not err().is_terminal) as bar:
        tasks = {}

        def update(progress: PrepareProgress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bar.add_task(progress.stage, total=progress.total, seen="")
            seen = f"{progress.rows:,} rows" if progress.rows else ""
            bar.update(tasks[progress.stage], completed=progress.done, seen=seen)

        with live(bar.console):
            yield update


_SOME_PAIRS = 0.001


def _show_collisions(report: PrepareReport) -> None:
    """How many ids are expected to share a row or an id by chance."""
    from hotbed.data.hash import expected_collisions, expected_sharing

    for feature in report.schema.features:
        if feature.mode == "hash" and feature.distinct > 1:
            sharing = expected_sharing(feature.distinct, feature.rows)
            out().print(
                f"{feature.name}: about {sharing:,.0f} of its {feature.distinct:,} ids share one of {feature.rows:,} rows with "
                "another id (--hash-rows)",
                soft_wrap=True,
            )
        if feature.source == "string" and (pairs := expected_collisions(feature.distinct)) >= _SOME_PAIRS:
            out().print(
                f"{feature.name}: strings are hashed to 64-bit ids; of {feature.distinct:,} strings longer than 8 bytes, "
                f"about {pairs:.2g} pairs share an id",
                soft_wrap=True,
            )


def _show(report: PrepareReport, compiled: CompileReport) -> None:
    from rich.table import Table

    schema = report.schema
    console = out()
    splits = Table("split", "rows", "positive", "files", title=str(report.path), title_justify="left")
    for name, split in schema.splits.items():
        share = f"{split.positives:,} ({split.positives / split.rows:.1%})"
        splits.add_row(name, f"{split.rows:,}", share, str(len(split.files)))
    console.print(splits)
    shared = any(feature.mode == "vocabulary" and feature.unlisted_lookups for feature in schema.features)
    features = Table(
        "feature", "distinct ids in train", "table rows", *(["lookups of row 0"] if shared else []), "made of"
    )
    for feature in schema.features:
        made = f"{feature.source}s, many per row" if feature.multi else feature.source
        if feature.length:
            made = f"{feature.source}s in order, the {feature.keep} {feature.length} of a row"
        shown = "dynamic" if feature.mode == "raw" else f"{feature.rows:,}"
        about = "about " if feature.counting == "sketch" else ""
        unknown = feature.unlisted_lookups / max(feature.lookups, 1) if feature.mode == "vocabulary" else 0.0
        unknown_shown = [f"{unknown:.1%}" if unknown else ""] if shared else []
        features.add_row(feature.name, f"{about}{feature.distinct:,}", shown, *unknown_shown, made)
    if schema.features:
        console.print(features)
    for feature in schema.features:
        if feature.counting == "sketch":
            console.print(
                f"{feature.name}: too many distinct ids for --memory; only ids that occur more than {feature.count_error:,} "
                "times are listed",
                soft_wrap=True,
            )
    _show_collisions(report)
    if schema.dense:
        numbers = ", ".join(f"{one.name} (log)" if one.transform == "log" else one.name for one in schema.dense)
        console.print(f"numbers: {numbers}", soft_wrap=True)
        if schema.raw_format in ("csv", "parquet") and any(one.transform == "log" for one in schema.dense):
            console.print("(log) integers, read as quantities; name those that are ids with --ids A,B", soft_wrap=True)
    if schema.tasks:
        shown = ", ".join(f"{one.name} ({one.kind})" for one in schema.tasks)
        console.print(f"further labels: {shown}; `hotbed train --model mmoe` learns them too", soft_wrap=True)
    if report.bad_rows:
        bad = Table("bad rows", "reason", title="left out, see quarantine.jsonl", title_justify="left")
        for reason, rows in report.bad_rows.items():
            bad.add_row(f"{rows:,}", reason)
        console.print(bad)
    else:
        console.print("no bad rows")
    if report.left_out:
        console.print(f"{report.left_out:,} good rows are in no split (see --splits)")
    seconds = max(report.seconds - compiled.seconds, 1e-9)
    megabytes = report.raw_bytes / 1e6
    console.print(f"{megabytes:,.1f} MB in {seconds:.1f} s ({megabytes / seconds:,.1f} MB/s)")
    if compiled.kernels:
        console.print(compiled_text(compiled), soft_wrap=True)
    for line in hints(report):
        err().print(line, soft_wrap=True, highlight=False)
    dynamic = " --dynamic" if any(feature.mode == "raw" for feature in schema.features) else ""
    console.print(f"next: hotbed train --data {report.path}{dynamic}", soft_wrap=True)
