"""Ids to keys as a Triton kernel: one program per block of one span."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.keys.addresses import Addresses
from hotbed.ops.keys.first_bad import NONE, FirstBad
from hotbed.ops.lookups import Span, span_array

_BLOCK = 1024


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
    first = tl.min(tl.where(bad, position, 4611686018427387904), axis=0)
    if first < 4611686018427387904:
        tl.atomic_min(first_bad, first)


def _plan(spans: tuple[Span, ...], addresses: Addresses, device: torch.device) -> tuple[Tensor, int]:
    """([P, 8] on the device, length of the longest span); batches of one shape share it, found by the tuple's identity."""
    found = addresses.on_device.get(id(spans))
    if found is None or found[0] is not spans:
        if len(addresses.on_device) >= 64:
            addresses.on_device.clear()
        columns = [column.astype(np.int64)[:, None] for column in addresses.columns]
        plan = torch.from_numpy(np.concatenate([span_array(spans), *columns], axis=1)).to(device)
        found = addresses.on_device[id(spans)] = (spans, plan, max((span.length for span in spans), default=0))
    return found[1], found[2]


def make_keys(ids: Tensor, spans: tuple[Span, ...], addresses: Addresses) -> tuple[Tensor, FirstBad]:
    """Keys [L] of ids [L], int32 where they fit, and the first position whose id lies outside its table."""
    small = int((addresses.base + addresses.rows).max(initial=0)) < 2**31
    keys = torch.empty(ids.shape, dtype=torch.int32 if small else torch.int64, device=ids.device)
    first_bad = torch.full([1], NONE, dtype=torch.int64, device=ids.device)
    plan, longest = _plan(spans, addresses, ids.device)
    if longest:
        _make_keys[(len(spans), triton.cdiv(longest, _BLOCK))](ids, plan, keys, first_bad, BLOCK=_BLOCK)
    return keys, FirstBad(first_bad)
