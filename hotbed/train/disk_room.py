"""A run that is about to start in; what it will save, in bytes, against what the disk of its folder has free.

A run that trains for hours and then cannot save has trained for nothing, so one that surely cannot is refused before its first
step. Surely: rows that are never trained are in no checkpoint, and how many rows a part of an epoch trains is not known before;
of dynamic ids and of rows on an ssd, whose files are linked, nothing is counted. What others write meanwhile is unknown.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hotbed.checkpoint.layouts import newest_in
from hotbed.data.schema import IdFeature, Schema
from hotbed.errors import HotbedError, RunError, without_room
from hotbed.host.memory import in_words
from hotbed.run.folder import CONTENT
from hotbed.train.checkpoint import checkpoint_root
from hotbed.train.loop import Training

_ID_BYTES = 8  # of a row in a checkpoint


class Saves(NamedTuple):
    """Bytes that a run is sure to have on its disk at once, at its end."""

    checkpoints: int
    best: int
    model: int

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        named = zip(("checkpoints", "best weights", "model"), self, strict=True)
        return ", ".join(f"{name} {in_words(amount)}" for name, amount in named if amount)


def saves_of(training: Training) -> Saves:
    """What is to come; of a run that resumes, no checkpoint is counted: it holds what changes from now on."""
    weights, pace = _weights(training), training.pace
    begins = training.progress.step == 0
    num_saves = 1 + (training.total_steps // pace.checkpoint_every if pace.checkpoint_every else 0)
    num_full = 2 if num_saves > pace.full_every else 1  # the old one stays until the new one is whole
    checkpoints = num_full * _checkpoint(training) if begins else 0
    num_looks = training.total_steps // pace.eval_every if pace.eval_every else pace.epochs
    keeps = training.course.keep_best and "valid" in training.loaders.held_out and num_looks > 1 and begins
    return Saves(checkpoints, weights if keeps else 0, weights)


def check_room(training: Training, replaces: bool = False) -> None:
    """A RunError where the disk surely cannot hold it; `replaces`: the run that is in the folder goes first."""
    saves = saves_of(training)
    free = shutil.disk_usage(training.run).free + (_bytes_in(training.run) if replaces else 0)
    if saves.total <= free:
        return
    fewer = " --set train.keep_best=false leaves out the best weights." if saves.best else ""
    raise without_room(
        RunError,
        f"{training.run} has no room for what the run will save: {in_words(saves.total)} ({saves}), and its disk has "
        f"{in_words(free)} free. Nothing was trained. Free some space, or choose a folder on another disk with --out.{fewer}",
    )


def is_refused_by_disk(error: HotbedError) -> bool:
    """Whether it is the disk that could not, and not the training that went wrong."""
    return isinstance(error.__cause__, OSError)


def what_is_left(run: Path) -> str:
    """What a run has on disk that training can resume from."""
    newest = newest_in(checkpoint_root(run))
    if newest is None:
        return "There is no checkpoint to resume from."
    here = shlex.quote(str(run))
    return f"The checkpoint of step {newest.step:,} is whole: `hotbed train --resume {here}` resumes from there."


def _weights(training: Training) -> int:
    """Bytes of RUN/model, and of best weights: all rows, without optimizer state."""
    tables = training.learner.tables
    rows = sum(
        (table.rows or 0) * table.dim * tables.group_of(name).weight_type.itemsize
        for name, table in tables.tables.items()
    )
    return rows + _num_bytes(training.learner.model.state_dict().values())


def _num_bytes(tensors: Iterable[object]) -> int:
    return sum(getattr(tensor, "nbytes", 0) for tensor in tensors)


def _checkpoint(training: Training) -> int:
    """Bytes of a checkpoint with all rows that an epoch trains, those of this rank."""
    learner, schema = training.learner, training.loaders.train.dataset.schema
    dense = _num_bytes(learner.model.state_dict().values())
    if training.total_steps < len(training.loaders.train):
        return dense
    rows = trained_rows(schema)
    total = 0
    for group in learner.tables.groups:
        if group.tiers() is not None:  # files on an ssd are linked
            continue
        here = sum(min(rows.get(name, 0), one.rows or 0) for name, one in group.members.items())
        total += here // training.world.size * (4 * group.layout.used + _ID_BYTES)
    return total + dense


def trained_rows(schema: Schema) -> dict[str, int]:
    """By table, its rows that an epoch trains, as far as its ids were counted."""
    return {name: _rows_of(one) for name, (one, *_) in schema.tables.items()}


def _rows_of(feature: IdFeature) -> int:
    distinct = feature.distinct or feature.distinct_estimate
    if feature.mode == "hash":  # some ids share a row
        return int(0.99 * feature.rows * -math.expm1(-distinct / feature.rows)) if feature.rows else 0
    if feature.mode == "vocabulary":  # made of ids of train
        return min(feature.rows, distinct) if distinct else feature.rows - 1
    return min(feature.rows, distinct)


def _bytes_in(run: Path) -> int:
    """Bytes of an old run that are removed when a new one begins in its folder."""
    places = [run / name for name in CONTENT]
    files = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place])]
    return sum(os.stat(file).st_blocks * 512 for file in files if file.is_file())
