"""Observers of a training run: progress bars, TensorBoard. Calls come from the training thread and must return quickly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from hotbed.telemetry.log import Record


class Observer(Protocol):
    """Is called when something happens; changes nothing."""

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


class Observers:
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
    dealt: list[tuple[int, int]] = field(default_factory=list)

    def deal_to(self, world: int) -> None:
        """`world` ranks continue from here."""
        if self.batch == 0:
            self.dealt = [] if world == 1 else [(0, world)]
        elif (self.dealt or [(0, 1)])[-1][1] != world:
            self.dealt = [*(self.dealt or [(0, 1)]), (self.batch, world)]
