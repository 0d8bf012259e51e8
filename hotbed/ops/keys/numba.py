"""Ids to keys on the CPU, compiled."""

from __future__ import annotations

from typing import Any

from numba import njit


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
    """Thread's share of every span; first_bad[thread] is the smallest bad position it met, or -1."""
    bad = -1
    for p in range(spans.shape[0]):
        start, count, stride = spans[p, 0], spans[p, 1], spans[p, 2]
        for i in range(count * thread // num_threads, count * (thread + 1) // num_threads):
            position = start + i * stride
            value = ids[position]
            if has_padding[p] and value == padding[p]:
                keys[position] = -1
                continue
            if hashing[p]:
                value = value % rows[p]
            elif value < 0 or value >= rows[p]:
                if bad < 0 or position < bad:
                    bad = position
                keys[position] = -1
                continue
            keys[position] = base[p] + value
    first_bad[thread] = bad
