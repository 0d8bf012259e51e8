"""A model folder in, a learner that scores out; and whether the ids of a dataset mean to it what they meant in training.

Tables of dynamic ids are dynamic here, too: an id that training gave no row reads what it would have read there.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq

from hotbed.data.dataset import Dataset
from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import SchemaError
from hotbed.host.devices import pick_device
from hotbed.ids import Admit
from hotbed.models import build_model
from hotbed.ops.init_rows import Constant, parse_init
from hotbed.ops.records import Precision
from hotbed.optim import SGD
from hotbed.run.config import raise_problems
from hotbed.run.model_card import count_ids, read_card, rows_of_unseen
from hotbed.sizing.budget import Budgets
from hotbed.sizing.fit import amounts_of, budgets_of, table_problems
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.spec import Table
from hotbed.train.model_folder import load_weights
from hotbed.train.step import Learner


def load_learner(
    folder: Path, device: str = "auto", cache: float | None = None, hbm: str | None = None, batch_size: int = 4096
) -> Learner:
    """A trained model from its folder, ready to score; with a cache it need not fit on the device."""
    card = read_card(folder)
    on = pick_device(device)
    tables = {name: _table(settings) for name, settings in card["tables"].items()}
    dynamic = [settings for settings in card["tables"].values() if settings["rows"] is None]
    precision = cast(Precision, dynamic[0]["precision"] if dynamic else "fp32")  # initial values are rounded to it
    known = count_ids(folder, [name for name, table in tables.items() if table.rows is None])
    optimizer = SGD(lr=0.0)  # stateless: a row takes no more than its weights
    amounts = amounts_of(tables, optimizer, precision, known)
    unseen = rows_of_unseen(Schema.load(folder), batch_size) if dynamic else 0
    budgets = budgets_of(Budgets(cache or None, hbm), amounts, unseen)
    raise_problems(table_problems(budgets, amounts, on))
    model = build_model(**card["model"]).to(on)
    rows = EmbeddingTables(
        tables,
        optimizer,
        seed=dynamic[0]["seed"] if dynamic else 0,
        device=on,
        cache=budgets.cache,
        hbm=budgets.hbm,
        precision=precision,
    )
    learner = Learner(rows, model, None, 0.0, on)
    load_weights(folder, learner.model, learner.tables)
    return learner


def _table(card: dict[str, Any]) -> Table:
    """Of a number of rows every weight is loaded; of dynamic ids, those that have a row."""
    common = {name: card[name] for name in ("rows", "dim", "pooling", "hashing")}
    if card["rows"] is not None:
        return Table(**common, init=Constant(0.0))
    shares = Admit(after=2) if card["shared"] else None  # nobody is admitted in scoring; ids without a row share one
    return Table(**common, init=parse_init(card["init"]), admit=shares)


def check_same_ids(model_folder: Path, dataset: Dataset) -> None:
    """A SchemaError unless the dataset's columns and ids mean to the model what they meant in training."""
    ours, theirs = Schema.load(model_folder), dataset.schema
    for what in ("dense", "features"):
        if [_meaning(one) for one in getattr(ours, what)] != [_meaning(one) for one in getattr(theirs, what)]:
            raise SchemaError(
                f"{dataset.path} has other {what} columns, or the same with other settings, than the model was trained on. "
                "Score the raw files instead: `hotbed predict RUN FILE...`."
            )
    for feature in ours.features:
        name = f"{feature.name}.parquet"
        if feature.mode == "vocabulary" and not _same_ids(
            model_folder / "counts" / name, dataset.path / "counts" / name
        ):
            raise SchemaError(
                f"{dataset.path} numbers the ids of {feature.name} otherwise than the dataset the model was trained on. "
                "Score the raw files instead: `hotbed predict RUN FILE...`."
            )


def _meaning(column: Any) -> Any:
    """A column without what another log of the same kind may have otherwise."""
    if not isinstance(column, IdFeature):
        return column
    distinct = 0 if column.mode in ("hash", "raw") else column.distinct
    counted: dict[str, Any] = dict.fromkeys(("count_error", "distinct_estimate", "lookups", "unlisted_lookups"), 0)
    return dataclasses.replace(column, distinct=distinct, counting="exact", **counted)


def _same_ids(one: Path, other: Path) -> bool:
    if one.read_bytes() == other.read_bytes():
        return True
    return bool(pq.read_table(one, columns=["id"]).equals(pq.read_table(other, columns=["id"])))
