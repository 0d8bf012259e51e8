"""Who watches a training run: progress bars, TensorBoard. Calls come from the training thread and must return at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hotbed.telemetry.log import Record
from hotbed.telemetry.progress import Progress


class Observer(Protocol):
    """Told of what happens; changes nothing."""

    def begin(self, progress: Progress, total_steps: int) -> None:
        """Training starts, or goes on, here."""

    def step(self, progress: Progress) -> None:
        """One step was launched."""

    def record(self, record: Record) -> None:
        """A line went to metrics.jsonl."""

    def say(self, text: str) -> None:
        """Something worth a line on the screen."""

    def end(self) -> None:
        """Nothing more will come."""


class Observers:
    """Several as one."""

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
