"""Numbers of 16 bits inside compiled loops, held as uint16; integer arithmetic, because not every CPU knows these types.

Every function takes the type of the numbers as `kind`, FP16 or BF16. They work without branches, so that loops over them
become vector instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from hotbed.host.jit import njit
from hotbed.ops.precision import FP16

_ABS = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)


@njit(nogil=True, inline="always")
def _bits(x: Any) -> Any:
    return np.float32(x).view(np.uint32)


@njit(nogil=True, inline="always")
def _number(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@njit(nogil=True)
def widen(half: Any, kind: Any) -> Any:
    """The float32 that `half` stands for."""
    if kind != FP16:
        return _number(np.uint32(half) << np.uint32(16))
    magnitude = np.uint32(half) & np.uint32(0x7FFF)
    finite = _bits(_number(magnitude << np.uint32(13)) * np.float32(2.0**112))
    exponent = _INFINITY if magnitude >= np.uint32(0x7C00) else np.uint32(0)
    return _number(finite | exponent | ((np.uint32(half) & np.uint32(0x8000)) << np.uint32(16)))


@njit(nogil=True)
def _finish(bits: Any, rounded: Any, infinity: Any, nan: Any) -> Any:
    """Sign, and what is not finite; finite numbers stop at the largest one."""
    magnitude = bits & _ABS
    rounded = min(rounded, infinity - np.uint32(1))
    rounded = infinity if magnitude == _INFINITY else rounded
    rounded = nan if magnitude > _INFINITY else rounded
    return np.uint16(rounded | ((bits >> np.uint32(31)) << np.uint32(15)))


@njit(nogil=True)
def round_nearest(x: Any, kind: Any) -> Any:
    """float32 `x` to the nearest half, to the even one of two."""
    bits = _bits(x)
    magnitude = bits & _ABS
    if kind != FP16:
        odd = (magnitude >> np.uint32(16)) & np.uint32(1)
        rounded = np.uint32(magnitude + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        return _finish(bits, rounded, np.uint32(0x7F80), np.uint32(0x7FC0))
    odd = (magnitude >> np.uint32(13)) & np.uint32(1)
    normal = np.uint32((np.uint32(magnitude + np.uint32(0xFFF) + odd) >> np.uint32(13)) - np.uint32(112 << 10))
    small = np.uint32(_bits(_number(magnitude) + np.float32(0.5)) - np.uint32(0x3F000000))  # 0.5 counts in 2^-24
    rounded = small if magnitude < np.uint32(0x38800000) else normal
    return _finish(bits, rounded, np.uint32(0x7C00), np.uint32(0x7E00))


@njit(nogil=True)
def round_stochastic(x: Any, random: Any, kind: Any) -> Any:
    """float32 `x` to the half below or above, by 32 random bits."""
    bits = _bits(x)
    magnitude = bits & _ABS
    if kind != FP16:
        rounded = np.uint32(magnitude + (random >> np.uint32(16))) >> np.uint32(16)
        return _finish(bits, rounded, np.uint32(0x7F80), np.uint32(0x7FC0))
    normal = np.uint32((np.uint32(magnitude + (random >> np.uint32(19))) >> np.uint32(13)) - np.uint32(112 << 10))
    tiny = magnitude < np.uint32(0x38800000)  # below 2^-14 halves are whole multiples of 2^-24
    units = (_number(magnitude) if tiny else np.float32(0)) * np.float32(2.0**24)
    down = np.int32(units)
    up = np.float32(np.int32(random >> np.uint32(8))) * np.float32(2.0**-24) < units - np.float32(down)
    small = np.uint32(down) + (np.uint32(1) if up else np.uint32(0))
    small = np.uint32(0) if magnitude < np.uint32(0x00800000) else np.uint32(small)
    return _finish(bits, small if tiny else normal, np.uint32(0x7C00), np.uint32(0x7E00))


@njit(nogil=True)
def random_bits(row: Any, d: Any) -> Any:
    """32 random bits for element d of a row; `row` is row_bits(key, salt)."""
    x = np.uint32(np.uint32(row) + np.uint32(np.uint32(d) + np.uint32(1)) * np.uint32(0x9E3779B9))
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32((x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ (x >> np.uint32(16)) ^ np.uint32(row >> np.uint64(32)))


def as_float(value: Any, kind: Any) -> Any:
    """A weight as a number to compute with: a half is widened, a float is itself; decided when a kernel is compiled."""
    raise NotImplementedError("inside compiled kernels only")


@overload(as_float)
def _as_float(value: Any, kind: Any) -> Any:
    def widened(value: Any, kind: Any) -> Any:
        return widen(value, kind)

    def itself(value: Any, kind: Any) -> Any:
        return value

    return widened if value == types.uint16 else itself
