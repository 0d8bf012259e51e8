"""A run folder in; its settings, its data and its newest checkpoint out.

A run that is not finished has what its last checkpoint holds. Nothing is trained, and nothing in the folder is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from hotbed.cache import MOST_AHEAD
from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.layouts import entries_of
from hotbed.checkpoint.read import tensors_of
from hotbed.checkpoint.types import TableShape, group_name
from hotbed.checkpoint.write import REST
from hotbed.data.dataset import Dataset
from hotbed.data.embedded import resolve
from hotbed.errors import RunError
from hotbed.forecast.replay import Ahead
from hotbed.forecast.trace import Trace, read_trace
from hotbed.run.config import RunConfig, read_tree
from hotbed.run.dataset import find_data
from hotbed.sizing.budget import Budgets


@dataclass(frozen=True)
class Opened:
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
    def ahead(self) -> Ahead:
        """How far the run's cache looks."""
        tables = self.config.tables
        budgets = Budgets(tables.cache or None, tables.hbm or None, tables.memory or None, tables.ssd or None)
        return Ahead(tables.window or None, tables.look_ahead or None, budgets.bounds_index)

    @cached_property
    def rest(self) -> list[dict[str, Tensor]]:
        """What caches held, of every rank."""
        return [tensors_of(entry, REST) for entry in self.entries]

    def cache_of(self, table: str, rank: int = 0) -> dict[str, Tensor] | None:
        """What the cache of a table's group held; None where every row is on the device."""
        shape = self.tables[table]
        prefix = f"cache.{group_name(shape.dim, shape.rows is None)}."
        found = {name.removeprefix(prefix): one for name, one in self.rest[rank].items() if name.startswith(prefix)}
        return found or None

    def base_of(self, table: str) -> int:
        """Of the table's keys; tables of one width follow each other."""
        shape, base = self.tables[table], 0
        for name, other in self.tables.items():
            if name == table:
                return base
            if (other.dim, other.rows is None) == (shape.dim, shape.rows is None):
                base += other.rows or 0
        raise AssertionError(table)

    @property
    def num_batches(self) -> int:
        """Of an epoch."""
        return -(-self.dataset.schema.splits["train"].rows // self.config.data.batch_size)

    @property
    def last_step(self) -> int:
        """Of the run, if nothing ends it before."""
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


def open_run(run: Path) -> Opened:
    """The run, or an error that says what it lacks."""
    if not run.is_dir():
        raise RunError(f"{run} is no folder; give the folder of a run, such as runs/demo.")
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
            f"{run} was trained on {config.data.path}, which has changed since: its batches cannot be told any more. Bring the "
            "old dataset back."
        )
    return Opened(run, config, dataset, entries, **_position(progress))


def _position(progress: dict[str, Any]) -> dict[str, int]:
    return {name: int(progress[name]) for name in ("step", "epoch", "batch", "evaluated_step")}
