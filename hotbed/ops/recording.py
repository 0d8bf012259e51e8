"""Work that is launched again and again, recorded as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hotbed.host.pinned import RECORDING
from hotbed.ops.streams import recording_stream

_OFTEN = 6  # batches of a size, before there is a recording for it
_SIZES = 4  # numbers of lookups for which there are recordings


@contextmanager
def recording(pool: Any = None) -> Iterator[Any]:
    """A graph of what this thread launches inside; other threads go on as they are.

    Nothing is garbage collected meanwhile: old graphs and events that go away while a stream is recorded end the process.
    """
    graph = torch.cuda.CUDAGraph()
    device = torch.device("cuda", torch.cuda.current_device())
    own, before = recording_stream(device), torch.cuda.current_stream(device)
    collects = gc.isenabled()
    gc.disable()
    try:
        with RECORDING, torch.cuda.graph(graph, pool=pool, stream=own, capture_error_mode="thread_local"):
            yield graph
    except BaseException:  # torch stays on the stream, and its generator in the state of being recorded
        torch.cuda.set_stream(before)
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    finally:
        if collects:
            gc.enable()


class RecordedSizes:
    """How many lookups recordings are made for: a batch takes the smallest that holds it.

    Padding is sorted like lookups. So batches that would be padded by more than an eighth get a recording of their own size,
    with a little to spare, once several of that size have come; a single short batch takes what is there.
    """

    def __init__(self, most: int) -> None:
        self._sizes = [max(1, most)]  # ascending
        self._seen: dict[int, int] = {}  # batches by the size that would have been their own

    def size_for(self, num_lookups: int) -> int:
        """Lookups of the recording that a batch is replayed with."""
        size = next(size for size in self._sizes if size >= num_lookups)
        if 8 * (size - num_lookups) <= size or len(self._sizes) == _SIZES:
            return size
        own = _a_little_more(num_lookups)
        self._seen[own] = self._seen.get(own, 0) + 1
        if self._seen[own] < _OFTEN or own >= size:
            return size
        self._sizes = sorted([*self._sizes, own])
        return own


def _a_little_more(count: int) -> int:
    """The next of about fifty steps between two powers of two, 1.6 % above."""
    count += count // 64
    step = 1 << max(0, count.bit_length() - 6)
    return max(1, -(-count // step) * step)


class Recordings:
    """Of one device, by name. They are replayed one at a time, so they share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, Any] = {}  # None: run once
        self._pool: Any = None

    def run(self, name: Hashable, work: Callable[[], None]) -> None:
        """The first time as it is, which compiles the kernels; then recorded, and replayed from then on."""
        if name not in self._graphs:
            work()
            self._graphs[name] = None
            return
        if self._device.type != "cuda":
            work()
            return
        graph = self._graphs[name]
        if graph is None:
            with recording(self._pool) as graph:
                work()
            self._graphs[name], self._pool = graph, graph.pool()
        graph.replay()

    def clear(self) -> None:
        """What was recorded no longer holds."""
        self._graphs.clear()
