"""Ids to keys as a Triton kernel: one program per block of one span."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.keys.addresses import Addresses
from hotbed.ops.lookups import Span, span_array

_BLOCK = 1024
_NONE = 2**62


@triton.jit
def _make_keys(ids, plan, keys, first_bad, BLOCK: tl.constexpr):
    """plan [P, 8]: start, length, stride, base, rows, hashing, has_padding, padding."""
    p = plan + tl.program_id(0) * 8
    start, length, stride = tl.load(p), tl.load(p + 1), tl.load(p + 2)
    base, rows, hashing = tl.load(p + 3), tl.load(p + 4), tl.load(p + 5)
    has_padding, padding = tl.load(p + 6), tl.load(p + 7)
    i = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < length
    position = start + i * stride
    value = tl.load(ids + position, mask=here, other=0)
    wanted = (has_padding == 0) | (value != padding)
    rest = value % rows
    local = tl.where(hashing != 0, tl.where(rest < 0, rest + rows, rest), value)
    bad = here & wanted & ((local < 0) | (local >= rows))
    tl.store(keys + position, tl.where(wanted & (bad == 0), base + local, -1), mask=here)
    tl.atomic_min(first_bad, tl.min(tl.where(bad, position, 4611686018427387904), axis=0))


@lru_cache(maxsize=16)
def _plan(spans: tuple[Span, ...], addresses: bytes, device: torch.device) -> Tensor:
    """The spans and addresses on the device; equal shapes of batches share one copy."""
    rest = np.frombuffer(addresses, dtype=np.int64).reshape(len(spans), 5)
    return torch.from_numpy(np.concatenate([span_array(spans), rest], axis=1)).to(device)


def make_keys(ids: Tensor, spans: tuple[Span, ...], addresses: Addresses) -> tuple[Tensor, int]:
    """Keys [L] of ids [L], and the first position whose id lies outside its table, or -1. Waits for the device."""
    keys = torch.empty_like(ids)
    longest = max((span.length for span in spans), default=0)
    if longest == 0:
        return keys, -1
    columns = np.stack([column.astype(np.int64) for column in addresses], axis=1)
    first_bad = torch.full([1], _NONE, dtype=torch.int64, device=ids.device)
    plan = _plan(spans, columns.tobytes(), ids.device)
    _make_keys[(len(spans), triton.cdiv(longest, _BLOCK))](ids, plan, keys, first_bad, BLOCK=_BLOCK)
    found = int(first_bad.item())
    return keys, -1 if found == _NONE else found
