"""Ids to keys as a Triton kernel: one program per block of one span."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.keys.addresses import Addresses, FirstBad, flags_of
from hotbed.ops.launch import Launch, cdiv
from hotbed.ops.lookups import Span, span_array

_BLOCK = 256


@triton.jit(do_not_specialize=["index"])
def _make_keys(ids, plan, keys, flags, host_flags, index, BLOCK: tl.constexpr):
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
    local = value
    if hashing != 0:  # a division of 64 bits takes longer than all the rest
        rest = value % rows
        local = tl.where(rest < 0, rest + rows, rest)
    bad = here & wanted & ((local < 0) | (local >= rows))
    tl.store(keys + position, tl.where(wanted & (bad == 0), base + local, -1), mask=here)
    first = tl.min(tl.where(bad, position, 4611686018427387904), axis=0)
    if first < 4611686018427387904:
        tl.atomic_min(flags + 2 * index, first)
        tl.store(host_flags + 2 * index, first)


def _plan(spans: tuple[Span, ...], addresses: Addresses, device: torch.device) -> tuple[Tensor, int, bool]:
    """([P, 8] on the device, length of the longest span, whether keys fit 32 bits).

    Batches of one shape share it; it is found by the identity of the tuple.
    """
    found = addresses.on_device.get(id(spans))
    if found is None or found[0] is not spans:
        if len(addresses.on_device) >= 64:
            addresses.on_device.clear()
        columns = [column.astype(np.int64)[:, None] for column in addresses.columns]
        plan = torch.from_numpy(np.concatenate([span_array(spans), *columns], axis=1)).to(device)
        small = int((addresses.base + addresses.rows).max(initial=0)) < 2**31
        longest = max((span.length for span in spans), default=0)
        found = addresses.on_device[id(spans)] = (spans, plan, longest, small)
    return found[1], found[2], found[3]


_launch_keys = Launch(_make_keys)


def make_keys(ids: Tensor, spans: tuple[Span, ...], addresses: Addresses) -> tuple[Tensor, FirstBad]:
    """Keys [L] of ids [L], int32 where they fit, and the first position whose id lies outside its table."""
    plan, longest, small = _plan(spans, addresses, ids.device)
    keys = torch.empty(ids.shape, dtype=torch.int32 if small else torch.int64, device=ids.device)
    flags = flags_of(ids.device)
    index = flags.take()
    if longest:
        grid = (len(spans), cdiv(longest, _BLOCK))
        key = (small, ids.data_ptr() % 16)
        _launch_keys(grid, key, ids, plan, keys, flags.on_device, flags.on_host, index, _BLOCK)
    return keys, FirstBad(None, flags, index)
