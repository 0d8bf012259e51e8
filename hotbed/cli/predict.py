"""`hotbed predict`: scores for a dataset or for raw files."""

from __future__ import annotations

from pathlib import Path

import typer

from hotbed.cli.console import err, out
from hotbed.cli.dataset import open_dataset
from hotbed.errors import ConfigError


def predict_command(
    run: Path = typer.Argument(..., help="Run folder with a trained model."),
    inputs: list[str] = typer.Argument(..., metavar="INPUT...", help="Raw files, or one dataset."),
    scores: Path = typer.Option(..., "--out", help="Scores as .parquet or .csv."),
    split: str = typer.Option("test", help="Which split, when INPUT is a dataset."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    batch_size: int = typer.Option(4096, min=1, help="Samples at once; no effect on the result."),
    cache: float | None = typer.Option(
        None, help="Share of the rows on the device, e.g. 0.015; the rest in host memory."
    ),
    hbm: str | None = typer.Option(None, help="The same as bytes of device memory, e.g. 2GiB."),
    max_bad: str = typer.Option("1%", help="Stop when more raw rows than this cannot be read: a number or a share."),
) -> None:
    """Score samples: one row each with its label, where there is one, and the predicted probability.

    Raw files are read as `hotbed prepare` read the training data; ids never seen in training count as unknown. Rows that
    cannot be read are left out; `file` and `line` name those that were scored.

    [bold]For example:[/bold]

    hotbed predict runs/demo criteo-like --split test --out scores.parquet

    hotbed predict runs/mine new-day.tsv --out scores.csv
    """
    if any(scores.exists() and Path(one).exists() and scores.samefile(one) for one in inputs):
        raise ConfigError(f"--out {scores} is one of the inputs and would be lost. Choose another file.")
    with err().status("loading the model"):
        from hotbed.data.encode import RawReader
        from hotbed.data.loader import Loader
        from hotbed.scoring import check_same_ids, load_learner
        from hotbed.train.predict import predict, raw_batches, split_batches

        folder = run / "model"
        learner = load_learner(folder, device, cache, hbm, batch_size)
        reader = None
        if len(inputs) == 1 and not Path(inputs[0]).is_file():
            dataset = open_dataset(inputs[0])
            check_same_ids(folder, dataset)
            batches = split_batches(Loader(dataset, split, batch_size=batch_size))
        else:
            reader = RawReader(folder, inputs, batch_size=batch_size, max_bad=max_bad)
            batches = raw_batches(reader)
    with err().status("scoring"):
        count = predict(learner, batches, scores)
    out().print(f"{count:,} scores in {scores}", soft_wrap=True)
    if reader is not None and reader.quarantine.bad_rows:
        err().print(f"{reader.quarantine.bad_rows:,} rows could not be read and have no score")
