"""Flags that several commands share, each declared once; a flag of a single command is declared with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotbed.host.memory import parse_share


def words(text: str) -> list[str]:
    """The values of an option that takes several, separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def share(text: str) -> float:
    """The value of an option that takes a share."""
    try:
        return parse_share(text)
    except ValueError:
        raise typer.BadParameter(f"a share is a number above 0 and at most 1, or a percentage, not {text!r}") from None


_DEVICE = typer.Option(help="auto, cpu, cuda or cuda:N.")
_SETS = typer.Option("--set", help="path=value, e.g. model.dim=32; may be given many times.")
_DATASET_OUT = typer.Option("--out", metavar="DIR", help="The dataset directory to write.")

Device = Annotated[str, _DEVICE]
RunDevice = Annotated[str | None, _DEVICE]  # None: as in the settings of the run
TrainData = Annotated[str | None, typer.Option(help="Dataset folder, or: criteo-like, criteo-like:ROWS, adult.")]
ReadCache = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help="Local disk for copies of what is read from a store (s3://, gs://, ...); 0: none. Left out: 10GiB.",
    ),
]
ModelName = Annotated[str | None, typer.Option(help="Model name; `hotbed models` lists them.")]
ScoredModel = Annotated[Path, typer.Argument(metavar="MODEL", help="A run, a checkpoint or an export.")]
ScoreBatchSize = Annotated[int, typer.Option(min=1, help="Samples per batch; no effect on the result.")]
CacheShare = Annotated[
    float | None,
    typer.Option(
        parser=share,
        metavar="SHARE",
        help="Share of the rows on the device, e.g. 0.015 or 1.5%; the others are in host memory.",
    ),
]
CacheBytes = Annotated[str | None, typer.Option(help="Size of the cache in bytes of device memory, e.g. 2GiB.")]
HostMemory = Annotated[str | None, typer.Option(help="Most host memory for rows below the cache, e.g. 64GiB.")]
Ssd = Annotated[
    str | None, typer.Option(help="Folder and bytes for rows that memory does not hold, e.g. /fast:500GiB.")
]
CachePolicy = Annotated[str | None, typer.Option(help="Which rows stay in the cache: oracle, lfu, lru or static.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples per step, of all ranks together.")]
Dim = Annotated[int | None, typer.Option(min=1, help="Width of an embedding vector.")]
RowOptimizer = Annotated[
    str | None,
    typer.Option(
        help="Of the rows: sgd, adagrad, rowwise_adagrad, adam or ftrl; of the dense weights: dense.optimizer."
    ),
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same machine: same bits.")]
Sets = Annotated[list[str], _SETS]
AsJson = Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")]
DatasetOut = Annotated[Path, _DATASET_OUT]
MaybeDatasetOut = Annotated[Path | None, _DATASET_OUT]
OverwriteDataset = Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset.")]
