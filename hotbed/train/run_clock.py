"""The seconds of a run, kept in its Progress: all of them, and those of training proper.

Training proper leaves out evaluations and checkpoints, and kernels that were compiled meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

import torch

from hotbed.host.compiling import compile_seconds
from hotbed.telemetry.observer import Progress

_KEPT_RATES = 10_000  # lines whose speed is remembered


class RunClock:
    """Of this session of a run, which begins with its first step and may continue others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._session_since = self._running_since = time.perf_counter()
        self._compiled_before = compile_seconds()
        self._seconds_before = 0.0
        self._line_seconds = 0.0
        self._rates: deque[float] = deque(maxlen=_KEPT_RATES)  # samples/s of the lines that this session wrote

    @property
    def steady_rate(self) -> float | None:
        """Samples/s between log lines: the median without the first, in which kernels are loaded and steps recorded."""
        return statistics.median(list(self._rates)[1:]) if len(self._rates) > 2 else None

    def continue_from(self, progress: Progress) -> None:
        """Add to the seconds of earlier sessions."""
        self._seconds_before = progress.seconds
        self._line_seconds = progress.train_seconds

    def begin(self) -> None:
        """The session starts, and training with it."""
        self._session_since = time.perf_counter()
        self.go_on()

    def go_on(self) -> None:
        """Start the clock of training proper."""
        self._running_since, self._compiled_before = time.perf_counter(), compile_seconds()

    def pause(self, progress: Progress) -> None:
        """Stop it, and start it anew."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._running_since
        progress.train_seconds += max(seconds - (compile_seconds() - self._compiled_before), 0.0)
        self.go_on()
        self.read(progress)

    def read(self, progress: Progress) -> float:
        """The seconds of all sessions."""
        progress.seconds = self._seconds_before + time.perf_counter() - self._session_since
        return progress.seconds

    def end_line(self, progress: Progress, num_samples: int) -> tuple[float, float | None]:
        """(seconds of training, samples/s) since the last line of the log."""
        seconds = progress.train_seconds - self._line_seconds
        self._line_seconds = progress.train_seconds
        rate = num_samples / seconds if seconds > 0 else None
        self._rates.extend([] if rate is None else [rate])
        return seconds, rate
