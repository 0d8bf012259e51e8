"""Described inputs as Triton kernels: descriptions come to the device, ids become keys, bags are laid out.

Where a batch is described is found by a number on the device (state[place] + offset), so a launch is the same for every batch.
An id outside its table, or offsets that do not rise from 0 to the number of values, set a flag without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.host.devices import mapped_empty
from hotbed.ops.inputs import BATCHES, HEADER, SPAN, Description, InputLayout
from hotbed.ops.keys.addresses import NONE, Flags
from hotbed.ops.launch import Launch, cdiv, power_of_2

_BLOCK = 256
_BAGS, _VALUES = 64, 16  # that one program lays out at a time
_BATCHES: tl.constexpr = tl.constexpr(BATCHES)
_NONE: tl.constexpr = tl.constexpr(NONE)


@triton.jit(do_not_specialize=["place", "words"])
def _bring(host_rows, rows, state, place, words, BLOCK: tl.constexpr):
    """Descriptions from the host, one for each program: a thousand programs that each ask the host take 15 us longer."""
    row = ((tl.load(state + place) + tl.program_id(0)) % _BATCHES) * words
    w = tl.arange(0, BLOCK)
    described = tl.load(host_rows + row + w, mask=w < words, other=0, volatile=True)
    tl.store(rows + row + w, described, mask=w < words)


@triton.jit
def _span_of(row, i, SPANS: tl.constexpr, STEPS: tl.constexpr):
    """The last span whose first lookup is not behind lookup i: the one with that lookup, for those before it are empty."""
    low = (i * 0).to(tl.int32)
    high = low + SPANS
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2  # where the search has ended this is low, and nothing changes
        below = tl.load(row + 8 + middle * 8 + 2) <= i
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit(do_not_specialize=["place", "offset", "words", "capacity"])
def _make_keys(
    rows, rules, keys, flags, host_flags, state, place, offset, words, capacity,
    SPANS: tl.constexpr, STEPS: tl.constexpr, IS_BAGS: tl.constexpr, IS_MAPPED: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rules [P, 8]: base, rows, hashing, has_padding, padding, column, is_mean, 0."""
    row = rows + ((tl.load(state + place) + offset) % _BATCHES) * words
    num_lookups = tl.load(row)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_lookups
    if IS_BAGS:
        p = _span_of(row, i, SPANS, STEPS)
        at = i - tl.load(row + 8 + p * 8 + 2)
    else:
        p = i.to(tl.int32) % SPANS
        at = i // SPANS
    address = tl.load(row + 8 + p * 8)
    step = tl.load(row + 8 + p * 8 + 1)
    if IS_MAPPED:
        number = tl.load(address.to(tl.pointer_type(tl.int32)) + at * step, mask=inside, other=0)
        key = tl.load(tl.load(row + 3).to(tl.pointer_type(tl.int64)) + number, mask=inside, other=-1)
        bad = inside & (i < 0)
    else:
        value = tl.load(address.to(tl.pointer_type(tl.int64)) + at * step, mask=inside, other=0)
        rule = rules + p * 8
        num_rows = tl.load(rule + 1)
        hashing = inside & (tl.load(rule + 2) != 0)
        wanted = (tl.load(rule + 3) == 0) | (value != tl.load(rule + 4))
        local = value
        if tl.max(hashing.to(tl.int32), axis=0) > 0:  # a division of 64 bits takes longer than all the rest
            rest = value % num_rows
            local = tl.where(hashing, tl.where(rest < 0, rest + num_rows, rest), value)
        bad = inside & wanted & ((local < 0) | (local >= num_rows))
        key = tl.where(wanted & (bad == 0), tl.load(rule) + local, -1)
    tl.store(keys + i, tl.where(inside, key, PAD), mask=i < capacity)
    first = tl.min(tl.where(bad, i, _NONE), axis=0)
    if IS_BAGS:
        size = tl.load(row + 1)
        total = size * SPANS
        start = tl.program_id(0).to(tl.int64) * BLOCK
        while start < total:  # ends: it grows
            n = start + tl.arange(0, BLOCK)
            q = tl.where(n < total, n.to(tl.int32) // size.to(tl.int32), 0)
            b = n - q * size
            offsets = tl.load(row + 8 + q * 8 + 4)
            checked = (n < total) & (offsets != 0)
            from_here = tl.load(offsets.to(tl.pointer_type(tl.int64)) + b, mask=checked, other=0)
            to_here = tl.load(offsets.to(tl.pointer_type(tl.int64)) + b + 1, mask=checked, other=0)
            length = tl.load(row + 8 + q * 8 + 3)
            wrong = (from_here > to_here) | ((b == 0) & (from_here != 0)) | ((b == size - 1) & (to_here != length))
            first = tl.minimum(first, tl.min(tl.where(checked & wrong, n * 0, _NONE), axis=0))
            start += tl.num_programs(0) * BLOCK
    if first < _NONE:
        tl.atomic_min(flags, first)
        tl.store(host_flags, first)


@triton.jit(do_not_specialize=["place", "offset", "words", "starts_length", "row_length"])
def _lay_bags(
    rows, rules, keys, starts, out_row, scale, state, place, offset, words, starts_length, row_length,
    SPANS: tl.constexpr, IS_SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Into row `number` % ROWS: where bags begin, the output row of every lookup and what it is multiplied by.

    Offsets that are wrong, of which the host may not know yet, name no place outside of the lookups.
    """
    number = tl.load(state + place) + offset
    row = rows + (number % _BATCHES) * words
    kept = number % ROWS
    starts += kept * starts_length
    out_row += kept * row_length
    scale += kept * row_length
    size = tl.load(row + 1)
    total = size * SPANS
    if tl.program_id(0) == 0:
        tl.store(starts + total, tl.load(row))
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    while start < total:  # ends: it grows
        n = start + tl.arange(0, BLOCK_N)
        here = n < total
        p = tl.where(here, n.to(tl.int32) // size.to(tl.int32), 0)
        b = n - p * size
        span = row + 8 + p * 8
        offsets = tl.load(span + 4)
        jagged = here & (offsets != 0)
        bag = tl.load(span + 5)
        length = tl.load(span + 3)
        begin = tl.load(offsets.to(tl.pointer_type(tl.int64)) + b, mask=jagged, other=0)
        end = tl.load(offsets.to(tl.pointer_type(tl.int64)) + b + 1, mask=jagged, other=0)
        begin = tl.where(jagged, begin, b * bag)
        end = tl.where(jagged, end, b * bag + bag)
        begin = tl.minimum(tl.maximum(begin, 0), length)
        end = tl.minimum(tl.maximum(end, begin), length)
        first = tl.load(span + 2) + begin
        tl.store(starts + n, first, mask=here)
        out = b * SPANS + tl.load(rules + p * 8 + 5)
        num_values = tl.where(here, end - begin, 0)
        longest = tl.max(num_values, axis=0)
        weights = tl.load(span + 6)
        factor = tl.full([BLOCK_N], 1.0, dtype=tl.float32)
        if IS_SCALED:
            count = (n * 0).to(tl.int32)
            j = tl.arange(0, BLOCK_J).to(tl.int64)
            at = longest * 0
            while at < longest:  # ends: it grows
                there = (at + j)[None, :] < num_values[:, None]
                key = tl.load(keys + first[:, None] + (at + j)[None, :], mask=there, other=-1)
                count += tl.sum((there & (key >= 0)).to(tl.int32), axis=1)
                at += BLOCK_J
            mean = tl.div_rn(factor, tl.maximum(count, 1).to(tl.float32))
            factor = tl.where(tl.load(rules + p * 8 + 6) != 0, mean, factor)
        j = tl.arange(0, BLOCK_J).to(tl.int64)
        at = longest * 0
        while at < longest:  # ends: it grows
            there = (at + j)[None, :] < num_values[:, None]
            place_here = first[:, None] + (at + j)[None, :]
            tl.store(out_row + place_here, (out[:, None] + (j * 0)[None, :]).to(tl.int32), mask=there)
            if IS_SCALED:
                given = weights.to(tl.pointer_type(tl.float32))[:, None] + begin[:, None] + (at + j)[None, :]
                weight = tl.load(given, mask=there & (weights != 0)[:, None], other=1.0)
                tl.store(scale + place_here, weight * factor[:, None], mask=there)
            at += BLOCK_J
        start += tl.num_programs(0) * BLOCK_N


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


_launch_bring = Launch(_bring, num_warps=1)
_launch_keys, _launch_bags = Launch(_make_keys), Launch(_lay_bags)
_launch_keep, _launch_count = Launch(_keep), Launch(_count_up, num_warps=1)


def keep(keys: Tensor, sorted_keys: Tensor, order: Tensor, kept: Sequence[Tensor], state: Tensor) -> None:
    """Copy keys [C], sorted keys [C] and their order [C] to row state[0] of `kept` [R, >= C]."""
    num, (rows, length) = keys.shape[0], kept[0].shape
    grid = (cdiv(num, _BLOCK),)
    _launch_keep(grid, (keys.dtype, rows), keys, sorted_keys, order, *kept, state, num, length, rows, _BLOCK)


def count_up(state: Tensor) -> None:
    """The next batch."""
    _launch_count((1,), 0, state)


class Descriptions:
    """The descriptions of one group's batches, on the host and on the device, and what kernels make of them."""

    def __init__(self, layout: InputLayout, device: torch.device, flags: Flags | None = None) -> None:
        """`flags`: of groups whose batches are bad together."""
        self.layout = layout
        self.key_type = layout.key_type
        self._pad = 2**31 - 1 if self.key_type == torch.int32 else 2**63 - 1
        num_spans = layout.num_spans
        self.words = HEADER + SPAN * num_spans
        self._host_rows = mapped_empty((BATCHES, self.words), device).zero_()
        self._host = self._host_rows.numpy()
        self.rows = torch.zeros(BATCHES, self.words, dtype=torch.int64, device=device)
        rules = np.zeros((num_spans, 8), dtype=np.int64)
        rules[:, :5] = np.stack([column.astype(np.int64) for column in layout.addresses.columns], axis=1)
        if layout.is_bags:
            rules[:, 5], rules[:, 6] = layout.columns, layout.is_mean
        self._rules = torch.from_numpy(rules).to(device)
        self._flags = Flags(device) if flags is None else flags
        self._found = self._flags.on_host.numpy()

    def note(self, number: int, batch: Description) -> None:
        """Describe a batch; its tensors stay where they are until it is planned."""
        self._host[number % BATCHES] = batch.words

    def bring(self, state: Tensor, place: int, count: int) -> None:
        """The descriptions of the `count` batches from number state[place] on come to the device."""
        block = power_of_2(self.words)
        _launch_bring((count,), block, self._host_rows, self.rows, state, place, self.words, block)

    def make_keys(self, state: Tensor, place: int, offset: int, capacity: int) -> Tensor:
        """Keys [capacity] of batch number state[place] + offset, padding behind them."""
        keys = torch.empty(capacity, dtype=self.key_type, device=state.device)
        layout, num_spans = self.layout, self.layout.num_spans
        _launch_keys(
            (max(1, cdiv(capacity, _BLOCK)),), (self.key_type, num_spans, layout.is_bags, layout.is_mapped),
            self.rows, self._rules, keys, self._flags.on_device, self._flags.on_host, state, place, offset, self.words,
            capacity, num_spans, (num_spans - 1).bit_length(), layout.is_bags, layout.is_mapped, self._pad, _BLOCK,
        )  # fmt: skip
        return keys

    def lay_bags(
        self, keys: Tensor, state: Tensor, place: int, offset: int, num_samples: int,
        starts: Tensor, out_row: Tensor, scale: Tensor | None,
    ) -> None:  # fmt: skip
        """Into row state[place] + offset of starts int64 [R, > N], out_row int32 [R, >= L] and scale [R, >= L].

        `num_samples`: as many as there may be.
        """
        num_spans, is_scaled = self.layout.num_spans, scale is not None
        num_programs = max(1, cdiv(num_spans * num_samples, _BAGS))
        _launch_bags(
            (num_programs,), (self.key_type, num_spans, is_scaled, starts.shape[0]), self.rows, self._rules, keys, starts,
            out_row, out_row if scale is None else scale, state, place, offset, self.words, starts.shape[1],
            out_row.shape[1], num_spans, is_scaled, starts.shape[0], _BAGS, _VALUES,
        )  # fmt: skip

    @property
    def flag(self) -> Tensor:
        """int64 on the device: NONE, or the position of a bad id; then updates do nothing."""
        return self._flags.rows[0]

    @property
    def found_bad(self) -> bool:
        """Whether any batch so far had an id outside its table or wrong offsets, as far as the host knows."""
        return bool(self._found[0, 0] != NONE)

    def clear(self) -> None:
        """What was found has been reported."""
        self._flags.clear(0)
