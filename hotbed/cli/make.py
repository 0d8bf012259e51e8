"""`hotbed data make`: make a click log up, as a dataset directory, as raw text, or both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotbed.cli.bar import progress_bar
from hotbed.cli.console import out
from hotbed.errors import ConfigError

if TYPE_CHECKING:
    from hotbed.data.synthetic import ClickLog

MOST_THREADS = 8


def make_command(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME[:ROWS]", help="criteo-like, criteo-1tb-like, criteo-1tb-bags-like, avazu-like."),
    ],
    rows: Annotated[
        int | None, typer.Option(help="Rows of the train split; valid and test get a tenth each. Left out: 2,000,000.")
    ] = None,
    days: Annotated[int | None, typer.Option(help="Let the rows span so many days, with a file for each day.")] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The dataset directory to write.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", "--tsv", metavar="FILE", help="Write the rows as raw text; with --days, to this folder."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another log.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset.")] = False,
) -> None:
    """Make a click log up: as a dataset directory, as raw text, or both.

    hotbed data make criteo-like:8_000_000 --out clicks

    hotbed data make avazu-like --days 10 --text raw

    The same name, seed and rows give the same log each time, any part of it. Its best possible AUC is known.
    A job that was killed goes on with the files it finished when the same command is given again.
    """
    from hotbed.data.embedded import read_rows
    from hotbed.data.synthetic import TRAIN_ROWS, find_shape, make_log, other_rows
    from hotbed.data.synthetic.text_files import check_text

    base, colon, rows_text = name.partition(":")
    shape = find_shape(base)
    if colon and rows is not None:
        raise ConfigError(f"{name} and --rows {rows} both give the number of rows. Leave one out.")
    train = read_rows(name, rows_text) if colon else TRAIN_ROWS if rows is None else rows
    if train < 1:
        raise ConfigError(f"--rows is {train}; at least 1 is needed.")
    if out_dir is None and text is None:
        raise ConfigError(
            "nothing to write: name a dataset directory with --out DIR, a text file with --text FILE, or both."
        )
    total = train + 2 * other_rows(train)
    log = make_log(shape, seed, total, days)
    if text is not None:
        check_text(shape)
    if out_dir is not None:
        _make_dataset(out_dir, log, train, days, overwrite)
    if text is not None:
        _make_text(text, log, total, by_day=days is not None)


def _make_dataset(out_dir: Path, log: ClickLog, train: int, days: int | None, overwrite: bool) -> None:
    from hotbed.data.synthetic import other_rows, write_dataset

    others = other_rows(train)
    with progress_bar(f"making {log.shape.name}", "rows") as progress:
        schema = write_dataset(
            out_dir,
            shape=log.shape,
            train=train,
            valid=others,
            test=others,
            seed=log.seed,
            days=days,
            threads=_threads(),
            overwrite=overwrite,
            progress=lambda done, total: progress("", done, total),
        )
    best = ", ".join(f"{split} {auc:.4f}" for split, auc in schema.best_auc.items())
    out().print(f"{out_dir}: {train:,} + {others:,} + {others:,} rows; best possible AUC: {best}", soft_wrap=True)


def _make_text(text: Path, log: ClickLog, total: int, by_day: bool) -> None:
    from hotbed.data.synthetic import write_days, write_text

    done = 0
    with progress_bar("writing text", "rows") as progress:

        def report(rows: int) -> None:
            nonlocal done
            done += rows
            progress("", done, total)

        if by_day:
            files = write_days(text, log, total, threads=_threads(), report=report)
        else:
            files = [text]
            write_text(text, log, 0, total, threads=_threads(), report=report)
    size = sum(file.stat().st_size for file in files)
    shown = f", {len(files)} days" if by_day else ""
    out().print(f"{text}: {total:,} rows{shown}, {size:,} bytes", soft_wrap=True)


def _threads() -> int:
    return min(os.cpu_count() or 1, MOST_THREADS)
