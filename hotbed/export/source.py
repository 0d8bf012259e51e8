"""A run or a checkpoint in, a model folder out: the source of an export.

RUN/model is a model folder already. The rows of a checkpoint are gathered first, from its chain and all ranks, with initial
values for rows that were never trained; in memory if they fit, else on disk below `scratch`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from hotbed.checkpoint.chain import Entry, chain_of
from hotbed.checkpoint.layouts import entries_of, run_of
from hotbed.checkpoint.warm import warm_start_from
from hotbed.data.dataset import Dataset
from hotbed.data.embedded import is_embedded, resolve
from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import ConfigError, DataError, RunError
from hotbed.files import path_of
from hotbed.host.memory import available_memory, parse_bytes
from hotbed.ids import Admit
from hotbed.models import rebuild_model
from hotbed.ops.init_rows import parse_init
from hotbed.ops.records import Precision, layout_of
from hotbed.optim import SGD
from hotbed.run.config import RunConfig
from hotbed.run.config_check import read_tree
from hotbed.run.export_format import is_export
from hotbed.run.folder import find_data, one_version
from hotbed.run.model_card import FORMAT_VERSION, card_of, no_model, read_card
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.spec import Table
from hotbed.train.model_folder import save_schema, save_weights
from hotbed.train.step import Learner

_LOOKED_UP = "8MiB"  # of rows in the cache, if ids are dynamic
_FILES = 3  # bytes of files for a byte of rows: stale ones, and what compaction copies


class ExportSource(NamedTuple):
    """The model to export."""

    model: Path  # a model folder
    card: dict[str, Any]  # its model.json
    about: dict[str, Any]  # kind, and the step of a checkpoint
    dataset: Dataset | None  # it was trained on, if available


def open_source(place: Path, scratch: Path, data: str | None = None, memory: str | None = None) -> ExportSource:
    """The model of a run or a checkpoint; `data` is the location of its dataset, `memory` the limit for rows."""
    if is_export(place):
        raise RunError(f"{place} is an export already; give the run it comes from, or one of its checkpoints.")
    if place.is_file():
        raise RunError(f"{place} is a file; give the folder of a run, such as runs/demo, or of one of its checkpoints.")
    model = place if (place / "tables.safetensors").is_file() else place / "model"
    is_run = (place / "config.json").is_file()
    refuse_memory(place, memory)
    if model.is_dir() or not place.is_dir():
        card = read_card(model)
        dataset = _dataset(data, card.get("dataset", ""), model.parent)
        _refuse_other(data, dataset, Schema.load(model))
        return ExportSource(model, card, {"kind": "model"}, dataset)
    if is_run:
        raise no_model(place)
    entries = entries_of(place)
    document = entries[0].manifest.document
    if not document.get("config") or "progress" not in document:
        raise RunError(
            f"{entries[0].folder} was not saved by `hotbed train`; it does not say which model it belongs to. "
            "hotbed.checkpoint.load and hotbed.interop.state_dict give the weights of tables in Python."
        )
    config = read_tree(document["config"])
    dataset = _dataset(data, config.data.path, run_of(entries[0].folder))
    folder = scratch / "model"
    folder.mkdir(parents=True)
    _copy_meaning(entries[0], dataset, folder)
    schema = Schema.load(folder)
    _refuse_other(data, dataset, schema)
    card = card_of(config, schema)
    learner = _gathered(entries, card, config, scratch, memory)
    save_weights(folder, learner)
    (folder / "model.json").write_text(json.dumps({"format_version": FORMAT_VERSION, **card}, indent=1) + "\n")
    return ExportSource(folder, card, {"kind": "checkpoint", "step": entries[0].manifest.step}, dataset)


def refuse_memory(place: Path, memory: str | None) -> None:
    """A ConfigError for --memory where there is no checkpoint, whose rows have to be gathered."""
    if memory is not None and any((one / "tables.safetensors").is_file() for one in (place, place / "model")):
        raise ConfigError(
            f"--memory {memory} is for the rows of a checkpoint; {place} has a model, whose rows are copied piece by piece."
        )


def copy_counts(model: Path, folder: Path) -> None:
    """Copy the id lists of a model folder; shutil.copytree has no errno, by which a full disk is known."""
    (folder / "counts").mkdir()
    for path in sorted((model / "counts").iterdir()):
        shutil.copyfile(path, folder / "counts" / path.name)


def has_feature(dataset: Dataset, feature: IdFeature) -> bool:
    """Whether the dataset and the model have the same ids of a feature."""
    theirs = next((one for one in dataset.schema.features if one.name == feature.name), None)
    wanted = (feature.mode, feature.source, feature.rows, feature.table)
    return theirs is not None and (theirs.mode, theirs.source, theirs.rows, theirs.table) == wanted


def _refuse_other(given: str | None, dataset: Dataset | None, schema: Schema) -> None:
    """Raise a RunError if the user names a dataset with other ids."""
    other = [one.name for one in schema.features if dataset is not None and not has_feature(dataset, one)]
    if given is not None and other:
        raise RunError(f"--data {given} is not the dataset of the run: it has other ids of {', '.join(other[:5])}.")


def _dataset(given: str | None, named: str, run: Path) -> Dataset | None:
    """The dataset at the given location; else where the run found it, if it is still there."""
    if given is not None:
        return resolve(given)
    if not named:
        return None
    try:
        found = find_data(named, run)
        return resolve(found) if is_embedded(found) or path_of(found).is_dir() else None
    except (DataError, ConfigError):
        return None


def _copy_meaning(entry: Entry, dataset: Dataset | None, folder: Path) -> None:
    """Copy schema.json and counts/ from the run's model, else from the dataset it was trained on."""
    model = run_of(entry.folder) / "model"
    if (model / "schema.json").is_file():
        with one_version(model):
            shutil.copyfile(model / "schema.json", folder / "schema.json")
            copy_counts(model, folder)
        return
    wanted = entry.manifest.document["progress"].get("data", "")
    if dataset is None or dataset.fingerprint != wanted:
        named = entry.manifest.document["config"]["data"]["path"]
        what = "is not there" if dataset is None else f"({dataset.path}) has changed since"
        raise RunError(
            f"the ids of {entry.folder} are defined by the dataset it was trained on, {named}, which {what}. "
            "Say where it is with --data DATASET."
        )
    save_schema(folder, dataset)


