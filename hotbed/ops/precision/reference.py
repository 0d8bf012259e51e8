"""Rounding float32 to 16 bits in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.init_rows.reference import row_bits

_U32 = 0xFFFFFFFF


def random_bits(keys: Tensor, salt: int, dim: int) -> Tensor:
    """32 random bits, as int64 [U, D], for the elements of the rows of `keys` [U] in the update that `salt` names."""
    row = row_bits(keys, salt).unsqueeze(1)
    place = torch.arange(1, dim + 1, device=keys.device).unsqueeze(0)
    x = (row + place * 0x9E3779B9) & _U32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _U32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _U32
    return x ^ (x >> 16) ^ ((row >> 32) & _U32)


def round_nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `x` in `dtype`; the largest number stands for all beyond it."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def round_stochastic(x: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `x` in `dtype`, up or down by the bits of `random` (int64, 32 bits each)."""
    bits = x.contiguous().view(torch.int32).long() & _U32
    sign, magnitude = (bits >> 31) << 15, bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        infinity, nan, rounded = 0x7F80, 0x7FC0, (magnitude + (random >> 16)) >> 16
    else:
        infinity, nan, rounded = 0x7C00, 0x7E00, _fp16_magnitude(magnitude, random)
    rounded = torch.where(magnitude < 0x7F800000, rounded.clamp(max=infinity - 1), infinity)
    rounded = torch.where(magnitude > 0x7F800000, nan, rounded)
    return (sign | rounded).to(torch.int16).view(dtype)


def _fp16_magnitude(magnitude: Tensor, random: Tensor) -> Tensor:
    normal = ((magnitude + (random >> 19)) >> 13) - (112 << 10)
    units = magnitude.to(torch.int32).view(torch.float32) * 2.0**24  # below 2^-14 numbers are whole multiples of 2^-24
    down = units.trunc().clamp(max=1024)
    up = (random >> 8) * 2.0**-24 < units - down
    small = torch.where(magnitude < 0x00800000, 0, down.long() + up)
    return torch.where(magnitude < 0x38800000, small, normal)
