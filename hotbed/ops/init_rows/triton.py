"""Initial values of rows as a Triton kernel; the same bits as the reference.

`row_bits` and `first_values` are for other kernels too, which create rows where they are needed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.init_rows.distributions import NORMAL, UNIFORM, Init, kind_of, scale_of
from hotbed.ops.launch import cdiv, power_of_2

_UNIFORM, _NORMAL = tl.constexpr(UNIFORM), tl.constexpr(NORMAL)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _mix(x):
    """The splitmix64 finaliser over uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _sum_of_pieces(bits):
    return (bits & 0xFFFF) + ((bits >> 16) & 0xFFFF) + ((bits >> 32) & 0xFFFF) + (bits >> 48)


@triton.jit
def row_bits(ids, streams):
    """The 64 bits that (stream, id), both int64, stand for; all elements of the row follow from them."""
    return _mix((ids.to(tl.uint64) + streams.to(tl.uint64)) * GOLDEN)


@triton.jit
def first_values(bits, d, kinds, scales, ANY_UNIFORM: tl.constexpr, ANY_NORMAL: tl.constexpr):
    """float32 elements d of rows; all arguments broadcast. A kind that no row has need not be computed."""
    values = scales + (d * 0).to(tl.float32)
    if ANY_UNIFORM or ANY_NORMAL:
        bits = _mix(bits + (d + 1).to(tl.uint64) * GOLDEN)
    if ANY_UNIFORM:
        odd = 2 * (bits >> 40).to(tl.int32) + 1 - 16777216
        values = tl.where(kinds == _UNIFORM, odd.to(tl.float32) * scales, values)
    if ANY_NORMAL:
        pieces = (_sum_of_pieces(bits) + _sum_of_pieces(_mix(bits ^ GOLDEN))).to(tl.int32)
        values = tl.where(kinds == _NORMAL, (2 * pieces - 524280).to(tl.float32) * scales, values)
    return values


@triton.jit(do_not_specialize=["stream"])
def _fill(
    out, ids, stream, scale, num_rows,
    KIND: tl.constexpr, DIM: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Out [U, D]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_U + tl.arange(0, BLOCK_U)
    here = i < num_rows
    bits = row_bits(tl.load(ids + i, mask=here, other=0), stream)
    for start in tl.static_range(0, DIM, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        values = first_values(bits[:, None], d[None, :], KIND, scale, KIND == _UNIFORM, KIND == _NORMAL)
        tl.store(out + i[:, None] * DIM + d[None, :], values, mask=here[:, None] & (d < DIM)[None, :])


def init_rows(out: Tensor, ids: Tensor, stream: int, init: Init) -> None:
    """Write the initial values of `ids` [U] into `out` [U, D], contiguous float32; `stream` names (seed, table)."""
    num_rows, dim = out.shape
    if num_rows == 0:
        return
    block_d = min(power_of_2(dim), 128)
    block_u = 1024 // block_d
    signed = stream - (1 << 64) if stream >> 63 else stream
    _fill[(cdiv(num_rows, block_u),)](
        out, ids, signed, scale_of(init), num_rows, KIND=kind_of(init), DIM=dim, BLOCK_U=block_u, BLOCK_D=block_d
    )