def _gathered(
    entries: Sequence[Entry], card: dict[str, Any], config: RunConfig, scratch: Path, memory: str | None
) -> Learner:
    """The rows and dense weights of a checkpoint, without optimizer state."""
    optimizer = SGD(lr=0.0)
    precision = cast(Precision, config.tables.precision)
    tables = {name: _table(one, config) for name, one in card["tables"].items()}
    (dim,) = {table.dim for table in tables.values()}
    num_rows = sum(_most_rows(entries, name, table, dim) for name, table in tables.items())
    needed = num_rows * layout_of(dim, optimizer, precision).width * 4
    room = parse_bytes(memory, "--memory") if memory else (available_memory(torch.device("cpu")) or 0) // 2
    storage: dict[str, Any] = {}
    if needed > room:
        storage = {"memory": max(room, 1 << 20), "ssd": f"{scratch / 'rows'}:{_FILES * needed + (64 << 20)}"}
    elif any(table.rows is None for table in tables.values()):
        storage = {"hbm": _LOOKED_UP}
    rows = EmbeddingTables(tables, optimizer, seed=config.train.seed, precision=precision, **storage)
    model = rebuild_model(card["model"])
    carried = warm_start_from(entries, rows, model=model)
    if carried.dense != len(model.state_dict()) or set(carried.rows) != set(tables):
        raise RunError(f"{entries[0].folder} does not fit its own settings: {'; '.join(carried.notes)}.")
    return Learner(rows, model, None, 0.0, torch.device("cpu"))


def _table(card: dict[str, Any], config: RunConfig) -> Table:
    shares = Admit(after=2) if card.get("shared") else None
    return Table(
        card["rows"],
        card["dim"],
        card["pooling"],
        hashing=card["hashing"],
        init=parse_init(config.tables.init),
        admit=shares,
    )


def _most_rows(entries: Sequence[Entry], name: str, table: Table, dim: int) -> int:
    """The rows of a table; for dynamic ids, an upper limit."""
    if table.rows is not None:
        return table.rows
    manifests = [one.manifest for entry in entries for one in chain_of(entry)]
    written = sum(manifest.rows.get(name, 0) for manifest in manifests)
    return written + max((sum(manifest.linked.values()) // (4 * dim) for manifest in manifests), default=0)
