"""`hotbed evaluate`: a trained model on a split of a dataset."""

from __future__ import annotations

from pathlib import Path

import typer

from hotbed.cli.compiling import told_of_compiling
from hotbed.cli.console import out, waiting
from hotbed.cli.dataset import open_dataset
from hotbed.cli.results import result_table


def evaluate_command(
    run: Path = typer.Argument(..., help="Run folder with a trained model."),
    data: str | None = typer.Option(None, help="Dataset; that of the run if not given."),
    split: str = typer.Option("test", help="train, valid or test."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    batch_size: int = typer.Option(4096, min=1, help="Samples at once; no effect on the result."),
    cache: float | None = typer.Option(
        None, help="Share of the rows on the device, e.g. 0.015; the rest in host memory."
    ),
    hbm: str | None = typer.Option(None, help="The same as bytes of device memory, e.g. 2GiB."),
) -> None:
    """Measure a trained model: AUC, log loss, normalized entropy, calibration; exact, over every sample.

    [bold]For example:[/bold]

    hotbed evaluate runs/demo

    hotbed evaluate runs/demo --data adult --split valid
    """
    with told_of_compiling():
        with waiting("loading the model"):
            from hotbed.data.loader import Loader
            from hotbed.scoring import check_same_ids, load_learner
            from hotbed.train.evaluate import evaluate
            from hotbed.train.model_folder import read_card
            from hotbed.train.run_data import find_data_or_say

            folder = run / "model"
            card = read_card(folder)
            dataset = open_dataset(data or find_data_or_say(card["dataset"], run))
            check_same_ids(folder, dataset)
            learner = load_learner(folder, device, cache, hbm, batch_size)
        with waiting(f"evaluating the {split} split"):
            loader = Loader(dataset, split, batch_size=batch_size, pin_memory=learner.device.type == "cuda")
            found = evaluate(learner, loader)
            assert found is not None, "nothing asked to stop"
    metrics = found.metrics._asdict()
    best = dataset.schema.best_auc.get(split)
    if best is not None:
        metrics |= {"best_auc": best, "gap": best - found.metrics.auc}
    out().print(result_table(f"{card['model']['name']} on {data or card['dataset']}", {split: metrics}))
