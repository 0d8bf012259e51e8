"""RUN/model/model.json: everything needed to rebuild a model and to score with it.

Settings and a schema -> the tables of a run and its card; a model folder -> its card, checked.

For dynamic ids the schema also determines which features have such a table and how many ids there will be. Dynamic tables take
ids as they are in the dataset: 64-bit ids of features with the mode raw or hash (which are then not hashed), or row numbers of
a vocabulary.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from hotbed.checkpoint.layouts import newest_in
from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import ConfigError, RunError
from hotbed.ids.rules import parse_admit, parse_expire
from hotbed.models import NAMED_MODELS, is_own, reads_sequences, vector_width
from hotbed.ops.init_rows import parse_init
from hotbed.run.config import RunConfig
from hotbed.run.folder import check_folder, is_training, recover_folder
from hotbed.tables.sizing.placement import Placement
from hotbed.tables.spec import Pooling, Table

_BAG = 16  # ids of a bag, as an estimate
FORMAT_VERSION = 2  # 1: no dynamic ids


def table_specs(config: RunConfig, schema: Schema) -> dict[str, Table]:
    """The tables of the id features, as wide as the model reads."""
    given = config.tables
    width = vector_width(config.model.name, config.model.dim)
    tables = {}
    for name, features in schema.tables.items():
        pooling = {one.name: _pooling(config, one) for one in features}
        first = features[0]
        table = Table(first.rows, width, pooling[first.name], hashing=first.mode == "hash", init=parse_init(given.init))
        if len(features) > 1:
            table = dataclasses.replace(table, pooling=pooling, features=tuple(pooling))
        if is_dynamic(given.dynamic, features):
            admit, expire = parse_admit(given.admit), parse_expire(given.expire)
            table = dataclasses.replace(table, rows=None, hashing=False, admit=admit, expire=expire)
        tables[name] = table
    return _placed(tables, config.parallel.placement)


def _placed(tables: dict[str, Table], places: str) -> dict[str, Table]:
    """With what ranks have of each, such as `row, ad=table`."""
    usual, *others = (one.strip() for one in places.split(","))
    named = {name.strip(): place for name, _, place in (one.partition("=") for one in others)}
    unknown = [name for name in named if name not in tables]
    if unknown:
        raise ConfigError(f"parallel.placement: no table {', '.join(unknown)}; there are {', '.join(tables)}")
    return {
        name: dataclasses.replace(one, placement=cast(Placement, named.get(name, usual)))
        for name, one in tables.items()
    }


def _pooling(config: RunConfig, feature: IdFeature) -> Pooling:
    """How the ids of one sample become vectors."""
    if feature.length and reads_sequences(config.model.name):
        return "none"
    return "mean" if feature.multi and config.tables.pooling == "mean" else "sum"


def card_of(config: RunConfig, schema: Schema) -> dict[str, Any]:
    """The content of model.json."""
    return {
        "model": model_settings(config, schema),
        "tables": {name: _table_card(table, config) for name, table in table_specs(config, schema).items()},
        "dataset": config.data.path,
    }


def model_settings(config: RunConfig, schema: Schema) -> dict[str, Any]:
    """The arguments of build_model; for a model that reads them also names, for a user's own the text of its file."""
    given = config.model
    sequences = {one.name: one.length for one in schema.features if one.length and reads_sequences(given.name)}
    settings = {
        "name": given.name,
        "num_features": len(schema.features) - len(sequences),
        "dim": given.dim,
        "num_dense": len(schema.dense),
        "options": given.options,
    }
    pooled = [one.name for one in schema.features if one.name not in sequences]
    if is_own(given.name):
        settings |= {"features": pooled, "dense": [one.name for one in schema.dense], "source": given.source}
    elif given.name in NAMED_MODELS:
        settings["features"] = pooled
    if schema.tasks and (is_own(given.name) or given.name in NAMED_MODELS):
        settings["tasks"] = [task.name for task in schema.labels]
    return settings | ({"sequences": sequences} if sequences else {})


