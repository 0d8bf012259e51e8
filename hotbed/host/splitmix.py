"""splitmix64: the hash of 64-bit numbers, for kernels and for NumPy arrays.

Kernels on CUDA and the torch reference of initial values spell it out again, with the same bits (ops/init_rows); so does the
file that an export takes along (export/score.py).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hotbed.host.jit import njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd, so that number * GOLDEN takes every value once
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)

Words = TypeVar("Words", np.uint64, NDArray[np.uint64])


def mixed(x: Words) -> Words:
    """The finaliser of an array of uint64: a bijection that spreads every input bit over all output bits."""
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


mix = njit(nogil=True, cache=True, inline="always")(mixed)  # the same of one number, in kernels
