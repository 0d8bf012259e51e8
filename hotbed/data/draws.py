"""Random words from counters: a 64-bit number from (key, counter), with no state to carry.

In: keys made of a few integers (seed, epoch, column ...). Out: well-mixed 64-bit words and permutations. The same on every
machine, for any order and any number of threads, because nothing but integer arithmetic takes part. Not for secrets.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from hotbed.data.hash import mix

GOLDEN = 0x9E3779B97F4A7C15  # odd, so that counter * GOLDEN meets every word once
_MASK = (1 << 64) - 1


def key_of(*parts: int) -> int:
    """One 64-bit key out of several integers; their order matters."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = _mixed(key + np.uint64((GOLDEN + part) & _MASK))
    return int(key[0])


def words(key: int, count: int) -> NDArray[np.uint64]:
    """The first `count` words of a key's stream."""
    return _mixed(np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key))


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """A permutation of range(count) that depends on the key alone."""
    return np.argsort(words(key, count), kind="stable").astype(np.int64, copy=False)


@njit(nogil=True, cache=True)
def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    out = np.empty_like(values)
    for i in range(len(values)):
        out[i] = mix(values[i])
    return out
