"""Points on CUDA streams, cheaply.

`torch.cuda.current_stream()` and all that asks it take 40 us of Python on a slow host, a tenth of a training step; these take
one or two. On the CPU there are no streams: points are None.
"""

from __future__ import annotations

from typing import Any

import torch

_streams: dict[Any, Any] = {}


def current(device: torch.device) -> Any:
    """The current stream of a CUDA device."""
    key = torch._C._cuda_getCurrentStream(device.index or 0)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


def mark(device: torch.device, *, timed: bool = False) -> Any:
    """A point on the current stream."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timed)
    event.record(current(device))
    return event


def after(device: torch.device, point: Any) -> None:
    """The current stream goes on when the point is reached."""
    if point is not None:
        current(device).wait_event(point)


def side_stream(device: torch.device) -> Any:
    """A stream of the thread's own: all that the thread launches from now on goes there."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    torch.cuda.set_stream(stream)
    return stream
