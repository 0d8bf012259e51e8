"""`hotbed evaluate`: a trained model on a split of a dataset."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import typer

from hotbed.cli.compiling import told_of_compiling
from hotbed.cli.console import out, waiting
from hotbed.cli.dataset import open_dataset
from hotbed.cli.predict import Wanted, open_model
from hotbed.cli.results import result_table
from hotbed.cli.settings import share


def evaluate_command(
    run: Path = typer.Argument(..., help="Run folder with a trained model, or a checkpoint."),
    data: str | None = typer.Option(None, help="Dataset; that of the run if not given."),
    split: str = typer.Option("test", help="train, valid or test."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    batch_size: int = typer.Option(4096, min=1, help="Samples at once; no effect on the result."),
    cache: float | None = typer.Option(
        None,
        parser=share,
        metavar="SHARE",
        help="Share of the rows on the device, e.g. 0.015; the rest in host memory.",
    ),
    hbm: str | None = typer.Option(None, help="The same as bytes of device memory, e.g. 2GiB."),
) -> None:
    """Measure a trained model: AUC, log loss, normalized entropy, calibration; exact, over every sample.

    [bold]For example:[/bold]

    hotbed evaluate runs/demo

    hotbed evaluate runs/demo --data adult --split valid

    hotbed evaluate runs/demo/checkpoints
    """
    with told_of_compiling():
        with waiting("loading the model"):
            from hotbed.data.loader.loader import Loader
            from hotbed.run.dataset import find_data_or_say
            from hotbed.train.evaluate import evaluate
            from hotbed.train.scoring import check_same_ids

            subject = _subject(run)
            dataset = open_dataset(data or find_data_or_say(subject.dataset, subject.run))
            model = open_model(run, None, device, Wanted(cache, hbm, batch_size))
            check_same_ids(model.folder, dataset)
        with waiting(f"evaluating the {split} split"):
            found = evaluate(model.learner, Loader(dataset, split, batch_size=batch_size, pin_memory=device != "cpu"))
            assert found is not None, "nothing asked to stop"
    metrics = found.metrics._asdict()
    best = dataset.schema.best_auc.get(split)
    if best is not None:
        metrics |= {"best_auc": best, "gap": best - found.metrics.auc}
    out().print(result_table(f"{subject.name} on {data or subject.dataset}", {split: metrics}))


class Subject(NamedTuple):
    """What is measured."""

    name: str
    dataset: str  # that it was trained on
    run: Path


def _subject(place: Path) -> Subject:
    """A run with its model, or one of its checkpoints, the newest of a folder of them."""
    from hotbed.checkpoint.layouts import entries_of, run_of
    from hotbed.errors import RunError
    from hotbed.run.model_card import read_card

    if place.is_dir() and not (place / "config.json").is_file() and not (place / "model").is_dir():
        with suppress(RunError):  # no checkpoint
            entry = entries_of(place)[0]
            if config := entry.manifest.document.get("config"):  # else it is not of `hotbed train`
                name = f"{config['model']['name']} at step {entry.manifest.step:,}"
                return Subject(name, config["data"]["path"], run_of(entry.folder))
    card = read_card(place / "model")
    return Subject(card["model"]["name"], card["dataset"], place)
