"""CUDA streams of our own, and points on them, cheaply.

torch gives streams out of a pool of 32, again and again: after a while two threads launch on one, and what one of them launches
while the other records a graph is recorded instead of run. So threads that run while graphs are recorded, and the recording
itself, take streams from here, which are used by nothing else.

`torch.cuda.current_stream()` and all that asks it take 40 us of Python on a slow host, a tenth of a training step; these take
one or two. On the CPU there are no streams: points are None.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from hotbed.errors import HotbedError

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream
_spare: dict[int, list[Any]] = {}  # by device: unused streams
_recording: dict[int, Any] = {}  # by device: the stream on which graphs are recorded
_changing = threading.Lock()
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
    """The current stream waits for the point."""
    if point is not None:
        current(device).wait_event(point)


def check_device(device: torch.device) -> None:
    """Raise what broke a CUDA device, if anything did; without waiting."""
    if device.type == "cuda":
        current(device).query()


def take_stream(device: torch.device) -> Any:
    """A stream for exclusive use until it is given back; None on the CPU."""
    if device.type != "cuda":
        return None
    with _changing:
        spare = _spare.setdefault(device.index or 0, [])
        return spare.pop() if spare else _new_stream(device)


def give_stream(device: torch.device, stream: Any) -> None:
    """The stream may be taken by others; what was launched on it still runs."""
    if stream is not None:
        with _changing:
            _spare[device.index or 0].append(stream)


def recording_stream(device: torch.device) -> Any:
    """The one on which graphs are recorded."""
    with _changing:
        index = device.index or 0
        if index not in _recording:
            _recording[index] = _new_stream(device)
        return _recording[index]


def _new_stream(device: torch.device) -> Any:
    """In torch's context, also where this thread has not used the device yet."""
    driver, context, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    error = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index or 0)
    error = error or driver.cuCtxPushCurrent_v2(context)
    if not error:
        error = driver.cuStreamCreate(ctypes.byref(pointer), _NON_BLOCKING)
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(device.index or 0)  # torch holds it
    if error:
        raise HotbedError(f"the CUDA driver makes no stream on {device}: error {error}")
    return torch.cuda.ExternalStream(pointer.value, device)
