"""Ids to keys on the CPU, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotbed.host.jit import njit

_BLOCK = 64


@njit(nogil=True, cache=True)
def make_keys(
    thread: int,
    num_threads: int,
    ids: Any,
    spans: Any,
    base: Any,
    rows: Any,
    hashing: Any,
    has_padding: Any,
    padding: Any,
    keys: Any,
    first_bad: Any,
) -> None:
    """Thread's share of every span; first_bad[thread] is the smallest bad position it met, or -1.

    Spans alternate in blocks, so that the columns of a matrix pass through the first-level cache once, not once each.
    """
    bad = -1
    longest = 0
    for p in range(spans.shape[0]):
        longest = max(longest, spans[p, 1])
    for block in range(0, longest // num_threads + 1, _BLOCK):
        for p in range(spans.shape[0]):
            start, count, stride = spans[p, 0], spans[p, 1], spans[p, 2]
            first = count * thread // num_threads + block
            stop = min(first + _BLOCK, count * (thread + 1) // num_threads)
            first_key, num_rows, hashed, padded, pad = base[p], rows[p], hashing[p], has_padding[p], padding[p]
            if not hashed and not padded:  # the usual case, without a branch: one comparison sees negative ids too
                wrong: Any = False
                for i in range(first, stop):
                    value = ids[start + i * stride]
                    wrong |= np.uint64(value) >= np.uint64(num_rows)
                    keys[start + i * stride] = first_key + value
                if not wrong:
                    continue
            for i in range(first, stop):
                position = start + i * stride
                value = ids[position]
                key = first_key + value
                if hashed:
                    key = first_key + value % num_rows
                elif value < 0 or value >= num_rows:
                    key = -1
                if padded and value == pad:
                    key = -1
                elif key < 0 and (bad < 0 or position < bad):
                    bad = position
                keys[position] = key
    first_bad[thread] = bad
