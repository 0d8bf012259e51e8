"""Rows, dense weights and everything else a run needs, on disk, whole or not at all.

    hotbed.checkpoint.save("checkpoints", tables, model=model, optimizer=optimizer, extra={"epoch": 3})
    hotbed.checkpoint.load("checkpoints", tables, model=model, optimizer=optimizer).extra["epoch"]

docs/checkpoints.md documents the format. `hotbed train` saves through Saver, while training continues.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hotbed.checkpoint.chain import Entry, find, folders_in, locked, remember, remove
from hotbed.checkpoint.files import DENSE, OPTIMIZER, dense_tensors, load_optimizer
from hotbed.checkpoint.layouts import shard_of, step_of
from hotbed.checkpoint.read import load_rows, tensors_of
from hotbed.checkpoint.saver import Policy, Saver
from hotbed.checkpoint.types import Rows, Sink, Snapshot
from hotbed.checkpoint.warm import WarmStartReport, warm_start
from hotbed.checkpoint.write import State
from hotbed.errors import RunError
from hotbed.files import path_of
from hotbed.store.history import begin_history
from hotbed.types import FrozenFolder, RowPart, TableShape

__all__ = [
    "FrozenFolder",
    "LoadedCheckpoint",
    "Policy",
    "RowPart",
    "Rows",
    "Saver",
    "Sink",
    "Snapshot",
    "State",
    "TableShape",
    "WarmStartReport",
    "discard_after",
    "load",
    "load_entry",
    "save",
    "warm_start",
]


_OLD_NAMES = {"Carried": "WarmStartReport", "Frozen": "FrozenFolder", "Loaded": "LoadedCheckpoint"}  # of 0.1


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was loaded."""

    folder: Path
    step: int
    extra: Any
    notes: tuple[str, ...] = ()  # parts that were left out, none of which changes a row


def save(
    folder: str | Path,
    tables: Any,
    *,
    step: int | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    policy: Policy | None = None,
) -> Path:
    """Add a checkpoint to a folder of checkpoints, and remove those that the policy does not keep; the new one's folder.

    `extra` is any plain JSON value. `step` names the checkpoint; its default is the number of updates of the tables. Rows that
    were not touched since the last checkpoint in this folder are not written again. A folder with a later step is refused,
    since `load` would take that one: see `discard_after`. Rows of ShardedTables are those of one rank: every rank has a folder
    of its own.
    """
    at = int(tables.num_updates) if step is None else step
    root = path_of(folder)
    if later := _after(root, at):
        raise RunError(
            f"{root} holds step {step_of(later[-1]):,}, later than the {at:,} to be saved, and load() would take that one. "
            f"Save to another folder, or remove the later ones first: hotbed.checkpoint.discard_after({str(root)!r}, {at})."
        )
    state = State(at, dense_tensors(model, optimizer), {"extra": extra, "shard": _shard_of(tables)})
    saver = Saver(root, tables, policy or Policy())
    saver.save(state, wait=True)
    return find(root).folder


def discard_after(folder: str | Path, step: int) -> list[Path]:
    """Remove the checkpoints of later steps, of a history that is given up; the folders that are gone."""
    root = path_of(folder)
    with locked(root):
        later = _after(root, step)
        remove(later)
    return later


def _after(root: Path, step: int) -> list[Path]:
    return [one for one in folders_in(root) if step_of(one) > step]


def load(
    folder: str | Path,
    tables: Rows,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint: the newest of a folder, or one by its own folder."""
    entry = find(path_of(folder))
    _refuse_other_rank(entry, tables)
    notes = load_entry(entry, tables, model, optimizer)
    return LoadedCheckpoint(entry.folder, entry.manifest.step, entry.manifest.document.get("extra"), notes)


def load_entry(
    entry: Entry,
    tables: Rows,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    report: Callable[[int], None] = lambda _: None,
) -> tuple[str, ...]:
    """Load rows, dense weights and the state of their optimizer. Dense files are checked before a row is touched.

    Returns a note for each part that was left out; rows and weights are always loaded.
    """
    weights = tensors_of(entry, DENSE) if model is not None else {}
    states = tensors_of(entry, OPTIMIZER) if optimizer is not None else {}
    if model is not None:
        _refuse_other_model(entry, weights, model)

    def load_dense() -> None:
        try:
            if model is not None:
                model.load_state_dict(weights)
            if optimizer is not None:
                load_optimizer(optimizer, states)
        except (RuntimeError, ValueError, KeyError) as error:
            raise RunError(f"the dense weights of {entry.folder} do not fit the model: {error}") from error

    begin_history(tables)
    sink = tables.restore()
    load_rows(entry, sink, report, load_dense)
    remember(tables, entry)
    return tuple(sink.notes)


def _shard_of(tables: Any) -> list[int]:
    """[rank, ranks] of the rows."""
    shard = tables.groups[0].shard
    return [int(shard.rank), int(shard.world)]


def _refuse_other_rank(entry: Entry, tables: Any) -> None:
    """A RunError before anything is loaded, where the rows are those of another rank: they would be read as one's own."""
    saved, wanted = shard_of(entry), _shard_of(tables)
    if saved is not None and saved != wanted:
        raise RunError(
            f"{entry.folder} has the rows of rank {saved[0]} of {saved[1]}, and these tables those of rank {wanted[0]} of "
            f"{wanted[1]}. Every rank saves to a folder of its own, and loads from it."
        )


def _refuse_other_model(entry: Entry, weights: dict[str, Tensor], model: nn.Module) -> None:
    """A RunError before anything is loaded, where dense weights have other names or shapes."""
    wanted = {name: list(one.shape) for name, one in model.state_dict().items()}
    saved = {name: list(one.shape) for name, one in weights.items()}
    wrong = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if wrong:
        name = wrong[0]
        raise RunError(
            f"{entry.folder} does not fit this run: {len(wrong)} dense tensors differ, first {name}, saved as "
            f"{saved.get(name, 'nothing')}, wanted as {wanted.get(name, 'nothing')}. Build the same model, or carry over "
            "what fits with --warm-start (hotbed.checkpoint.warm_start)."
        )


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Names of 0.1."""
        if name not in _OLD_NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        new = _OLD_NAMES[name]
        warnings.warn(f"hotbed.checkpoint.{name} is now called {new}.", DeprecationWarning, stacklevel=2)
        return globals()[new]
