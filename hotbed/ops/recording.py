"""Work that is launched again and again, recorded as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hotbed.host.devices import RECORDING
from hotbed.ops.streams import recording_stream

_OFTEN = 6  # batches of a size, before there is a recording for it
_SPARE_BYTES = 1 << 30  # of device memory; with less, cached memory is given back before a recording takes some
_SIZES = 4  # numbers of lookups for which there are recordings


@contextmanager
def recording(pool: Any = None) -> Iterator[Any]:
    """A graph of what this thread launches inside; other threads continue as they are.

    Nothing is garbage collected meanwhile: old graphs and events that go away while a stream is recorded end the process.
    Unlike torch.cuda.graph this does not first wait for the device and give all cached memory back: a run makes half a dozen
    recordings in its first steps, and the reader's pinned memory would be allocated anew after each. Order is kept, though:
    where a recording begins, torch sets the place in its random numbers that all graphs read, on the stream that is recorded.
    Replays launched before may not have read it yet, and the next must not be overtaken: dropout would use other numbers.
    """
    graph = torch.cuda.CUDAGraph()
    device = torch.device("cuda", torch.cuda.current_device())
    own, before = recording_stream(device), torch.cuda.current_stream(device)
    if torch.cuda.mem_get_info(device)[0] < _SPARE_BYTES:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    collects = gc.isenabled()
    gc.disable()
    try:
        own.wait_stream(before)
        with RECORDING, torch.cuda.stream(own):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()
        before.wait_stream(own)
    except BaseException:  # torch stays on the stream, and its generator in the state of being recorded
        torch.cuda.set_stream(before)
        before.wait_stream(own)
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
    """The recordings of one device, by name. They are replayed one at a time, so they share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, Any] = {}  # None: run once

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
            pool = next((one.pool() for one in self._graphs.values() if one is not None), None)  # that of a live graph
            with recording(pool) as graph:
                work()
            self._graphs[name] = graph
        graph.replay()

    def clear(self) -> None:
        """What was recorded no longer holds."""
        had_memory = any(graph is not None for graph in self._graphs.values())
        self._graphs.clear()
        if had_memory:
            torch.cuda.empty_cache()  # nothing else gives the memory of graphs back
