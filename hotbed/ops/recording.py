"""Recording kernels as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
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
