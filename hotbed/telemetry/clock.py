"""Where the time of the training thread goes: each moment belongs to one part of a step.

reader   waiting for a batch                     look_up   rows -> vectors
plan     choosing slots for the rows ahead       model     forward, loss and backward
wait     waiting for rows on their way           update    summing gradients per row, row optimizer
copy     victims leave, misses come              dense     optimizer of the dense weights
other    everything else between steps: learning rates, lines of the log

Always on: a change of part takes 0.2 us, and a step has 10 to 18. On CUDA the thread only launches kernels, so one of every
SAMPLED steps is also measured on the training stream, with an event at every change; nothing ever waits for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

PARTS = ("other", "reader", "plan", "wait", "copy", "look_up", "model", "update", "dense")
OTHER, READER, PLAN, WAIT, COPY, LOOK_UP, MODEL, UPDATE, DENSE = range(len(PARTS))
SAMPLED = 16  # steps, of which one is measured on the device
_MOST_WAITING = 64  # samples whose events are not read yet


class Times(NamedTuple):
    """Running sums; they only rise."""

    seconds: tuple[float, ...] = (0.0,) * len(PARTS)  # of the training thread, by part
    steps: int = 0
    device: tuple[float, ...] = (0.0,) * len(PARTS)  # of the training stream, of the sampled steps
    sampled: int = 0
    requested: int = 0  # batches requested from the reader
    ready: int = 0  # sum of the batches that were ready then

    def minus(self, other: Times) -> Times:
        return self._with(other, -1)

    def plus(self, other: Times) -> Times:
        return self._with(other, 1)

    def _with(self, other: Times, sign: int) -> Times:
        def both(mine: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(a + sign * b for a, b in zip(mine, theirs))

        return Times(
            both(self.seconds, other.seconds),
            self.steps + sign * other.steps,
            both(self.device, other.device),
            self.sampled + sign * other.sampled,
            self.requested + sign * other.requested,
            self.ready + sign * other.ready,
        )

    def line(self) -> dict[str, Any] | None:
        """Means over the steps, for a line of the log; None without a step."""
        if self.steps <= 0:
            return None
        found: dict[str, Any] = {"steps": self.steps}
        found |= {name: max(one, 0.0) / self.steps for name, one in zip(PARTS, self.seconds)}
        if self.sampled > 0:
            found["device"] = {name: max(one, 0.0) / self.sampled for name, one in zip(PARTS, self.device)}
        if self.requested > 0:
            found["ready"] = self.ready / self.requested
        return found


class StepClock:
    """The clock of one training thread; `point` makes an event on its stream, None on the CPU."""

    def __init__(self, point: Callable[[], Any] | None = None) -> None:
        self._point = point
        self._seconds = [0.0] * len(PARTS)
        self._device = [0.0] * len(PARTS)
        self._part, self._since = OTHER, time.perf_counter()
        self._steps = self._sampled = self._asked = self._ready = 0
        self._open: list[tuple[int, Any]] | None = None  # (part, event at its start) of the sampled step
        self._waiting: deque[list[tuple[int, Any]]] = deque()
        self.spans: Any = None  # records every span, if there is one: hotbed.telemetry.spans

    def enter(self, part: int) -> int:
        """`part` begins; returns the previous part."""
        now, before = time.perf_counter(), self._part
        self._seconds[before] += now - self._since
        if self.spans is not None:
            self.spans.stretch(PARTS[before], self._since, now)
        self._since, self._part = now, part
        if self._open is not None and self._point is not None:
            self._open.append((part, self._point()))
        return before

    def step(self) -> None:
        """A step begins."""
        self._steps += 1
        if self.spans is not None:
            self.spans.step()
        if self._point is None:
            return
        if self._open is not None:
            self._open.append((OTHER, self._point()))
            self._waiting.append(self._open)
            self._open = None
        if self._steps % SAMPLED == 0 and len(self._waiting) < _MOST_WAITING:
            self._open = [(self._part, self._point())]

    def count_ready(self, num_ready: int) -> None:
        """A batch is requested from the reader, which has `num_ready`."""
        self._asked += 1
        self._ready += num_ready

    def leave(self) -> None:
        """Something other than training follows; a sampled step is discarded."""
        self.enter(OTHER)
        self._open = None
        if self.spans is not None:
            self.spans.aside = True

    def back(self) -> None:
        """Training continues."""
        self.enter(OTHER)
        if self.spans is not None:
            self.spans.aside = False

    def reading(self) -> Times:
        """Times so far, with the sampled steps that the device has finished."""
        self.enter(self._part)
        while self._waiting and self._waiting[0][-1][1].query():
            points = self._waiting.popleft()
            self._sampled += 1
            for (part, begin), (_, end) in pairwise(points):
                self._device[part] += begin.elapsed_time(end) / 1e3
        return Times(tuple(self._seconds), self._steps, tuple(self._device), self._sampled, self._asked, self._ready)
