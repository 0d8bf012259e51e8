"""How long a GPU works: the time in which at least one kernel or copy runs on it, by torch's profiler.

A step whose GPU works for less time than the step takes waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]  # start, end


class BusyClock:
    """Profiles from `start` to `stop`, on CUDA; elsewhere `start` says that there is nothing to see."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: Any = None

    def __enter__(self) -> BusyClock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:  # it was left on the way
            self._profile.stop()
            self._profile = None

    def start(self) -> bool:
        """From now on; whether this device has a time."""
        if self._device.type != "cuda":
            return False
        torch.cuda.synchronize(self._device)
        self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        self._profile.start()
        return True

    def stop(self) -> float:
        """Milliseconds in which the GPU worked since `start`."""
        torch.cuda.synchronize(self._device)
        profiled, self._profile = self._profile, None
        profiled.stop()
        return covered(_work(profiled.events())) / 1e3


def _work(events: Iterable[Any]) -> Iterator[Span]:
    """Kernels and copies, in microseconds; not the names that a program gives to stretches of its time."""
    for event in events:
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            yield event.time_range.start, event.time_range.end


def covered(spans: Iterable[Span]) -> float:
    """The length of what spans cover together; where they overlap it counts once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
