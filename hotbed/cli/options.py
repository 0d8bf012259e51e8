"""The options and arguments of all commands: one declaration for each name, so that a name means one thing everywhere.

A command takes these types for its parameters and says in its docstring what it does when an option is left out.
Commands that compare values (simulate, bench) take the same values, separated by commas, and say so: `COMPARED`.

Where the metavar is the name in capitals, the option is named as well: typer 0.27 would make it `--DEVICE`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotbed.host.memory import parse_share

COMPARED = " Several, separated by commas, are compared."


def words(text: str) -> list[str]:
    """The values of an option that takes several, separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def share(text: str) -> float:
    """The value of an option that takes a share."""
    try:
        found = parse_share(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        percent = f"; {found:g} % is written {found:g}% or {found / 100:g}" if 1 < found <= 100 else ""
        raise typer.BadParameter(
            f"a share is a number above 0 and at most 1, such as 0.015, or a percentage, such as 1.5%, not {text!r}{percent}"
        )
    return found


def cache_share(text: str) -> float:
    """The value of --cache. 0 means no cache; the settings refuse what is not a share, together with their other mistakes."""
    try:
        return parse_share(text)
    except ValueError:
        return share(text)


def local_only(**places: Path | str | None) -> None:
    """A ConfigError for an option that needs a local path and names a store; by option, such as `trace`."""
    from hotbed.errors import ConfigError
    from hotbed.files.uri import read_uri

    for name, place in places.items():
        if place is not None and (uri := read_uri(str(place))) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {uri} is in an object store, and has to be on a local disk. Give a local path."
            )


_CACHE = "Share of the rows on the device, e.g. 0.015 or 1.5%; the others are in host memory."
_POLICY = "Which rows stay in the cache: oracle, lfu, lru or static."
_DIM = "Width of an embedding vector."
_OPTIMIZER = "Optimizer of the rows: sgd, adagrad, rowwise_adagrad, adam or ftrl."
_DATA = "A dataset folder, or one of `hotbed data list`: criteo-like, criteo-like:ROWS, adult."
_MODEL = "A run folder or a checkpoint; predict and serve also read an export."
_RUN = "A run folder, of a run that may still be training."
_RUN_FILE = "Settings as .yaml, .toml or .json, such as a run's config.json."

# what is read
Data = Annotated[str | None, typer.Option("--data", metavar="DATA", help=_DATA)]
DataPlace = Annotated[str | None, typer.Argument(metavar="DATA", help=_DATA)]
RunFile = Annotated[Path | None, typer.Argument(metavar="RUN_FILE", help=_RUN_FILE)]
ModelPlace = Annotated[Path, typer.Argument(metavar="MODEL", help=_MODEL)]
RunPlace = Annotated[Path, typer.Argument(metavar="RUN", help=_RUN)]
RunPlaces = Annotated[list[Path], typer.Argument(metavar="RUN...", help=_RUN)]
MaybeRunPlaces = Annotated[list[str] | None, typer.Argument(metavar="RUN...", help=_RUN, show_default=False)]
ReadCache = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help="Local disk for copies of what is read from a store (s3://, gs://, ...); 0: none. Default: 10GiB.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Threads of prepare (default: one per core, if --memory allows it), or processes of serve (default: 1).",
    ),
]
Checkpoints = Annotated[
    Path, typer.Argument(metavar="CHECKPOINTS", help="A run folder, a folder of checkpoints, or one checkpoint.")
]
Split = Annotated[str | None, typer.Option("--split", metavar="SPLIT", help="The split to read: train, valid or test.")]
MAX_BAD = "1%"
MaxBad = Annotated[
    str | None,
    typer.Option(
        metavar="N|N%", help="Stop when more rows than this cannot be read: a number or a share. Left out: 1%."
    ),
]

# the model and its settings
ModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Model name, of `hotbed models`, or my_model.py:MyModel.")
]
Device = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")]
BatchSize = Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples in a batch, of all ranks together.")]
Dim = Annotated[int | None, typer.Option(min=1, metavar="N", help=_DIM)]
Dims = Annotated[str | None, typer.Option(metavar="N,...", help=_DIM + COMPARED)]
RowOptimizer = Annotated[str | None, typer.Option(metavar="NAME", help=_OPTIMIZER)]
RowOptimizers = Annotated[str | None, typer.Option(metavar="NAME,...", help=_OPTIMIZER + COMPARED)]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Same seed, same machine: same bits.")]
RayCluster = Annotated[
    bool,
    typer.Option(
        "--ray",
        help="Use a Ray cluster: RAY_ADDRESS, one that `ray start` started here, or a new one. All machines must see the same "
        "files under the same paths.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="Number of ranks: processes that divide rows and samples among them."),
]
Steps = Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of steps.")]
Sets = Annotated[
    list[str],
    typer.Option("--set", metavar="PATH=VALUE", help="Any setting, e.g. model.dim=32; may be given many times."),
]

# where rows are kept
CacheShare = Annotated[float | None, typer.Option(parser=cache_share, metavar="SHARE", help=_CACHE)]
CacheShares = Annotated[str | None, typer.Option(metavar="SHARE,...", help=_CACHE + COMPARED)]
CacheBytes = Annotated[
    str | None, typer.Option(metavar="BYTES", help="Size of the cache in bytes of device memory, e.g. 2GiB.")
]
Memory = Annotated[str | None, typer.Option(metavar="BYTES", help="Maximum host memory to use, e.g. 64GiB.")]
Ssd = Annotated[
    str | None,
    typer.Option(
        metavar="DIR:BYTES", help="Folder and size limit for rows that do not fit in memory, e.g. /fast:500GiB."
    ),
]
CachePolicy = Annotated[str | None, typer.Option(metavar="NAME", help=_POLICY)]
CachePolicies = Annotated[str | None, typer.Option(metavar="NAME,...", help=_POLICY + COMPARED)]
Window = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Maximum number of batches that are planned together.")
]
LookAhead = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Batches whose ids are read ahead; 0: a plain loop.")
]

# what is written
Out = Annotated[
    Path | None, typer.Option("--out", metavar="PATH", help="Where to write: a folder or a file, as said above.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is already there.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and say what would be written, but write nothing.")
]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the result as a page, with the curve of every table.")
]
Curve = Annotated[
    bool | None, typer.Option(help="Plot miss ratios over the size of the cache; `plan` does so by default.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON; its schema: docs/json.md.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result and errors.")]
LogJson = Annotated[
    bool, typer.Option("--log-json", help="Progress, messages and errors on stderr as one JSON object per line.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more: all progress, and where an error came from.")]

# Names of version 0.1, by command; they still work.
RENAMED = {
    "bench": {"--batch": "--batch-size", "--dense": "--mlp", "--ids": "--id-kind", "--ssd": "--memory-share"},
    "export": {"--rows": "--row-format"},
    "plan": {"--world": "--ranks"},
    "prepare": {"--split": "--splits"},
}
