"""Settings that nobody gave and the schema of a dataset in, settings that suit the size of the log out.

One epoch in batches of 4,096 is right for a log of many millions of rows. A log of 20,000 rows gets five steps by it, and
learns nothing. What suits a log depends on two numbers. Its rows give the batch size and the most epochs; the valid split
decides when to stop. The lookups per row of the tables ("density") give the learning rate of the rows: where most ids are
rare, as in a click log, rows are memorized within an epoch; where every user and item has hundreds of samples, rows take in
more, and may move faster.

The constants were chosen on five real and seven synthetic logs (docs/small-logs.md). A setting that is given is never
changed. Whoever gives the batch size plans the training; then nothing is chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

from hotbed.data.schema import Schema
from hotbed.run.config import DataConfig, RunConfig
from hotbed.run.model_card import ids_of_train

LARGE_LOG = 1_500_000  # rows from which one epoch of large batches is enough
_STEPS = 300  # of an epoch, about; fewer for small logs
_SMALLEST_BATCH = 256
_RARE, _DENSE = 20.0, 200.0  # lookups per row of a table
_FEW, _MANY = 1_000, 4_000  # ids of all tables
_SHALLOW = ("lr", "fm")
_PATIENCE = 2


class ChosenSettings(NamedTuple):
    """A config, and what was chosen of it."""

    config: RunConfig
    values: dict[str, Any]  # path -> value
    text: str  # for the user; empty if nothing was chosen


def choose_settings(config: RunConfig, given: Collection[str], schema: Schema) -> ChosenSettings:
    """The config with settings for the size of the log where none is in `given`."""
    train, valid = schema.splits.get("train"), schema.splits.get("valid")
    rows = train.rows if train else 0
    if not rows or rows >= LARGE_LOG or "data.batch_size" in given:
        return ChosenSettings(config, {}, "")
    has_valid = valid is not None and valid.rows > 0
    density = lookups_per_row(schema)
    wanted: dict[str, Any] = {"data.batch_size": batch_size(rows), "train.base_rate": True, "train.recalibrate": True}
    if "train.epochs" not in given and "train.max_steps" not in given:
        wanted["train.epochs"] = epochs(rows, density, config.model.name, has_valid)
        if has_valid:
            wanted["train.patience"] = _PATIENCE
    if not {"tables.optimizer", "tables.lr"} & set(given):
        wanted["tables.lr"] = row_rate(density, sum(ids_of_train(schema).values()), config.model.name)
    chosen = {path: value for path, value in wanted.items() if path not in given}
    if "data.eval_batch_size" not in given:
        has_cache = bool(config.tables.cache or config.tables.hbm or config.tables.dynamic)
        chosen["data.eval_batch_size"] = chosen["data.batch_size"] if has_cache else DataConfig().batch_size
    return ChosenSettings(_replaced(config, chosen), chosen, _text(rows, chosen))


def batch_size(rows: int) -> int:
    """A power of two that makes about 300 steps of an epoch."""
    wanted = 2 ** round(math.log2(max(rows / _STEPS, 1)))
    return int(min(max(wanted, _SMALLEST_BATCH), DataConfig().batch_size))


def epochs(rows: int, density: float, model: str, has_valid: bool) -> int:
    """The most epochs if a valid split says when to stop, else a number that does not overfit."""
    if has_valid:
        return 30 if rows < LARGE_LOG / 5 else 15
    if model in _SHALLOW:
        return 5
    return 1 if density < _RARE else 2 if density < _DENSE else 4


def row_rate(density: float, num_ids: int, model: str) -> float:
    """The learning rate of rows with Adagrad: higher for dense tables, and for models that are sums of row weights."""
    place = _between(density, _RARE, _DENSE)
    if model == "lr":
        low, high = 0.03, 0.1
    else:
        low, high, place = 0.02, 0.06, min(place, _between(num_ids, _FEW, _MANY))
    return float(f"{low * (high / low) ** place:.2g}")


def _between(value: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high`, by logarithms."""
    return min(max(math.log(max(value, low) / low) / math.log(high / low), 0.0), 1.0)


def lookups_per_row(schema: Schema) -> float:
    """How often a row of a table occurs in train, on average."""
    rows = schema.splits["train"].rows
    lookups = sum(one.lookups or rows for one in schema.features)
    return lookups / max(sum(ids_of_train(schema).values()), 1)


def _replaced(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    changed = {name: dataclasses.replace(getattr(config, name), **found) for name, found in sections.items()}
    return dataclasses.replace(config, **changed)


def _text(rows: int, chosen: dict[str, Any]) -> str:
    words: list[str] = []
    words.append(f"batches of {chosen['data.batch_size']:,} (--batch-size)")
    if number := chosen.get("train.epochs"):
        stop = f", ended by {_PATIENCE} without a better valid AUC" if "train.patience" in chosen else ""
        most = "at most " if stop else ""
        words.append(f"{most}{number} {'epoch' if number == 1 else 'epochs'}{stop} (--epochs)")
    if rate := chosen.get("tables.lr"):
        words.append(f"a row learning rate of {rate:g} (--lr)")
    return f"chosen for {rows:,} train samples: {'; '.join(words)}"
