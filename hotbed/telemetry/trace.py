"""Some steps of a run -> a trace file: an Observer that installs the recorder, and writes when the steps are over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hotbed.errors import ConfigError, RunError
from hotbed.host.atomic import write_file
from hotbed.telemetry import spans
from hotbed.telemetry.clock import StepClock
from hotbed.telemetry.log import Record
from hotbed.telemetry.observer import Progress

SKIPPED, USUAL, MOST_STEPS = 10, 50, 2000  # steps


class Stretch(NamedTuple):
    """Steps from `first` up to, without, `stop`; counted from 1, or from where the process begins."""

    first: int = SKIPPED
    stop: int = SKIPPED + USUAL
    is_relative: bool = True


def parse_steps(text: str | None) -> Stretch:
    """50:100; without a text, 50 steps after the first ten of the process."""
    if text is None:
        return Stretch()
    first, colon, stop = text.partition(":")
    if not colon or not first.strip().isdecimal() or not stop.strip().isdecimal() or not 1 <= int(first) < int(stop):
        raise ConfigError(f"--trace-steps must be FIRST:STOP, such as 50:100, with 1 <= FIRST < STOP, not {text!r}")
    if int(stop) - int(first) > MOST_STEPS:
        raise ConfigError(
            f"--trace-steps {text} are {int(stop) - int(first):,} steps; a trace holds at most {MOST_STEPS:,}"
        )
    return Stretch(int(first), int(stop), False)


class TraceWriter:
    """Writes `path` when the last of its steps is done, or when the run ends before."""

    def __init__(self, path: Path, steps: Stretch) -> None:
        self._path, self._steps = path, steps
        self._say: Callable[[str], None] = lambda text: None
        self._clock: StepClock | None = None
        self._spans: spans.Spans | None = None
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"--trace {path} cannot be written: {path if path.is_dir() else path.parent} is "
                              f"{'a folder' if path.is_dir() else 'no folder'}. Give the path of a file.")  # fmt: skip

    def watch(self, clock: StepClock, say: Callable[[str], None]) -> None:
        """The clock of the tables that are trained, and who is told of the file."""
        self._clock, self._say = clock, say

    def begin(self, progress: Progress, total_steps: int) -> None:
        first, stop, is_relative = self._steps
        base = progress.step if is_relative else 0
        if is_relative and base + first >= total_steps:
            first, stop = 1, USUAL
        self._spans = spans.Spans(base + first, base + stop)
        self._spans.number = progress.step
        spans.install(self._spans)
        if self._clock is not None:
            self._clock.spans = self._spans

    def step(self, progress: Progress) -> None:
        if self._spans is not None and progress.step >= self._spans.stop:
            self._write()

    def record(self, record: Record) -> None:
        """Lines are elsewhere."""

    def say(self, text: str) -> None:
        """Nothing to draw."""

    def end(self) -> None:
        if self._spans is not None:
            self._spans.step()  # the last one ends here
            self._write()

    def _write(self) -> None:
        recorded, self._spans = self._spans, None
        spans.install(None)
        if self._clock is not None:
            self._clock.spans = None
        assert recorded is not None, "written once"
        events = recorded.events()
        if not events:
            self._say(f"no trace: the run had none of the steps {recorded.first:,} to {recorded.stop - 1:,}")
            return
        whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"dropped": recorded.dropped}}
        try:
            write_file(self._path, json.dumps(whole, separators=(",", ":")))
        except OSError as error:
            raise RunError(f"{self._path} cannot be written: {error.strerror}. Give another --trace.") from error
        self._say(f"trace: {self._path} (open it at ui.perfetto.dev)")
