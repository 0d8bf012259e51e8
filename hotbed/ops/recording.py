"""Work that is launched again and again, recorded as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def recording(pool: Any = None) -> Iterator[Any]:
    """A graph of what this thread launches inside; other threads go on as they are.

    Nothing is garbage collected meanwhile: old graphs and events that go away while a stream is recorded end the process.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield graph
    finally:
        if collects:
            gc.enable()


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
