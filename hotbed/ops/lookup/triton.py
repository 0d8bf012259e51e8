"""Lookup and pooling as Triton kernels. A program owns whole output rows, so every sum has one order: that of the bag."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.launch import Launch, cdiv, power_of_2
from hotbed.ops.lookup.reference import result_type
from hotbed.ops.lookups import Lookups


@triton.jit(do_not_specialize=["num_lookups"])
def _single(numbers, slots, out, num_lookups, width, dim: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr):
    """Out [L, D]: one row per lookup."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    here = i < num_lookups
    slot = tl.load(slots + i, mask=here, other=-1).to(tl.int64)
    for start in range(0, dim, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        inside = (d < dim)[None, :]
        rows = tl.load(numbers + slot[:, None] * width + d[None, :], mask=(slot >= 0)[:, None] & inside, other=0.0)
        tl.store(out + i[:, None] * dim + d[None, :], rows.to(out.dtype.element_ty), mask=here[:, None] & inside)


@triton.jit(do_not_specialize=["num_bags"])
def _bags(
    numbers,
    slots,
    scale,
    starts,
    out_rows,
    out,
    num_bags,
    width,
    dim: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Out [O, D]: the sum of each bag, value after value."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = n < num_bags
    first = tl.load(starts + n, mask=here, other=0)
    length = tl.load(starts + n + 1, mask=here, other=0) - first
    row = tl.load(out_rows + n, mask=here, other=0).to(tl.int64)
    longest = tl.max(length, axis=0)
    for start in range(0, dim, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        inside = (d < dim)[None, :]
        total = tl.zeros([BLOCK_N, BLOCK_D], dtype=out.dtype.element_ty)
        j = 0
        while j < longest:  # ends: j grows
            slot = tl.load(slots + first + j, mask=j < length, other=-1).to(tl.int64)
            value = tl.load(numbers + slot[:, None] * width + d[None, :], mask=(slot >= 0)[:, None] & inside, other=0.0)
            value = value.to(out.dtype.element_ty)
            if SCALED:
                value *= tl.load(scale + first + j, mask=j < length, other=0.0)[:, None]
            total += value
            j += 1
        tl.store(out + row[:, None] * dim + d[None, :], total, mask=here[:, None] & inside)


_launch_single, _launch_bags = Launch(_single), Launch(_bags)


def lookup(numbers: Tensor, lookups: Lookups, dim: int) -> Tensor:
    """Pooled vectors [O, D], at least float32."""
    out = torch.empty(lookups.num_out, dim, dtype=result_type(numbers), device=numbers.device)
    block_d = min(power_of_2(dim), 256)
    rows_at_once = max(1, 2048 // block_d)
    width = numbers.stride(0)
    key = (numbers.dtype, lookups.slots.dtype, dim, width, lookups.scale is None)
    if lookups.bags is None:
        count = lookups.slots.shape[0]
        if count:
            _launch_single(
                (cdiv(count, rows_at_once),),
                key,
                numbers,
                lookups.slots,
                out,
                count,
                width,
                dim,
                rows_at_once,
                block_d,
            )
        return out
    starts, out_rows, scale, _ = lookups.bags
    num_bags = out_rows.shape[0]
    if num_bags:
        _launch_bags(
            (cdiv(num_bags, rows_at_once),), key, numbers, lookups.slots, out if scale is None else scale, starts,
            out_rows, out, num_bags, width, dim, scale is not None, rows_at_once, block_d,
        )  # fmt: skip
    return out
