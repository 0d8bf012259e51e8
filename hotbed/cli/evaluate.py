"""`hotbed evaluate`: a trained model on a split of a dataset; `hotbed predict`: its score of every sample."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from hotbed.cli import options as opt
from hotbed.cli.console import (
    err,
    out,
    print_calibration,
    print_json,
    print_more,
    report_compiling,
    result_table,
    waiting,
)
from hotbed.cli.options import MAX_BAD, words
from hotbed.cli.settings import open_dataset
from hotbed.errors import ConfigError

if TYPE_CHECKING:
    from hotbed.data.dataset import Dataset
    from hotbed.run.predictions import Scores


SCORE_BATCH = 4096


def evaluate_command(
    run: opt.ModelPlace,
    inputs: list[str] | None = typer.Argument(
        None, metavar="LABELLED...", help="Raw files with labels, instead of a dataset."
    ),
    data: opt.Data = None,
    split: opt.Split = None,
    group: str | None = typer.Option(
        None, "--group", metavar="FEATURE", help="Also the AUC within each value of an id feature, e.g. a user."
    ),
    slices: str | None = typer.Option(
        None, "--slice", metavar="A,B", help="Also all metrics for each of the values of id features, e.g. country."
    ),
    device: opt.Device = None,
    batch_size: opt.BatchSize = None,
    cache: opt.CacheShare = None,
    hbm: opt.CacheBytes = None,
    max_bad: opt.MaxBad = None,
    as_json: opt.AsJson = False,
) -> None:
    """Measure a trained model: AUC, PR-AUC, log loss, normalized entropy, calibration; exact, over every sample.

    Defaults: the dataset of the run, its test split (valid where there is no test), batches of 4,096, which do not affect
    the result.

    [bold]For example:[/bold]

    hotbed evaluate runs/demo

    hotbed evaluate runs/demo --data adult --split valid

    hotbed evaluate runs/demo --group user --slice country,device

    hotbed evaluate runs/mine new-day.csv

    hotbed evaluate runs/demo/checkpoints
    """
    device, batch_size = device or "auto", batch_size or SCORE_BATCH
    if inputs:
        if data is not None:
            raise ConfigError(
                f"--data {data} and raw files ({', '.join(inputs)}) are both data to measure on. Give one of them."
            )
        _refuse_for(True, {"--split": split, "--group": group, "--slice": slices})
        _evaluate_raw(run, inputs, device, ModelOptions(cache, hbm, batch_size), max_bad, as_json)
        return
    _refuse_for(False, {"--max-bad": max_bad})
    with report_compiling():
        with waiting("loading the model"):
            from hotbed.data.loader.loader import Loader
            from hotbed.run.folder import find_data_or_say, one_version
            from hotbed.run.remote_folder import local_copy
            from hotbed.train.evaluation import evaluate
            from hotbed.train.metrics import Breakdown
            from hotbed.train.model_folder import check_same_ids

            run = local_copy(run)
            with one_version(run):
                subject = _subject(run)
                dataset = open_dataset(data or find_data_or_say(subject.dataset, subject.run))
                model = open_model(run, None, device, ModelOptions(cache, hbm, batch_size))
                check_same_ids(model.folder, dataset)
        split = split or _held_out(dataset)
        with waiting(f"evaluating the {split} split"):
            loader = Loader(dataset, split, batch_size=batch_size, pin_memory=device != "cpu")
            found = evaluate(model.learner, loader, breakdown=Breakdown(group or "", tuple(words(slices or ""))))
            assert found is not None, "nothing asked to stop"
    metrics = found.metrics._asdict()
    best = dataset.schema.best_auc.get(split)
    if best is not None:
        metrics |= {"best_auc": best, "gap": best - found.metrics.auc}
    if as_json:
        more = {"more": found.more} if found.more else {}
        print_json({"model": subject.name, "data": data or subject.dataset, "split": split, "metrics": metrics, **more})
        return
    out().print(result_table(f"{subject.name} on {data or subject.dataset}", {split: metrics}))
    print_more(found.more)
    print_calibration({split: metrics}, base_rate=subject.base_rate)


def _refuse_for(raw: bool, options: Mapping[str, object]) -> None:
    """A ConfigError for options of the other kind of input: raw files, or a dataset."""
    given = [name for name, value in options.items() if value is not None]
    if given and raw:
        raise ConfigError(
            f"{', '.join(given)}: for a dataset, and raw files are given. `hotbed prepare` makes a dataset of them."
        )
    if given:
        raise ConfigError(f"{', '.join(given)}: for raw files. The rows of a dataset were read by `hotbed prepare`.")


def _evaluate_raw(
    run: Path, inputs: list[str], device: str, wanted: ModelOptions, max_bad: str | None, as_json: bool
) -> None:
    """Measure on raw files; rows without a label are left out."""
    _check_inputs(inputs)
    _check_files(inputs, f"--data {inputs[0]} measures on a dataset.")
    with report_compiling():
        with waiting("loading the model"):
            from hotbed.data.raw_reader import RawReader
            from hotbed.run.folder import one_version
            from hotbed.run.remote_folder import local_copy
            from hotbed.train.evaluation import evaluate_batches

            run = local_copy(run)
            with one_version(run):
                subject = _subject(run)
                model = open_model(run, None, device, wanted)
                reader = RawReader(
                    model.folder,
                    inputs,
                    batch_size=wanted.batch_size,
                    max_bad=max_bad or MAX_BAD,
                    rows_of=model.rows_of,
                )
        with waiting("scoring"):
            found = evaluate_batches(model.learner, reader, reader.schema.tasks)
    if found is None:
        raise ConfigError(
            f"no row of {', '.join(inputs)} has a label (column {reader.schema.label}), so there is nothing to compare scores "
            f"with. `hotbed predict` writes scores without labels."
        )
    metrics = found.metrics._asdict()
    if as_json:
        more = {"more": found.more} if found.more else {}
        print_json({"model": subject.name, "data": ", ".join(inputs), "split": "raw", "metrics": metrics, **more})
        return
    out().print(result_table(f"{subject.name} on {', '.join(Path(one).name for one in inputs)}", {"raw": metrics}))
    print_more(found.more)
    print_calibration({"raw": metrics}, base_rate=subject.base_rate)
    unlabelled = reader.quarantine.good_rows - found.metrics.samples
    if reader.quarantine.bad_rows or unlabelled:
        err(always=True).print(f"{reader.quarantine.bad_rows:,} rows could not be read, {unlabelled:,} have no label")


def _held_out(dataset: Dataset) -> str:
    """The split that is read if none is given."""
    return "valid" if "valid" in dataset.row_groups and "test" not in dataset.row_groups else "test"


def _is_same(one: Path, other: Path) -> bool:
    """Whether two local paths are one file."""
    from hotbed.files import is_remote

    return not is_remote(other) and other.exists() and one.exists() and other.samefile(one)


def _check_inputs(inputs: list[str]) -> None:
    from hotbed.files import path_of

    missing = [one for one in inputs if not path_of(one).exists()]
    if missing:
        raise ConfigError(
            f"there is no {', '.join(missing)}. Give raw files in the format of the training data, or a dataset."
        )


def _check_files(inputs: list[str], datasets: str) -> None:
    """A ConfigError unless all are files; `datasets` says how a dataset is named instead."""
    from hotbed.files import path_of

    for one in inputs:
        if path_of(one).is_dir():
            if (path_of(one) / "schema.json").exists():
                raise ConfigError(f"{one} is a dataset, where raw files are expected. {datasets}")
            raise ConfigError(
                f"{one} is a folder without a dataset (it has no schema.json). Name the raw files in it: {Path(one)}/*"
            )


class EvaluatedModel(NamedTuple):
    """The model that is evaluated."""

    name: str
    dataset: str  # it was trained on
    run: Path
    base_rate: bool  # training began at the share of positives


def _subject(place: Path) -> EvaluatedModel:
    """A run with its model, a checkpoint, or the newest of a folder of checkpoints."""
    from hotbed.checkpoint.layouts import entries_of, run_of
    from hotbed.errors import RunError
    from hotbed.models import shown_name
    from hotbed.run.folder import read_json
    from hotbed.run.model_card import read_card

    if place.is_dir() and not (place / "config.json").is_file() and not (place / "model").is_dir():
        with suppress(RunError):  # no checkpoint
            entry = entries_of(place)[0]
            if config := entry.manifest.document.get("config"):  # else it was not written by `hotbed train`
                name = f"{shown_name(config['model']['name'])} at step {entry.manifest.step:,}"
                return EvaluatedModel(name, config["data"]["path"], run_of(entry.folder), _base_rate(config))
    card = read_card(place / "model")
    config = {}
    with suppress(OSError, RunError):  # a model alone
        config = read_json(place / "config.json")
    return EvaluatedModel(shown_name(card["model"]["name"]), card["dataset"], place, _base_rate(config))


def _base_rate(config: Mapping[str, Any]) -> bool:
    train = config.get("train")
    return isinstance(train, Mapping) and bool(train.get("base_rate"))


def predict_command(
    run: opt.ModelPlace,
    inputs: list[str] = typer.Argument(..., metavar="INPUT...", help="Raw files, or one dataset."),
    scores: opt.Out = None,
    split: opt.Split = None,
    device: opt.Device = None,
    batch_size: opt.BatchSize = None,
    cache: opt.CacheShare = None,
    hbm: opt.CacheBytes = None,
    memory: opt.Memory = None,
    max_bad: opt.MaxBad = None,
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    as_json: opt.AsJson = False,
) -> None:
    """Score samples: one row each with its label, where there is one, and the predicted probability.

    Of a model of several labels the further ones are in the columns label_NAME and score_NAME.

    --out is a .parquet or .csv file. --memory leaves rows in their files and caches at most that much of them, e.g. 100MB.
    --split is for a dataset; left out: test, or valid where there is no test. Batches of 4,096, unless given, do not affect
    the result.

    Raw files are read as `hotbed prepare` read the training data; a model trained on text also reads Parquet and Arrow. Ids
    not seen in training count as unknown. Rows that cannot be read are left out; `file` and `line` name the scored ones.

    [bold]For example:[/bold]

    hotbed predict runs/demo criteo-like --split test --out scores.parquet

    hotbed predict runs/mine new.csv --out scores.csv

    hotbed predict runs/mine/checkpoints new.csv --memory 100MB --out scores.csv
    """
    from hotbed.data.embedded import is_embedded
    from hotbed.files import path_of

    device, batch_size = device or "auto", batch_size or SCORE_BATCH
    if scores is None:
        raise ConfigError("--out FILE is needed: where to write the scores, as .parquet or .csv.")
    scores = path_of(scores)
    if any(path_of(one) == scores or _is_same(Path(one), scores) for one in inputs):
        raise ConfigError(f"--out {scores} is one of the inputs and would be lost. Choose another file.")
    if scores.exists() and not overwrite:
        raise ConfigError(f"--out {scores} is already there. --overwrite replaces it, --out FILE writes elsewhere.")
    named = [one for one in inputs if not is_embedded(one)]
    _check_inputs(named)
    is_raw = len(inputs) > 1 or bool(named and not (path_of(named[0]) / "schema.json").exists())
    if is_raw:
        _check_files(named, "Give it alone.")
    _refuse_for(is_raw, {"--split": split} if is_raw else {"--max-bad": max_bad})
    with report_compiling():
        with waiting("loading the model"):
            from hotbed.data.loader.loader import Loader
            from hotbed.data.raw_reader import RawReader
            from hotbed.data.schema import Schema
            from hotbed.run.folder import one_version
            from hotbed.run.predictions import predict, raw_batches, split_batches
            from hotbed.run.remote_folder import local_copy
            from hotbed.train.model_folder import check_same_ids

            run = local_copy(run)
            reader = None
            with one_version(run):
                model = open_model(run, memory, device, ModelOptions(cache, hbm, batch_size))
                labels = Schema.load(model.folder).labels
                if not is_raw:
                    dataset = open_dataset(inputs[0])
                    check_same_ids(model.folder, dataset)
                    batches = split_batches(Loader(dataset, split or _held_out(dataset), batch_size=batch_size))
                else:
                    reader = RawReader(
                        model.folder, inputs, batch_size=batch_size, max_bad=max_bad or MAX_BAD, rows_of=model.rows_of
                    )
                    batches = raw_batches(reader)
        if dry_run:
            shown = ", ".join(inputs)
            if as_json:
                print_json({"dry_run": True, "out": str(scores), "scores": 0, "bad_rows": 0, "model": model.version})
            else:
                out().print(f"dry run: {shown} would be scored to {scores}. Nothing was written.")
            return
        with waiting("scoring"):
            count = predict(model.learner, batches, scores, labels)
    bad = 0 if reader is None else reader.quarantine.bad_rows
    if as_json:
        print_json({"dry_run": False, "out": str(scores), "scores": count, "bad_rows": bad, "model": model.version})
        return
    by = f", by the model {model.version}" if model.version else ""
    out().print(f"{count:,} scores in {scores}{by}")
    if bad:
        err(always=True).print(f"{bad:,} rows could not be read and have no score")


class ModelOptions(NamedTuple):
    """The storage of a model that is loaded completely."""

    cache: float | None
    hbm: str | None
    batch_size: int


class OpenModel(NamedTuple):
    """A model that scores."""

    learner: Scores
    folder: Path  # with schema.json and counts/
    rows_of: Any = None  # finds rows in vocabularies that are already loaded
    version: str = ""  # empty: the final model of the run


def open_model(place: Path, memory: str | None, device: str, wanted: ModelOptions) -> OpenModel:
    """Load the model of a run completely, unless `memory` is given; score everything else from its files."""
    from hotbed.scorer import DEFAULT_MEMORY, load
    from hotbed.train.model_folder import load_learner

    if memory is not None and (wanted.cache is not None or wanted.hbm is not None):
        raise ConfigError(
            "--memory leaves rows in their files; --cache and --hbm load all of them. Give only one of the two."
        )
    is_run = (place / "model").is_dir() or not place.is_dir() or (place / "model.old").is_dir()
    if memory is None and (is_run or wanted.cache is not None or wanted.hbm is not None):
        return OpenModel(load_learner(place / "model", device, *wanted), place / "model")
    scorer = load(place, memory or DEFAULT_MEMORY, device)
    return OpenModel(scorer.as_learner(), scorer.source.columns, scorer.live.encoder.rows_of, scorer.version)
