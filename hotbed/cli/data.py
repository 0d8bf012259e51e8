"""`hotbed data`: describe a dataset, list the known ones, fetch a public one, make a click log up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hotbed.cli.bar import progress_bar
from hotbed.cli.console import err, out
from hotbed.cli.make import make_command
from hotbed.errors import ConfigError

if TYPE_CHECKING:
    from hotbed.data.catalog import PublicSet

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)
MOST_FEATURES = 60  # lines of a table on a terminal; --json has them all


@data_app.command("describe", no_args_is_help=True)
def describe_command(
    dataset: Annotated[
        str, typer.Argument(help="A dataset directory, or a name of `hotbed data list`: criteo-like, criteo-like:ROWS.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON, with the whole skew curves.")] = False,
) -> None:
    """Show rows, positives, distinct ids and how unevenly look-ups fall on them."""
    from hotbed.data.describe import describe
    from hotbed.data.embedded import resolve

    with progress_bar("building the dataset, once", "rows") as progress:
        opened = resolve(dataset, progress=lambda done, total: progress("", done, total))
    figures = describe(opened)
    if as_json:
        out().print_json(data=figures)
        return
    console = out()
    console.print(Text.assemble((dataset, "bold"), f"  {opened.path}"), soft_wrap=True)
    console.print(_split_table(figures["splits"], opened.schema.best_auc))
    console.print(_feature_table(figures))
    console.print(
        f"{len(opened.schema.dense)} number columns, {len(opened.schema.features)} id features. "
        "Top 1.5 %: the share of look-ups that the most frequent 1.5 % of the ids take.",
        soft_wrap=True,
    )


@data_app.command("list")
def list_command() -> None:
    """List the embedded and the public datasets with their licences."""
    from hotbed.data.catalog import CATALOG
    from hotbed.data.embedded import EMBEDDED

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
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the files go. Left out: ./NAME.")
    ] = None,
    day: Annotated[list[int] | None, typer.Option(help="For sets that come by day; may be repeated.")] = None,
    accept_licence: Annotated[bool, typer.Option("--accept-licence", help="You have read and accept it.")] = False,
) -> None:
    """Fetch a public dataset from its publisher, resuming where an earlier try ended, and check it."""
    from hotbed.data.catalog import choose_folders, find_public_set
    from hotbed.data.download import download, list_folder
    from hotbed.errors import DataError

    entry = find_public_set(name)
    folders = choose_folders(entry, tuple(day or ()))
    console = err()
    facts = f": {entry.summary}\npage: {entry.page}\nlicence: {entry.licence}"
    console.print(Text.assemble((entry.name, "bold"), facts), soft_wrap=True)
    if entry.by_hand:
        steps = "\n".join(f"  {number}. {step}" for number, step in enumerate((*entry.by_hand, *entry.then), 1))
        raise DataError(f"{entry.name} can only be had with an account at its publisher. By hand:\n{steps}")
    _accept(entry, accept_licence)
    target = out_dir or Path(entry.name)
    plans = [(target, file) for file in entry.files]
    for folder in folders:
        plans += [(target / folder.place, file) for file in list_folder(folder, entry.suffixes)]
    with progress_bar("", "bytes") as progress:
        for directory, file in plans:
            path = download(file, directory, progress)
            checked = file.checksum.partition(":")[0] + " checked" if file.checksum else "no checksum is published"
            console.print(f"{path} ({path.stat().st_size:,} bytes, {checked})", soft_wrap=True)
    console.print("then, in that directory:", *(f"  {step}" for step in entry.then), sep="\n", soft_wrap=True)


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
    table = Table("split", title="splits", title_justify="left")
    for heading in ("rows", "positive", *(["best AUC"] if best_auc else [])):
        table.add_column(heading, justify="right")
    for name, split in splits.items():
        best = [f"{best_auc[name]:.4f}" if name in best_auc else ""] if best_auc else []
        table.add_row(name, f"{split['rows']:,}", _percent(split["positive_rate"]), *best)
    return table


def _feature_table(figures: dict[str, Any]) -> Table:
    table = Table("feature", title="ids of the train split", title_justify="left")
    for heading in ("table rows", "distinct ids", "look-ups", "top 1.5 %"):
        table.add_column(heading, justify="right")
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


data_app.command("make", no_args_is_help=True)(make_command)
