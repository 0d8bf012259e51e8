"""`hotbed prepare`: raw logs to a dataset directory, with a progress bar while it runs and a table when it is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotbed.cli.console import (
    err,
    fail,
    is_log_json,
    live,
    print_json,
    print_progress,
    report_compiling,
)
from hotbed.cli.options import (
    MAX_BAD,
    AsJson,
    DryRun,
    MaxBad,
    Memory,
    Out,
    Overwrite,
    RayCluster,
    ReadCache,
    Workers,
    share,
    words,
)
from hotbed.cli.prepare_report import figures_of, print_columns, print_report
from hotbed.errors import ConfigError, ExitCode, HotbedError, exit_code_of

if TYPE_CHECKING:
    from hotbed.data.prepare.parse import PrepareProgress


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
            help="criteo, csv, parquet (also Arrow), libsvm or lists (user item item ...). Default: guessed from "
            "the first file."
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="The column to learn. Default: label, click, clicked, is_click, target or y."
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
    share: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=OTHER",
            help="Two columns with the same ids get one vocabulary and one table: 'history=item' lets history read the rows of "
            "item, as attention over a history needs. Repeatable.",
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
            "With files named train=a.csv test=b.csv, valid=0.1 takes a share of train. Default: all rows are train.",
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
    max_bad: MaxBad = None,
    delimiter: Annotated[
        str | None,
        typer.Option(metavar="CHAR", help="Between CSV values (tab: '\\t'). Default: found in the header."),
    ] = None,
    memory: Memory = None,
    workers: Workers = None,
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
    Files may be compressed (.gz .bz2 .xz .zst, a .zip of one file).
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
    try:
        columns: dict[str, Any] = {
            "format": format,
            "label": label,
            "positive": positive,
            "dense": words(dense),
            "ids": words(ids),
            "multi": dict(_multi(one) for one in multi or ()),
            "sequence": sequence or (),
            "share": dict(_shared(one) for one in share or ()),
            "task": task or (),
            "weight": weight,
            "drop": words(drop),
            "integers": integers,
            "time_column": time,
            "time_features": words(time_features),
            "max_bad": max_bad or MAX_BAD,
            "delimiter": "\t" if delimiter == "\\t" else delimiter,
        }
        rules: dict[str, Any] = {
            "split": splits,
            "keep_negatives": 1.0 if keep_negatives is None else keep_negatives,
            "min_count": min_count,
            "ids_mode": ids_mode,
            "hash_rows": hash_rows,
            "memory": memory or MEMORY,
            "workers": workers,
            "overwrite": overwrite,
            "ray": ray,
        }
        if dry_run:
            print_columns(look_at(raw, out=out_dir, **columns, **rules), out_dir, as_json)
            return
        _check_alone()
        with _progress_bar() as progress, report_compiling() as compiled:
            report = prepare(
                raw,
                out_dir,
                **columns,
                **rules,
                progress=progress,
                say=print_progress,
            )
    except HotbedError as error:
        raise typer.Exit(fail(f"{error}{_kept(out_dir)}", exit_code_of(error))) from None
    except KeyboardInterrupt:
        stopped = f"stopped; nothing was written to {out_dir}.{_kept(out_dir)}"
        raise typer.Exit(fail(stopped, ExitCode.INTERRUPTED)) from None
    if as_json:
        print_json(figures_of(report))
    else:
        print_report(report, compiled)


def _check_alone() -> None:
    """Processes of torchrun would all write the same dataset."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "torchrun started several processes, but prepare runs as one. On many machines: hotbed prepare --ray ..."
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


def _shared(text: str) -> tuple[str, str]:
    name, equals, owner = text.partition("=")
    if not equals or not name or not owner:
        raise ConfigError(f"--share {text!r} is not COLUMN=OTHER, such as 'history=item'.")
    return name, owner


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
