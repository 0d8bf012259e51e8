"""Sums per row on the CPU, compiled. A row belongs to one thread, which adds its gradients in the order of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotbed.host.intrinsics import prefetch
from hotbed.host.jit import njit

_AHEAD = 8  # lookups between asking for a sum and adding to it


@njit(nogil=True, cache=True, error_model="numpy")
def sum_by_row(thread: int, num_threads: int, slots: Any, out_rows: Any, scale: Any, grad: Any, out: Any) -> None:
    """out[slots[i]] = the sum of grad[out_rows[i]] * scale[i]; negative slots are padding.

    out_rows is empty where lookup i has gradient i, scale where all are 1. The thread sums every num_threads-th row.
    """
    D = np.uint64(grad.shape[1])
    for row in range(thread, out.shape[0], num_threads):
        for d in range(D):
            out[row, d] = 0
    for i in range(slots.size):
        if i + _AHEAD < slots.size and slots[i + _AHEAD] >= 0:
            for column in range(0, grad.shape[1], 16):
                prefetch(out, slots[i + _AHEAD], column)
        row = slots[i]
        if row < 0 or (num_threads > 1 and row % num_threads != thread):
            continue
        to = np.uint64(row)
        o = np.uint64(out_rows[i]) if out_rows.size > 0 else np.uint64(i)
        if scale.size == 0:
            for d in range(D):
                out[to, d] += grad[o, d]
        else:
            factor = scale[i]
            for d in range(D):
                out[to, d] += grad[o, d] * factor