def _table_card(table: Table, config: RunConfig) -> dict[str, Any]:
    """What scoring needs to know of a table; for dynamic ids also what ids without a row read.

    `pooling` is one word, or one for each of the features that share the table.
    """
    card: dict[str, Any] = {
        "rows": table.rows,
        "dim": table.dim,
        "pooling": table.pooling,
        "hashing": table.hashing,
    }
    if table.rows is None:
        tables = config.tables
        card |= {"init": tables.init, "seed": config.train.seed, "precision": tables.precision}
        card["shared"] = table.admit is not None
    return card


def read_card(folder: Path) -> dict[str, Any]:
    """model.json of a complete and undamaged model folder."""
    recover_folder(folder)
    if not folder.is_dir():
        if not folder.parent.exists():
            raise RunError(f"there is no {folder.parent}; give the folder of a run, such as runs/demo.")
        raise no_model(folder.parent)
    check_folder(folder)
    try:
        card: dict[str, Any] = json.loads((folder / "model.json").read_text())
        if card["format_version"] > FORMAT_VERSION:
            raise RunError(f"{folder} has format version {card['format_version']}; this hotbed reads {FORMAT_VERSION}.")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder} is damaged ({type(error).__name__}: {error}).") from error
    return card


def no_model(run: Path) -> RunError:
    """The error for a folder without a model, with what can be done meanwhile."""
    here = shlex.quote(str(run))
    saved = newest_in(run / "checkpoints") is not None
    meanwhile = (
        f" Meanwhile `hotbed evaluate {here}/checkpoints`, predict, serve and export take its newest checkpoint."
        if saved
        else ""
    )
    if is_training(run):
        return RunError(
            f"{run} is still training, and writes its model when it ends; `hotbed top {here}` shows how far it is.{meanwhile}"
        )
    if saved:
        return RunError(
            f"{run} holds no trained model. A run writes one when it ends; `hotbed train --resume {here}` ends it.{meanwhile}"
        )
    return RunError(f"{run} holds no trained model and no checkpoint; give the folder of a run, such as runs/demo.")


def count_ids(folder: Path, tables: list[str]) -> dict[str, int]:
    """How many ids of each of these tables have a row; reads nothing else."""
    try:
        with safe_open(folder / "tables.safetensors", framework="pt") as tensors:
            return {name: int(tensors.get_slice(f"{name}.id").get_shape()[0]) for name in tables}
    except (OSError, SafetensorError) as error:
        raise RunError(f"{folder} is damaged ({type(error).__name__}: {error}).") from error


def is_dynamic(dynamic: bool | list[str], features: Sequence[IdFeature]) -> bool:
    """Whether the table of these features has dynamic ids; `dynamic` is the setting of a run file, and names one of them."""
    return dynamic if isinstance(dynamic, bool) else any(one.name in dynamic for one in features)


def id_problems(dynamic: bool | list[str], data: str, schema: Schema) -> list[str]:
    """Features that do not exist, and features that need a dynamic table and have none."""
    names = [feature.name for feature in schema.features]
    problems = []
    for name in dynamic if isinstance(dynamic, list) else ():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            problems.append(f"tables.dynamic: {data} has no id feature {name!r}; {hint}")
    raw = [name for name, of_it in schema.tables.items() if of_it[0].mode == "raw" and not is_dynamic(dynamic, of_it)]
    if raw:
        problems.append(
            f"tables.dynamic: must be true, or a list with {', '.join(raw)}, for {data}: their ids are raw 64-bit numbers, "
            "and no rows were counted for them. Train with --dynamic, or prepare the data with --ids-mode vocabulary or hash"
        )
    return problems


def ids_of_train(schema: Schema) -> dict[str, int]:
    """By table, how many distinct ids the train split has, or can have if they were not counted."""
    train = schema.splits.get("train")
    samples = train.rows if train else 0
    return {name: _most_ids(features, samples) for name, features in schema.tables.items()}


def _most_ids(features: Sequence[IdFeature], samples: int) -> int:
    first = features[0]
    if first.mode in ("vocabulary", "direct"):
        return first.rows
    return first.distinct or samples * sum(_BAG if one.multi else 1 for one in features)


def rows_of_unseen(schema: Schema, batch_size: int) -> int:
    """Rows that one batch may need for ids that the train split does not have."""
    return batch_size * sum(_BAG if one.multi else 1 for one in schema.features)
