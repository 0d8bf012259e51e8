"""Lookup and pooling on the CPU, compiled. Threads take disjoint runs of lookups or bags.

Weights are floats, or uint16 that stand for numbers of a `kind` (see ops/precision).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotbed.host.intrinsics import prefetch
from hotbed.host.jit import njit
from hotbed.ops.precision.numba import as_float

_AHEAD = 24  # lookups between asking for a row and reading it


@njit(nogil=True, cache=True, inline="always")
def _ask(numbers: Any, slot: Any, dim: Any) -> None:
    if slot >= 0:
        for column in range(0, dim, 16):
            prefetch(numbers, slot, column)


@njit(nogil=True, cache=True)
def lookup_single(thread: int, num_threads: int, numbers: Any, kind: int, slots: Any, out: Any) -> None:
    """out [L, D]: one row per lookup."""
    num_lookups, dim = out.shape
    D = np.uint64(dim)
    stop = num_lookups * (thread + 1) // num_threads
    for i in range(num_lookups * thread // num_threads, stop):
        if i + _AHEAD < stop:
            _ask(numbers, slots[i + _AHEAD], dim)
        slot = slots[i]
        if slot >= 0:
            s = np.uint64(slot)
            for d in range(D):
                out[i, d] = as_float(numbers[s, d], kind)
        else:
            for d in range(D):
                out[i, d] = 0


@njit(nogil=True, cache=True)
def lookup_bags(
    thread: int,
    num_threads: int,
    numbers: Any,
    kind: int,
    slots: Any,
    scale: Any,
    starts: Any,
    out_rows: Any,
    out: Any,
) -> None:
    """out [O, D]: one sum per bag, in the order of its values; scale is [L] or empty."""
    num_bags, dim = starts.shape[0] - 1, out.shape[1]
    D = np.uint64(dim)
    scaled = scale.shape[0] > 0
    last = num_bags * (thread + 1) // num_threads
    for n in range(num_bags * thread // num_threads, last):
        o = np.uint64(out_rows[n])
        for d in range(D):
            out[o, d] = 0
        for i in range(starts[n], starts[n + 1]):
            if i + _AHEAD < starts[last]:
                _ask(numbers, slots[i + _AHEAD], dim)
            if slots[i] < 0:
                continue
            s = np.uint64(slots[i])
            if scaled:
                factor = scale[i]
                for d in range(D):
                    out[o, d] += as_float(numbers[s, d], kind) * factor
            else:
                for d in range(D):
                    out[o, d] += as_float(numbers[s, d], kind)
