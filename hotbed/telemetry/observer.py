"""A training run as others see it: lines of metrics.jsonl, its progress, and observers such as progress bars and TensorBoard.

A line is one JSON object, appended and flushed as it happens. Observers are called by the training thread and must return
quickly.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotbed.errors import RunError
from hotbed.host.atomic import flush_to_disk, writing

Record = dict[str, Any]


class MetricsLog:
    """The open file. `position` is its length in bytes; a resumed run truncates it there and continues."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        self._is_named = False  # whether its folder entry is on the disk
        with writing(path):
            size = path.stat().st_size if path.exists() else 0
            if size < position:
                raise RunError(f"{path} has {size} bytes, but the checkpoint was taken at {position}.")
            self._file = path.open("ab")
            self._file.truncate(position)
            self._file.seek(position)

    @property
    def position(self) -> int:
        return self._file.tell()

    def write(self, record: Record) -> None:
        """Append one line; nan becomes null, which every JSON reader accepts."""
        with writing(self.path):
            self._file.write(json.dumps(_plain(record), allow_nan=False).encode() + b"\n")
            self._file.flush()

    def flush_to_disk(self) -> None:
        """Before a checkpoint that relies on these bytes."""
        with writing(self.path):
            os.fsync(self._file.fileno())
            if not self._is_named:
                flush_to_disk(self.path.parent)
                self._is_named = True

    def close(self) -> None:
        self._file.close()


class NoLog:
    """Instead of the file, on ranks that write none."""

    position = 0

    def write(self, record: Record) -> None:
        """Rank 0 writes it."""

    def flush_to_disk(self) -> None:
        """Nothing to flush."""

    def close(self) -> None:
        """Nothing was opened."""


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Observer:
    """Is called when something happens; changes nothing. Subclasses define the calls that they need."""

    def begin(self, progress: Progress, total_steps: int) -> None:
        """Training starts, or resumes, here."""

    def step(self, progress: Progress) -> None:
        """One step was launched."""

    def record(self, record: Record) -> None:
        """A line was written to metrics.jsonl."""

    def say(self, text: str) -> None:
        """A message for the screen."""

    def end(self) -> None:
        """The run has ended."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def begin(self, progress: Progress, total_steps: int) -> None:
        for one in self._observers:
            one.begin(progress, total_steps)

    def step(self, progress: Progress) -> None:
        for one in self._observers:
            one.step(progress)

    def record(self, record: Record) -> None:
        for one in self._observers:
            one.record(record)

    def say(self, text: str) -> None:
        for one in self._observers:
            one.say(text)

    def end(self) -> None:
        for one in self._observers:
            one.end()


@dataclass(frozen=True)
class Best:
    """The evaluation with the highest valid AUC so far."""

    auc: float
    epoch: int  # counted from 1
    step: int
    samples: int


@dataclass
class Progress:
    """The state of a run between two steps."""

    epoch: int = 0  # epochs done
    batch: int = 0  # batches of the open epoch done
    step: int = 0
    samples: int = 0
    evaluated_step: int = 0  # step of the last evaluation during training
    stale: int = 0  # evaluations since the best one
    plateau: float = 1.0  # product of the plateau factors so far
    best: Best | None = None
    train_seconds: float = 0.0
    seconds: float = 0.0
    log_position: int = 0
    train_rows: int = 0  # of the dataset; a resumed run must find as many
    data: str = ""  # fingerprint of the dataset; a resumed run must find the same
    # (first batch, ranks) of the open epoch; none: one process
    rank_history: list[tuple[int, int]] = field(default_factory=list)

    def continue_on(self, world: int) -> None:
        """`world` ranks continue from here."""
        if self.batch == 0:
            self.rank_history = [] if world == 1 else [(0, world)]
        elif (self.rank_history or [(0, 1)])[-1][1] != world:
            self.rank_history = [*(self.rank_history or [(0, 1)]), (self.batch, world)]
