"""Initial values of rows in plain torch integer arithmetic; runs on every device with the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.init_rows.distributions import Constant, Init, Uniform, scale_of

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser over int64 (products wrap; shifts are made logical by a mask)."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def row_bits(ids: Tensor, stream: int) -> Tensor:
    """The 64 bits, as int64 [U], that (stream, id) stand for; all elements of the row follow from them."""
    return _mix((ids + _signed(stream)) * _signed(_GOLDEN))


def init_rows(out: Tensor, ids: Tensor, stream: int, init: Init, first: int = 0) -> None:
    """Write the initial values of `ids` [U] into `out` [U, D]: elements `first` to first + D; `stream` names (seed, table)."""
    if isinstance(init, Constant):
        out.fill_(init.value)
        return
    row = row_bits(ids, stream).unsqueeze(1)
    counter = torch.arange(first + 1, first + out.shape[1] + 1, device=ids.device).unsqueeze(0)
    bits = _mix(row + counter * _signed(_GOLDEN))
    scale = torch.tensor(scale_of(init), dtype=out.dtype, device=out.device)
    if isinstance(init, Uniform):
        odd = 2 * ((bits >> 40) & 0xFFFFFF) + 1 - (1 << 24)
        out.copy_(odd.to(out.dtype) * scale)
        return
    more = _mix(bits ^ _signed(_GOLDEN))
    centred = torch.full_like(bits, -8 * 0xFFFF)
    for word in (bits, more):
        for shift in (0, 16, 32, 48):
            centred += 2 * ((word >> shift) & 0xFFFF)
    out.copy_(centred.to(out.dtype) * scale)
