"""What every thread did in a few steps of a run: a trace file for Perfetto and chrome://tracing.

Threads record their spans only while a `Spans` is installed (`hotbed train --trace`), at a microsecond each, into lists of
bounded length. Each part of the training thread (by its name in the clock) has a track, and so has each other thread; arrows
lead from the read of a batch to the step that trains it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hotbed.errors import ConfigError, RunError
from hotbed.host.atomic import write_file
from hotbed.telemetry.clock import StepClock
from hotbed.telemetry.observer import Observer, Progress

SKIPPED, USUAL, MOST_STEPS = 10, 50, 2000  # steps
MOST = 50_000  # spans of other threads; the newest are kept
MOST_PARTS = 100_000  # of the training thread
STEPS, READER = "steps", "reader thread"
DATA = "hotbed-data"  # threads that decode files
PARTS = {
    "reader": "wait for reader",
    "plan": "plan",
    "wait": "stall",
    "copy": "copy",
    "look_up": "lookup",
    "model": "model",
    "update": "update",
    "dense": "dense update",
    "other": "between steps",
}
_MICRO = 1e6

T = TypeVar("T")
R = TypeVar("R")


class Span(NamedTuple):
    """A span of one track, in seconds of the performance counter."""

    track: str
    name: str
    start: float
    end: float
    number: int = 0  # of the step, or of the step that trains the batch


class Spans:
    """Spans of the steps `first` to `stop` - 1; steps are counted from 1."""

    def __init__(self, first: int, stop: int) -> None:
        self.first, self.stop = first, stop
        self.number = 0  # of the current step
        self.aside = False  # something other than training runs
        self.dropped = 0
        self._parts: list[Span] = []
        self._steps: list[Span] = []
        self._others: deque[Span] = deque(maxlen=MOST)
        self._began = 0.0

    @property
    def is_over(self) -> bool:
        """Whether recording has ended."""
        return self.number >= self.stop

    def step(self) -> None:
        """The next step begins."""
        now = time.perf_counter()
        if self.first <= self.number < self.stop:
            self._steps.append(Span(STEPS, f"step {self.number}", self._began, now, self.number))
        self.number, self._began = self.number + 1, now

    def stretch(self, part: str, start: float, end: float) -> None:
        """Record a span of the training thread."""
        if self.aside or not self.first <= self.number < self.stop:
            return
        if len(self._parts) < MOST_PARTS:
            self._parts.append(Span(PARTS[part], PARTS[part], start, end, self.number))
        else:
            self.dropped += 1

    def add(self, span: Span) -> None:
        """Record a span of another thread."""
        if not self.is_over:
            self.dropped += len(self._others) == MOST
            self._others.append(span)

    def events(self) -> list[dict[str, Any]]:
        """Chrome trace events: names of tracks, spans in order of time, arrows from batches to steps."""
        if not self._steps:
            return []
        begin, end = self._steps[0].start, self._steps[-1].end
        numbers, kept = {one.number for one in self._steps}, list(self._others)
        others = [one for one in kept if one.track == READER and one.number in numbers]
        read = min((one.start for one in others), default=begin)  # some batches are read long before they are trained
        others += [
            one
            for one in kept
            if one.track != READER and one.start <= end and one.end >= (read if one.track.startswith(DATA) else begin)
        ]
        spans = sorted([*self._steps, *self._parts, *_lanes(others)], key=lambda one: (one.start, -one.end))
        zero = spans[0].start
        tracks = {name: k for k, name in enumerate(_tracks(spans), start=1)}
        found: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "hotbed train"}}]
        for name, k in tracks.items():
            found.append({"ph": "M", "pid": 1, "tid": k, "name": "thread_name", "args": {"name": name}})
            found.append({"ph": "M", "pid": 1, "tid": k, "name": "thread_sort_index", "args": {"sort_index": k}})
        found += [_complete(one, tracks[one.track], zero) for one in spans]
        return found + _arrows(spans, tracks, zero)


def _lanes(spans: Iterable[Span]) -> list[Span]:
    """Threads of two pools may have one name: a span that overlaps with the last one of its track gets another track."""
    busy: dict[str, list[tuple[float, int]]] = {}  # of every name, the tracks in use: (end, number)
    free: dict[str, list[int]] = {}
    found = []
    for one in sorted(spans, key=lambda one: (one.start, -one.end)):
        in_use, unused = busy.setdefault(one.track, []), free.setdefault(one.track, [])
        while in_use and in_use[0][0] <= one.start:
            heappush(unused, heappop(in_use)[1])
        number = heappop(unused) if unused else len(in_use) + 1
        heappush(in_use, (one.end, number))
        found.append(one if number == 1 else one._replace(track=f"{one.track} ({number})"))
    return found


def _tracks(spans: Iterable[Span]) -> list[str]:
    """Other threads first, then steps and their parts in the order of a step."""
    there = dict.fromkeys(one.track for one in spans)
    own = [STEPS, *PARTS.values()]
    return [*sorted(name for name in there if name not in own), *(name for name in own if name in there)]


def _complete(span: Span, track: int, zero: float) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "X", "pid": 1, "tid": track, "name": span.name, "cat": span.track}
    event |= {"ts": round((span.start - zero) * _MICRO, 3), "dur": round((span.end - span.start) * _MICRO, 3)}
    if span.number:
        event["args"] = {"step": span.number}
    return event


def _arrows(spans: list[Span], tracks: dict[str, int], zero: float) -> list[dict[str, Any]]:
    steps = {one.number: one for one in spans if one.track == STEPS}
    found = []
    for one in spans:
        if one.track != READER or one.number not in steps:
            continue
        ends = ("s", one.start, READER), ("f", steps[one.number].start, STEPS)
        for phase, at, track in ends:
            event = {"ph": phase, "id": one.number, "pid": 1, "tid": tracks[track], "name": "batch", "cat": "batch"}
            found.append({**event, "ts": round((at - zero) * _MICRO, 3), **({"bp": "e"} if phase == "f" else {})})
    return found


class _Recorder:
    """Where threads record what they do; nowhere, most of the time."""

    spans: Spans | None = None


def install(spans: Spans | None) -> None:
    """From now on threads record what they do; None: they do not."""
    _Recorder.spans = spans


@contextmanager
def span(name: str, track: str = "") -> Iterator[None]:
    """Record a span of this thread; the default track is the name of the thread."""
    spans = _Recorder.spans
    if spans is None or spans.is_over:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        spans.add(Span(track or threading.current_thread().name, name, start, time.perf_counter()))


def reads(batches: Iterable[T], first: int) -> Iterator[T]:
    """The batches; records a span for the read of each. `first` is the step that trains the first."""
    source, number = iter(batches), first
    while True:
        start = time.perf_counter()
        try:
            batch = next(source)
        except StopIteration:
            return
        if (spans := _Recorder.spans) is not None:
            spans.add(Span(READER, f"batch of step {number}", start, time.perf_counter(), number))
        number += 1
        yield batch
        del batch  # memory of batches is reused once they are released


def recorded(name: str, work: Callable[[T], R]) -> Callable[[T], R]:
    """The same function; records a span for each call while spans are recorded."""
    if _Recorder.spans is None:
        return work

    def with_span(given: T) -> R:
        with span(name):
            return work(given)

    return with_span


def next_step() -> int | None:
    """The step that trains the first batch of a reader that starts now; None if nothing is recorded."""
    spans = _Recorder.spans
    return None if spans is None or spans.aside or spans.is_over else spans.number + 1


class StepRange(NamedTuple):
    """Steps `first` to `stop` - 1, counted from 1, or from the start of the process."""

    first: int = SKIPPED
    stop: int = SKIPPED + USUAL
    is_relative: bool = True


def parse_steps(text: str | None) -> StepRange:
    """50:100; by default 50 steps after the first ten of the process."""
    if text is None:
        return StepRange()
    first, colon, stop = text.partition(":")
    if not colon or not first.strip().isdecimal() or not stop.strip().isdecimal() or not 1 <= int(first) < int(stop):
        raise ConfigError(f"--trace-steps must be FIRST:STOP, such as 50:100, with 1 <= FIRST < STOP, not {text!r}")
    if int(stop) - int(first) > MOST_STEPS:
        raise ConfigError(
            f"--trace-steps {text} are {int(stop) - int(first):,} steps; a trace holds at most {MOST_STEPS:,}"
        )
    return StepRange(int(first), int(stop), False)


class TraceWriter(Observer):
    """Writes `path` after the last of its steps, or at the end of the run."""

    def __init__(self, path: Path, steps: StepRange) -> None:
        self._path, self._steps = path, steps
        self._say: Callable[[str], None] = lambda text: None
        self._clock: StepClock | None = None
        self._spans: Spans | None = None
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"--trace {path} cannot be written: {path if path.is_dir() else path.parent} is "
                              f"{'a folder' if path.is_dir() else 'no folder'}. Give the path of a file.")  # fmt: skip

    def watch(self, clock: StepClock, say: Callable[[str], None]) -> None:
        """Set the clock of the trained tables, and a function that reports the file."""
        self._clock, self._say = clock, say

    def begin(self, progress: Progress, total_steps: int) -> None:
        first, stop, is_relative = self._steps
        base = progress.step if is_relative else 0
        if is_relative and 0 < total_steps <= base + first:
            first, stop = 1, USUAL
        self._spans = Spans(base + first, base + stop)
        self._spans.number = progress.step
        install(self._spans)
        if self._clock is not None:
            self._clock.spans = self._spans

    def step(self, progress: Progress) -> None:
        if self._spans is not None and progress.step >= self._spans.stop:
            self._write()

    def end(self) -> None:
        if self._spans is not None:
            self._spans.step()  # the last one ends here
            self._write()

    def _write(self) -> None:
        recorded, self._spans = self._spans, None
        install(None)
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
