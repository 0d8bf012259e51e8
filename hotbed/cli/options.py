"""Flags that several commands share, each declared once; a flag of one command alone stands with that command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotbed.host.memory import parse_share


def share(text: str) -> float:
    """The number of an option that takes a share."""
    try:
        return parse_share(text)
    except ValueError:
        raise typer.BadParameter(f"a share is a number above 0 and at most 1, or a percentage, not {text!r}") from None


_DEVICE = typer.Option(help="auto, cpu, cuda or cuda:N.")
_DATASET_OUT = typer.Option("--out", metavar="DIR", help="The dataset directory to write.")

Device = Annotated[str, _DEVICE]
RunDevice = Annotated[str | None, _DEVICE]  # None: as the settings of the run say
TrainData = Annotated[str | None, typer.Option(help="Dataset folder, or: criteo-like, criteo-like:ROWS, adult.")]
ModelName = Annotated[str | None, typer.Option(help="Model name; `hotbed models` lists them.")]
ScoredModel = Annotated[Path, typer.Argument(metavar="MODEL", help="A run, a checkpoint or an export.")]
ScoreBatchSize = Annotated[int, typer.Option(min=1, help="Samples at once; no effect on the result.")]
CacheShare = Annotated[
    float | None,
    typer.Option(
        parser=share,
        metavar="SHARE",
        help="Share of the rows on the device, e.g. 0.015 or 1.5%; the rest in host memory.",
    ),
]
CacheBytes = Annotated[str | None, typer.Option(help="The cache as bytes of device memory, e.g. 2GiB.")]
HostMemory = Annotated[str | None, typer.Option(help="Most host memory for rows behind the cache, e.g. 64GiB.")]
CachePolicy = Annotated[str | None, typer.Option(help="Which rows stay in the cache: oracle, lfu, lru or static.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples of a step, of all ranks together.")]
Dim = Annotated[int | None, typer.Option(min=1, help="Width of an embedding vector.")]
DatasetOut = Annotated[Path, _DATASET_OUT]
MaybeDatasetOut = Annotated[Path | None, _DATASET_OUT]
OverwriteDataset = Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset.")]
