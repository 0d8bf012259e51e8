"""Ids to keys as a Triton kernel: one program per block of one span."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.keys.addresses import NONE, Addresses, FirstBad, Flags, flags_of
from hotbed.ops.launch import Launch
from hotbed.ops.lookups import Span, span_array

_BLOCK = 256
BATCHES = 512  # whose addresses are kept


@triton.jit(do_not_specialize=["index", "place", "offset"])
def _make_keys(
    ids, plan, keys, flags, host_flags, state, index, place, offset, BATCHES: tl.constexpr, BLOCK: tl.constexpr
):
    """plan [P, 8]: start, length, stride, base, rows, hashing, has_padding, padding.

    With BATCHES, `ids` holds the addresses of that many batches' ids, and the batch is number state[place] + offset.
    """
    if BATCHES:
        number = tl.load(state + place) + offset
        ids = tl.load(ids + number % BATCHES).to(tl.pointer_type(tl.int64))
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


@triton.jit(do_not_specialize=["num_lookups", "row_length"])
def _keep(
    keys, sorted_keys, order, kept_keys, kept_sorted, kept_order, state, num_lookups, row_length,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Into row state[0] % ROWS."""
    first = (tl.load(state) % ROWS) * row_length
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_lookups
    tl.store(kept_keys + first + i, tl.load(keys + i, mask=inside, other=0), mask=inside)
    tl.store(kept_sorted + first + i, tl.load(sorted_keys + i, mask=inside, other=0), mask=inside)
    tl.store(kept_order + first + i, tl.load(order + i, mask=inside, other=0).to(tl.int32), mask=inside)


@triton.jit
def _count_up(state):
    tl.store(state, tl.load(state) + 1)


_launch_keep, _launch_count = Launch(_keep), Launch(_count_up, num_warps=1)


def keep(keys: Tensor, sorted_keys: Tensor, order: Tensor, kept: Sequence[Tensor], state: Tensor) -> None:
    """Copy keys [L], sorted keys [L] and their order [L] to row state[0] of `kept` [R, >= L], and count state[0] up."""
    num, (rows, length) = keys.shape[0], kept[0].shape
    grid = (triton.cdiv(num, _BLOCK),)
    _launch_keep(grid, (keys.dtype, rows), keys, sorted_keys, order, *kept, state, num, length, rows, _BLOCK)
    _launch_count((1,), 0, state)


class KeyMaker:
    """Keys for batches of one shape, found by a number that is on the device; bad ids are noted, not waited for."""

    def __init__(self, spans: tuple[Span, ...], addresses: Addresses, device: torch.device) -> None:
        self._plan, self._longest, small = _plan(spans, addresses, device)
        self.type = torch.int32 if small else torch.int64
        self._num_lookups = sum(span.length for span in spans)
        self._grid = (len(spans), triton.cdiv(self._longest, _BLOCK))
        self._flags = Flags(device)
        self._on_host = self._flags.on_host.numpy()

    def __call__(self, addresses: Tensor, state: Tensor, place: int, offset: int) -> Tensor:
        """Keys [L] of batch number state[place] + offset; `addresses` [BATCHES] say where the ids of each are."""
        keys = torch.empty(self._num_lookups, dtype=self.type, device=state.device)
        flags = self._flags
        _launch_keys(
            self._grid, (self.type, BATCHES), addresses, self._plan, keys, flags.on_device, flags.on_host, state,
            0, place, offset, BATCHES, _BLOCK,
        )  # fmt: skip
        return keys

    @property
    def flag(self) -> Tensor:
        """int64 on the device: NONE, or the position of a bad id; then updates do nothing."""
        return self._flags.rows[0]

    @property
    def found_bad(self) -> bool:
        """Whether any batch so far had an id outside its table, as far as the host knows."""
        return bool(self._on_host[0, 0] != NONE)

    def clear(self) -> None:
        """A bad id has been reported."""
        self._flags.clear(0)


def make_keys(ids: Tensor, spans: tuple[Span, ...], addresses: Addresses) -> tuple[Tensor, FirstBad]:
    """Keys [L] of ids [L], int32 where they fit, and the first position whose id lies outside its table."""
    plan, longest, small = _plan(spans, addresses, ids.device)
    keys = torch.empty(ids.shape, dtype=torch.int32 if small else torch.int64, device=ids.device)
    flags = flags_of(ids.device)
    index = flags.take()
    if longest:
        grid = (len(spans), triton.cdiv(longest, _BLOCK))
        key = (small, ids.data_ptr() % 16)
        _launch_keys(grid, key, ids, plan, keys, flags.on_device, flags.on_host, plan, index, 0, 0, 0, _BLOCK)
    return keys, FirstBad(None, flags, index)
