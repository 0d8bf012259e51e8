"""`hotbed data`: describe a dataset, list the known ones, fetch a public one, generate a synthetic one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hotbed.cli.console import err, out, print_json, progress_bar, table_of_numbers
from hotbed.cli.options import AsJson, DataPlace, DryRun, Out, Overwrite, Seed, local_only
from hotbed.cli.settings import open_dataset
from hotbed.errors import ConfigError

if TYPE_CHECKING:
    from hotbed.data.catalog import PublicSet
    from hotbed.data.synthetic import ClickLog

MOST_THREADS = 8
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)
MOST_FEATURES = 60  # lines of a table on a terminal; --json has all of them


@data_app.command("describe", no_args_is_help=True)
def describe_command(
    dataset: DataPlace,
    as_json: AsJson = False,
) -> None:
    """Show rows, positives, distinct ids and how unevenly lookups fall on them. --json adds the whole skew curves.

    [bold]For example:[/bold]

    hotbed data describe mydata
    """
    from hotbed.data.dataset import describe

    assert dataset is not None, "no arguments is help"
    opened = open_dataset(dataset)
    figures = describe(opened)
    if as_json:
        print_json(figures)
        return
    console = out()
    console.print(Text.assemble((dataset, "bold"), f"  {opened.path}"))
    console.print(_split_table(figures["splits"], opened.schema.best_auc))
    console.print(_feature_table(figures))
    console.print(
        f"{len(opened.schema.dense)} number columns, {len(opened.schema.features)} id features. "
        "Top 1.5 %: the share of lookups that the most frequent 1.5 % of the ids take.",
    )


@data_app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """List the embedded and the public datasets with their licences.

    [bold]For example:[/bold]

    hotbed data list
    """
    from hotbed.data.catalog import CATALOG
    from hotbed.data.embedded import EMBEDDED

    if as_json:
        facts = [(one.name, one.summary, one.licence, "embedded") for one in EMBEDDED]
        facts += [(one.name, one.summary, one.licence, "by hand" if one.by_hand else "download") for one in CATALOG]
        print_json({"datasets": [dict(zip(("name", "summary", "licence", "how"), one, strict=True)) for one in facts]})
        return
    table = Table("name", "what", "licence", "how", show_lines=True)
    for embedded in EMBEDDED:
        table.add_row(embedded.name, embedded.summary, embedded.licence, f"hotbed train --data {embedded.name}")
    for entry in CATALOG:
        how = "by hand: needs an account" if entry.by_hand else f"hotbed data get {entry.name}"
        table.add_row(entry.name, entry.summary, entry.licence, how)
    out().print(table)


@data_app.command("get", no_args_is_help=True)
def get_command(
    name: Annotated[str, typer.Argument(help="One of `hotbed data list`.")],
    out_dir: Out = None,
    day: Annotated[list[int] | None, typer.Option(help="For datasets published by day; may be repeated.")] = None,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="You have read and accept the licence.")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a public dataset from its publisher and verify it; an interrupted download is resumed.

    --out is the folder for the files; left out: ./NAME.

    [bold]For example:[/bold]

    hotbed data get movielens-1m --dry-run
    """
    from hotbed.data.catalog import choose_folders, find_public_set
    from hotbed.data.download import download, list_folder
    from hotbed.errors import DataError

    local_only(out=out_dir)
    entry = find_public_set(name)
    folders = choose_folders(entry, tuple(day or ()))
    console = err()
    facts = f": {entry.summary}\npage: {entry.page}\nlicence: {entry.licence}"
    console.print(Text.assemble((entry.name, "bold"), facts))
    if entry.by_hand:
        steps = "\n".join(f"  {number}. {step}" for number, step in enumerate((*entry.by_hand, *entry.then), 1))
        raise DataError(f"{entry.name} needs an account at its publisher. By hand:\n{steps}")
    target = out_dir or Path(entry.name)
    plans = [(target, file) for file in entry.files]
    if dry_run:
        named = [str(directory / file.name) for directory, file in plans]
        named += [str(target / folder.place / "*") for folder in folders]
        if as_json:
            print_json({"dry_run": True, "name": entry.name, "licence": entry.licence, "files": named})
        else:
            out().print(f"dry run: {', '.join(named)} would be fetched. Nothing was written.")
        return
    _accept(entry, accept_licence)
    for folder in folders:
        plans += [(target / folder.place, file) for file in list_folder(folder, entry.suffixes)]
    fetched = []
    with progress_bar("", "bytes") as progress:
        for directory, file in plans:
            path = download(file, directory, progress)
            fetched.append(str(path))
            checked = file.checksum.partition(":")[0] + " checked" if file.checksum else "no checksum is published"
            console.print(f"{path} ({path.stat().st_size:,} bytes, {checked})")
    if as_json:
        print_json({"dry_run": False, "name": entry.name, "licence": entry.licence, "files": fetched})
        return
    console.print("then, in that directory:", *(f"  {step}" for step in entry.then), sep="\n")


