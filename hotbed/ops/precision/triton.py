"""Numbers of 16 bits inside Triton kernels, loaded and stored as uint16; KIND is FP16 or BF16."""

from __future__ import annotations

import triton
import triton.language as tl

from hotbed.ops.precision import FP16

_FP16 = tl.constexpr(FP16)


@triton.jit
def widen(half, KIND: tl.constexpr):
    """The float32 that uint16 `half` stands for."""
    if KIND == _FP16:
        return half.to(tl.float16, bitcast=True).to(tl.float32)
    return (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _finish(bits, rounded, INFINITY: tl.constexpr, NAN: tl.constexpr):
    """Sign, and what is not finite; finite numbers stop at the largest one."""
    magnitude = bits & 0x7FFFFFFF
    rounded = tl.where(magnitude < 0x7F800000, tl.minimum(rounded, INFINITY - 1), INFINITY)
    rounded = tl.where(magnitude > 0x7F800000, NAN, rounded)
    return (rounded | ((bits >> 31) << 15)).to(tl.uint16)


@triton.jit
def round_nearest(x, KIND: tl.constexpr):
    """float32 `x` to the nearest half, to the even one of two."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if KIND == _FP16:
        normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - 114688
        tiny = magnitude < 0x38800000  # below 2^-14 halves are whole multiples of 2^-24, as floats near 0.5 are
        small = (tl.where(tiny, magnitude, 0).to(tl.float32, bitcast=True) + 0.5).to(tl.uint32, bitcast=True)
        return _finish(bits, tl.where(tiny, small - 0x3F000000, normal), 0x7C00, 0x7E00)
    return _finish(bits, (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16, 0x7F80, 0x7FC0)


@triton.jit
def round_stochastic(x, random, KIND: tl.constexpr):
    """float32 `x` to the half below or above, by 32 random bits."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if KIND == _FP16:
        normal = ((magnitude + (random >> 19)) >> 13) - 114688
        tiny = magnitude < 0x38800000  # below 2^-14 halves are whole multiples of 2^-24
        units = tl.where(tiny, magnitude, 0).to(tl.float32, bitcast=True) * 16777216.0
        down = units.to(tl.int32)
        up = (random >> 8).to(tl.int32).to(tl.float32) * 5.960464477539063e-08 < units - down.to(tl.float32)
        small = tl.where(magnitude < 0x00800000, 0, down + up.to(tl.int32)).to(tl.uint32)
        return _finish(bits, tl.where(tiny, small, normal), 0x7C00, 0x7E00)
    return _finish(bits, (magnitude + (random >> 16)) >> 16, 0x7F80, 0x7FC0)


@triton.jit
def random_bits(row, d):
    """32 random bits for elements d of rows; `row` is row_bits(key, salt)."""
    x = row.to(tl.uint32) + (d + 1).to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16) ^ (row >> 32).to(tl.uint32)
