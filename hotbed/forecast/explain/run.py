"""A run folder -> its settings, data and newest checkpoint. A table and an id or a raw value -> the row.

Of an unfinished run the last checkpoint is used. Nothing is trained, and nothing in the folder is changed.

In a vocabulary an id is a row number, as the data files have it; raw values are hashed and looked up as `prepare` did. In a
table of hashed or dynamic ids an id is the 64-bit number of the raw value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hotbed.cache import MOST_AHEAD
from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.layouts import entries_of
from hotbed.checkpoint.read import tensors_of
from hotbed.checkpoint.write import REST
from hotbed.data.dataset import Dataset
from hotbed.data.embedded import resolve
from hotbed.data.formats.chunk import Faults, Text
from hotbed.data.schema import IdFeature
from hotbed.data.values import read_ids
from hotbed.errors import ConfigError, IdError, RunError
from hotbed.forecast.memory import staged_rows
from hotbed.forecast.replay import LookAhead
from hotbed.forecast.trace import Trace, read_trace
from hotbed.host.devices import pick_device
from hotbed.parallel.world import World
from hotbed.run.config import RunConfig
from hotbed.run.config_check import read_tree
from hotbed.run.folder import find_data
from hotbed.tables.sizing.budget import Budgets, rooms_of
from hotbed.train.build import sketch
from hotbed.types import TableShape


class RowRequest(NamedTuple):
    """One row of a table."""

    table: str
    id: int  # as the files of rows and the batches have it
    row: int | None  # in its table; None: dynamic ids, whose rows are in the checkpoint
    value: str | None  # as it was given
    note: str = ""
    meaning: str = ""  # of the id in the raw log, in words, if the dataset knows


def feature_of(opened: OpenRun, table: str) -> IdFeature:
    """The feature of a table or one that shares it, or an error that lists them all."""
    features = {feature.name: feature for feature in opened.dataset.schema.features}
    if table not in features:
        raise ConfigError(f"--table {table}: {opened.run} has no such table. Its tables are: {', '.join(features)}.")
    return features[table]


def find_row(opened: OpenRun, table: str, id_: int | None, value: str | None) -> RowRequest:
    """The row of an id or of a raw value; exactly one of them is given."""
    feature = feature_of(opened, table)
    if (id_ is None) == (value is None):
        raise ConfigError("give one of --id, the number of a row, and --value, as the raw log has it.")
    if value is not None:
        return _of_value(opened, feature, value)
    assert id_ is not None
    table = feature.table
    rows = opened.tables[table].rows
    if rows is None:
        return RowRequest(table, id_, None, None)
    if feature.mode == "hash":
        return RowRequest(table, id_ % rows, id_ % rows, None)
    if not 0 <= id_ < rows:
        raise IdError(
            f"--id {id_}: table {table} has the rows 0 to {rows - 1:,}. A value of the raw log is given with --value."
        )
    return RowRequest(table, id_, id_, None)


def _of_value(opened: OpenRun, feature: IdFeature, value: str) -> RowRequest:
    data = np.frombuffer(value.encode(), dtype=np.uint8).copy()
    faults = Faults(1)
    single = Text(data, np.zeros(1, np.int64), np.array([data.shape[0]]))
    ids = read_ids(single, replace(feature, multi=False), faults)
    if not faults.good.all():
        raise ConfigError(f"--value {value!r}: {faults.bad_rows('', np.zeros(1, np.int64), str)[0].reason}.")
    assert isinstance(ids, np.ndarray)
    number, rows = int(ids[0]), opened.tables[feature.table].rows
    if rows is None:
        return RowRequest(feature.table, number, None, value)
    if feature.mode == "hash":
        return RowRequest(feature.table, number % rows, number % rows, value)
    places = np.flatnonzero(opened.dataset.counts(feature.name).ids == number)
    if places.shape[0] and places[0] + 1 < rows:
        row = int(places[0]) + 1
        return RowRequest(feature.table, row, row, value)
    return RowRequest(
        feature.table, 0, 0, value, f"{value!r} has no row of its own: it shares row 0 with all values that are unknown"
    )


@dataclass(frozen=True)
class OpenRun:
    """A run, as of its newest checkpoint."""

    run: Path
    config: RunConfig
    dataset: Dataset
    entries: list[Entry]  # of every rank
    step: int
    epoch: int  # epochs done
    batch: int  # batches of the open epoch done
    evaluated_step: int

    @property
    def tables(self) -> dict[str, TableShape]:
        return self.entries[0].manifest.tables

    @property
    def world(self) -> int:
        return len(self.entries)

    @property
    def ahead(self) -> LookAhead:
        """The look-ahead of the run's cache."""
        tables = self.config.tables
        budgets = Budgets(tables.cache or None, tables.hbm or None, tables.memory or None, tables.ssd or None)
        return LookAhead(tables.window or None, tables.look_ahead or None, budgets.bounds_index, self._staged_rows)

    @cached_property
    def _staged_rows(self) -> int | None:
        """Rows of a window that may be on their way; of the first group."""
        if not self.config.tables.staging:
            return None
        found, device = sketch(self.config, self.dataset, World(0, self.world)), pick_device(self.config.train.device)
        room = rooms_of(found.budgets, found.amounts.groups, device.type, found.amounts.stored)[0]
        return staged_rows(room, device.type == "cuda")

    @cached_property
    def rest(self) -> list[dict[str, Tensor]]:
        """The content of the caches, of every rank."""
        return [tensors_of(entry, REST) for entry in self.entries]

    def cache_of(self, table: str, rank: int = 0) -> dict[str, Tensor] | None:
        """The content of the cache of a table's group; None if every row is on the device."""
        shape = self.tables[table]
        prefix = f"cache.{shape.group_name}."
        found = {name.removeprefix(prefix): one for name, one in self.rest[rank].items() if name.startswith(prefix)}
        return found or None

    def base_of(self, table: str) -> int:
        """The first key of a table; tables of one width follow each other."""
        shape, base = self.tables[table], 0
        for name, other in self.tables.items():
            if name == table:
                return base
            if other.group_name == shape.group_name:
                base += other.rows or 0
        raise AssertionError(table)

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return -(-self.dataset.schema.splits["train"].rows // self.config.data.batch_size)

    @property
    def last_step(self) -> int:
        """The last step of the run, if nothing ends it earlier."""
        train = self.config.train
        steps = train.epochs * self.num_batches
        return min(steps, train.max_steps) if train.max_steps else steps

    def trace(self, epoch: int, max_batches: int | None = None) -> Trace:
        """The batches of an epoch, in the order of training."""
        data = self.config.data
        most = None if max_batches is None else min(max_batches + MOST_AHEAD + 64, self.num_batches)
        return read_trace(
            self.dataset, batch_size=data.batch_size, shuffle=data.shuffle, seed=self.config.train.seed, epoch=epoch,
            max_batches=most,
        )  # fmt: skip


def open_run(run: Path) -> OpenRun:
    """The run, or an error that says what is missing."""
    if not run.is_dir():
        raise RunError(f"{run} is not a folder; give the folder of a run, such as runs/demo.")
    entries = entries_of(run)
    document = entries[0].manifest.document
    tree, progress = document.get("config"), document.get("progress")
    if not tree or not progress:
        raise RunError(
            f"{entries[0].folder} was not saved by `hotbed train`: it does not say what was trained, and on what batches."
        )
    config = read_tree(tree)
    dataset = resolve(find_data(config.data.path, run))
    if progress.get("data") not in ("", None, dataset.fingerprint):
        raise RunError(
            f"{run} was trained on {config.data.path}, which has changed since: its batches can no longer be read. Bring the "
            "old dataset back."
        )
    return OpenRun(run, config, dataset, entries, **_position(progress))


def _position(progress: dict[str, Any]) -> dict[str, int]:
    return {name: int(progress[name]) for name in ("step", "epoch", "batch", "evaluated_step")}