def _accept(entry: PublicSet, accepted: bool) -> None:
    if accepted:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            f"the licence of {entry.name} must be accepted: read it at {entry.page}, add --accept-licence."
        )
    if not typer.confirm("Do you accept the licence?", err=True):
        raise ConfigError(f"{entry.name} was not fetched, since its licence was not accepted.")


def _split_table(splits: dict[str, dict[str, Any]], best_auc: dict[str, float]) -> Table:
    headings = ("split", "rows", "positive", *(["best AUC"] if best_auc else []))
    table = table_of_numbers("splits", *headings, left=("split",))
    for name, split in splits.items():
        best = [f"{best_auc[name]:.4f}" if name in best_auc else ""] if best_auc else []
        table.add_row(name, f"{split['rows']:,}", _percent(split["positive_rate"]), *best)
    return table


def _feature_table(figures: dict[str, Any]) -> Table:
    headings = ("feature", "table rows", "distinct ids", "lookups", "top 1.5 %")
    table = table_of_numbers("ids of the train split", *headings, left=("feature",))
    features = figures["features"]
    for feature in [*features[:MOST_FEATURES], {**figures["total"], "name": "all together"}]:
        if feature["name"] == "all together":
            table.add_section()
        table.add_row(
            feature["name"],
            f"{feature['rows']:,}",
            f"{feature['distinct']:,}",
            f"{feature['lookups']:,}",
            _percent(feature["top_share"]),
        )
    if len(features) > MOST_FEATURES:
        table.caption = f"{len(features) - MOST_FEATURES} more features: --json shows them"
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


@data_app.command("make", no_args_is_help=True)
def make_command(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME[:ROWS]", help="criteo-like, criteo-1tb-like, criteo-1tb-bags-like, avazu-like."),
    ],
    rows: Annotated[
        int | None, typer.Option(help="Rows of the train split; valid and test have a tenth each. Default: 2,000,000.")
    ] = None,
    days: Annotated[
        int | None, typer.Option(help="Spread the rows over this many days, with a file for each day.")
    ] = None,
    out_dir: Out = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", "--tsv", metavar="FILE", help="Write the rows as raw text; with --days, to this folder."
        ),
    ] = None,
    seed: Seed = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Generate a synthetic click log: as a dataset folder (--out), as raw text (--text), or both.

    The same name, seed and number of rows always give the same log; another seed gives another one. Its best possible AUC
    is known. If the job is killed, the same command resumes it and keeps the finished files.

    [bold]For example:[/bold]

    hotbed data make criteo-like:20_000 --out clicks

    hotbed data make avazu-like:20_000 --days 10 --text raw
    """
    from hotbed.data.embedded import read_rows
    from hotbed.data.synthetic import TRAIN_ROWS, check_train_rows, find_shape, make_log, other_rows
    from hotbed.data.synthetic.text_files import check_text

    local_only(out=out_dir, text=text)
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
    if out_dir is not None:
        check_train_rows(shape, train)
    total = train + 2 * other_rows(train)
    log = make_log(shape, seed or 0, total, days)
    if text is not None:
        check_text(shape)
    made: dict[str, Any] = {
        "dry_run": dry_run,
        "out": None if out_dir is None else str(out_dir),
        "text": None if text is None else str(text),
        "rows": {"train": train, "valid": other_rows(train), "test": other_rows(train)},
        "best_auc": {},
    }
    if dry_run:
        where = " and ".join(str(one) for one in (out_dir, text) if one is not None)
        planned = f"dry run: {total:,} rows of {shape.name} would be written to {where}. Nothing was written."
        print_json(made) if as_json else out().print(planned)
        return
    said = []
    if out_dir is not None:
        made["best_auc"], line = _make_dataset(out_dir, log, train, days, overwrite)
        said.append(line)
    if text is not None:
        said.append(_make_text(text, log, total, by_day=days is not None))
    print_json(made) if as_json else out().print("\n".join(said))


def _make_dataset(
    out_dir: Path, log: ClickLog, train: int, days: int | None, overwrite: bool
) -> tuple[dict[str, float], str]:
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
    line = f"{out_dir}: {train:,} + {others:,} + {others:,} rows; best possible AUC: {best}"
    return dict(schema.best_auc), line


def _make_text(text: Path, log: ClickLog, total: int, by_day: bool) -> str:
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
    return f"{text}: {total:,} rows{shown}, {size:,} bytes"


def _threads() -> int:
    return min(os.cpu_count() or 1, MOST_THREADS)
