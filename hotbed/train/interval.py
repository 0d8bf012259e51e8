"""What happened since the last line of metrics.jsonl: losses, logits, labels and seconds.

Tensors stay on the device until the line is written: one synchronisation per line instead of one per step. A checkpoint
carries the open interval, so that a resumed run writes the same line. The seconds of a run are kept in its Progress: all of
them, and those of training proper, without evaluations, checkpoints and the compilation of kernels.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.host.compiling import compile_seconds
from hotbed.telemetry.observer import Progress
from hotbed.train.metrics import auc, auc_of_tensors

_KEPT_RATES = 10_000  # lines whose speed is remembered


class IntervalSummary(NamedTuple):
    """Means over the samples of an interval."""

    loss: float
    auc: float  # nan when the interval has one class only
    samples: int


class Interval:
    """Grows by one entry per step."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []  # [] each
        self._logits: list[Tensor] = []  # [B] each
        self._labels: list[Tensor] = []  # [B] each

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """One step."""
        self._losses.append(loss.detach())
        self._logits.append(logits.detach())
        self._labels.append(labels)

    def first_bad(self) -> int | None:
        """Wait for the device; the offset of the first step whose loss is not finite."""
        if not self._losses:
            return None
        bad = torch.nonzero(~torch.isfinite(torch.stack(self._losses).cpu()))
        return int(bad[0]) if len(bad) else None

    def summary(self) -> IntervalSummary:
        """Wait for the device and sum up; the losses must be numbers."""
        losses = torch.stack(self._losses).cpu().double().numpy()
        sizes = np.array([len(one) for one in self._labels])
        labels, logits = torch.cat(self._labels), torch.cat(self._logits).float()
        on_cpu = labels.device.type == "cpu"
        score = auc(labels.numpy(), logits.numpy()) if on_cpu else auc_of_tensors(labels, logits)
        return IntervalSummary(float((losses * sizes).sum() / sizes.sum()), score, int(sizes.sum()))

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        if not self._losses:
            return {}
        return {
            "interval.losses": torch.stack(self._losses).cpu(),
            "interval.sizes": torch.tensor([len(one) for one in self._labels], device="cpu"),
            "interval.logits": torch.cat(self._logits).cpu(),
            "interval.labels": torch.cat(self._labels).cpu(),
        }

    def emptied(self) -> Interval:
        """The same number of steps, without samples."""
        interval = Interval()
        for loss, logits, labels in zip(self._losses, self._logits, self._labels):
            interval.add(torch.zeros_like(loss), logits[:0], labels[:0])
        return interval

    @classmethod
    def from_state(cls, state: dict[str, Tensor], device: torch.device) -> Interval:
        """The interval a checkpoint was taken in."""
        interval = cls()
        if "interval.losses" in state:
            sizes = state["interval.sizes"].tolist()
            losses, logits, labels = (
                state[f"interval.{name}"].clone().to(device) for name in ("losses", "logits", "labels")
            )
            interval._losses = list(losses)
            interval._logits = list(torch.split(logits, sizes))
            interval._labels = list(torch.split(labels, sizes))
        return interval


class RunClock:
    """The clock of this session of a run, which begins with its first step and may continue earlier sessions."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._session_since = self._running_since = time.perf_counter()
        self._compiled_before = compile_seconds()
        self._seconds_before = 0.0
        self._line_seconds = 0.0
        self._carried_steps = 0  # of the interval that an earlier session began
        self._rates: deque[float] = deque(maxlen=_KEPT_RATES)  # samples/s of the lines that this session wrote

    @property
    def steady_rate(self) -> float | None:
        """Samples/s between log lines: the median without the first, in which kernels are loaded and steps recorded."""
        return statistics.median(list(self._rates)[1:]) if len(self._rates) > 2 else None

    def continue_from(self, progress: Progress, carried_steps: int) -> None:
        """Add to the seconds of earlier sessions; the interval holds `carried_steps` steps of them."""
        self._carried_steps = carried_steps
        self._seconds_before = progress.seconds
        self._line_seconds = progress.train_seconds

    def begin(self) -> None:
        """The session starts, and training with it."""
        self._session_since = time.perf_counter()
        self.resume()

    def resume(self) -> None:
        """Start the clock of training proper."""
        self._running_since, self._compiled_before = time.perf_counter(), compile_seconds()

    def pause(self, progress: Progress) -> None:
        """Stop it, and start it anew."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._running_since
        progress.train_seconds += max(seconds - (compile_seconds() - self._compiled_before), 0.0)
        self.resume()
        self.read(progress)

    def read(self, progress: Progress) -> float:
        """The seconds of all sessions."""
        progress.seconds = self._seconds_before + time.perf_counter() - self._session_since
        return progress.seconds

    def end_line(self, progress: Progress, num_samples: int, num_steps: int) -> tuple[float, float | None]:
        """(seconds of training, samples/s) since the last line of the log; of a resumed run, of its own steps."""
        seconds = progress.train_seconds - self._line_seconds
        self._line_seconds = progress.train_seconds
        own, self._carried_steps = num_samples * (1 - self._carried_steps / num_steps), 0
        rate = own / seconds if seconds > 0 and own else None
        self._rates.extend([] if rate is None else [rate])
        return seconds, rate
