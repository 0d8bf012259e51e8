"""The index as Triton kernels. Lanes of a program search side by side; distinct keys only, so nothing waits for a lock.

Misses and victims are listed in the order in which programs finish, and rows take slots in that order: which slot a row gets
varies from run to run, which rows are in the cache does not.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.index import CLAIMED, EMPTY, FREE, UNIT, WAYS, Arrived, Cells, Lists, Scoring, SlotState
from hotbed.ops.launch import Launch

_EMPTY: tl.constexpr = tl.constexpr(EMPTY)
_FREE: tl.constexpr = tl.constexpr(FREE)
_CLAIMED: tl.constexpr = tl.constexpr(CLAIMED)
_UNIT: tl.constexpr = tl.constexpr(UNIT)
_WAYS: tl.constexpr = tl.constexpr(WAYS)
_BLOCK = 128


@triton.jit
def _home(key, num_buckets):
    x = (key ^ (key >> 29)) * -7046029254386353131
    return ((((x >> 32) & 0xFFFFFFFF) * num_buckets) >> 32) & 0x7FFFFFFF


@triton.jit
def _find(cell_key, spilled, key, active, num_buckets):
    """The cell of each active lane's key, -1 where it has none."""
    way = tl.arange(0, _WAYS)
    bucket = _home(key, num_buckets)
    cell = tl.full(key.shape, -1, dtype=tl.int64)
    while tl.max(active.to(tl.int32), axis=0) > 0:
        here = tl.load(cell_key + bucket[:, None] * _WAYS + way[None, :], mask=active[:, None], other=-3)
        at = tl.max(tl.where(here == key[:, None], way[None, :], -1), axis=1)
        cell = tl.where(active & (at >= 0), bucket * _WAYS + at, cell)
        goes_on = tl.load(spilled + bucket, mask=active & (at < 0), other=0)
        active = active & (at < 0) & (goes_on != 0)
        bucket = tl.where(bucket + 1 < num_buckets, bucket + 1, 0)
    return cell


@triton.jit(do_not_specialize=["num_lookups", "num_buckets", "bits"])
def _arrive(keys, cell_key, cell_future, spilled, cells, counts, num_lookups, num_buckets, bits, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_lookups
    key = tl.load(keys + i, mask=inside, other=-1).to(tl.int64)
    before = tl.load(keys + i - 1, mask=inside & (i > 0), other=-1).to(tl.int64)
    first = inside & (key >= 0) & (key != before)
    cell = _find(cell_key, spilled, key, first, num_buckets)
    active = first & (cell < 0)
    num_new = tl.sum(active.to(tl.int64), axis=0)
    way = tl.arange(0, _WAYS)
    bucket = _home(key, num_buckets)
    while tl.max(active.to(tl.int32), axis=0) > 0:
        place = cell_key + bucket[:, None] * _WAYS + way[None, :]
        here = tl.load(place, mask=active[:, None], other=-3, volatile=True)
        at = tl.min(tl.where(here == _EMPTY, way[None, :], _WAYS), axis=1)
        full = active & (at == _WAYS)
        tl.store(spilled + bucket, 1, mask=full)
        tries = active & (at < _WAYS)
        # there is no masked exchange: lanes that try nothing expect a key that does not exist
        target = bucket * _WAYS + tl.where(tries, at, 0)
        seen = tl.atomic_cas(cell_key + target, tl.where(tries, _EMPTY, -5).to(tl.int64), key)
        won = tries & (seen == _EMPTY)
        cell = tl.where(won, target, cell)
        active = active & (won == 0)
        bucket = tl.where(full, tl.where(bucket + 1 < num_buckets, bucket + 1, 0), bucket)
    future = tl.load(cell_future + cell, mask=first, other=0)
    tl.store(cell_future + cell, future | bits, mask=first)
    rank = tl.cumsum(first.to(tl.int64), axis=0)
    start = tl.atomic_add(counts, tl.sum(first.to(tl.int64), axis=0))
    tl.store(cells + start + rank - 1, cell.to(tl.int32), mask=first)
    if num_new > 0:
        tl.atomic_add(counts + 1, num_new)


@triton.jit(do_not_specialize=["bits", "clock", "since", "half", "train"])
def _collect(
    cells, count, slot_of, cell_future, last, uses, dirty, misses, counts, bits, clock, since, half, train,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.load(count)
    cell = tl.load(cells + i, mask=inside, other=0)
    future = tl.load(cell_future + cell, mask=inside, other=0)
    tl.store(cell_future + cell, future & ~bits, mask=inside)
    slot = tl.load(slot_of + cell, mask=inside, other=_CLAIMED)
    hit = slot >= 0
    used = tl.load(last + slot, mask=hit, other=0)
    before = tl.load(uses + slot, mask=hit, other=0)
    age = tl.minimum((clock - used) // half, 31)
    tl.store(uses + slot, tl.maximum(before >> age, 1) + _UNIT, mask=hit)
    tl.store(last + slot, tl.where(hit, clock, 0), mask=hit)
    was_dirty = tl.load(dirty + slot, mask=hit, other=0)
    tl.store(dirty + slot, was_dirty | train.to(tl.uint8), mask=hit)
    num_hits = tl.sum((hit & (used < since)).to(tl.int64), axis=0)
    if num_hits > 0:
        tl.atomic_add(counts + 2, num_hits)
    missed = slot == _FREE
    num_misses = tl.sum(missed.to(tl.int64), axis=0)
    if num_misses > 0:
        start = tl.atomic_add(counts + 3, num_misses)
        rank = tl.cumsum(missed.to(tl.int64), axis=0)
        tl.store(misses + start + rank - 1, cell, mask=missed)
        tl.store(slot_of + cell, tl.full(cell.shape, _CLAIMED, dtype=tl.int32), mask=missed)


@triton.jit(do_not_specialize=["turn", "clock", "since", "half", "num_slots"])
def _score(
    cell_in, last, uses, cell_key, cell_future, ranks, turn, clock, since, half, num_slots,
    SCORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = s < num_slots
    cell = tl.load(cell_in + s, mask=inside, other=-1)
    used = tl.load(last + s, mask=inside, other=0)
    count = tl.load(uses + s, mask=inside, other=0)
    bits = tl.load(cell_future + cell, mask=cell >= 0, other=0)
    ahead = (bits & 0x3FFFFFFF).to(tl.int64)
    ahead = ((ahead >> turn) | (ahead << (30 - turn))) & 0x3FFFFFFF
    lowest = (ahead & -ahead).to(tl.float32)  # a power of two: its exponent is the position of the bit
    next_use = tl.where(ahead > 0, (lowest.to(tl.int32, bitcast=True) >> 23) - 126, 0)
    age = clock - used
    value = SCORE(next_use, count >> tl.minimum(age // half, 31), age, (bits >> 30) & 1)
    value = tl.where(used >= since, 0x7FFFFFFF, value.to(tl.int32))
    value = tl.where(cell < 0, -0x80000000, value).to(tl.int64)
    key = tl.load(cell_key + cell, mask=cell >= 0, other=0)
    key = tl.where(cell < 0, s.to(tl.int64), key & 0xFFFFFFFF)
    tl.store(ranks + s, (value << 32) | key, mask=inside)


@triton.jit(do_not_specialize=["count", "clock", "train"])
def _assign(
    misses, order, cell_key, slot_of, cell_future, cell_in, last, uses, dirty, miss_keys, miss_slots, victim_slots,
    host_miss_keys, host_victim_keys, counts, count, clock, train, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    slot = tl.load(order + i, mask=inside, other=0)
    cell = tl.load(misses + i, mask=inside, other=0)
    victim = tl.load(cell_in + slot, mask=inside, other=-1)
    leaves = victim >= 0
    key = tl.load(cell_key + victim, mask=leaves, other=-1)
    written = leaves & (tl.load(dirty + slot, mask=leaves, other=0) != 0)
    rank = tl.cumsum(written.to(tl.int64), axis=0)
    start = tl.atomic_add(counts + 4, tl.sum(written.to(tl.int64), axis=0))
    tl.store(host_victim_keys + start + rank - 1, key, mask=written)
    tl.store(victim_slots + start + rank - 1, slot, mask=written)
    tl.atomic_add(counts + 5, tl.sum(leaves.to(tl.int64), axis=0))
    tl.store(slot_of + victim, tl.full(victim.shape, _FREE, dtype=tl.int32), mask=leaves)
    unused = leaves & (tl.load(cell_future + victim, mask=leaves, other=1) == 0)
    tl.store(cell_key + victim, tl.full(key.shape, _EMPTY, dtype=tl.int64), mask=unused)
    tl.atomic_add(counts + 6, tl.sum(unused.to(tl.int64), axis=0))
    tl.store(cell_in + slot, cell, mask=inside)
    tl.store(slot_of + cell, slot.to(tl.int32), mask=inside)
    tl.store(last + slot, tl.where(inside, clock, 0), mask=inside)
    tl.store(uses + slot, tl.full(cell.shape, _UNIT, dtype=tl.int32), mask=inside)
    tl.store(dirty + slot, tl.where(inside, train, 0).to(tl.uint8), mask=inside)
    new_key = tl.load(cell_key + cell, mask=inside, other=0)
    tl.store(miss_keys + i, new_key, mask=inside)
    tl.store(host_miss_keys + i, new_key, mask=inside)
    tl.store(miss_slots + i, slot, mask=inside)


@triton.jit(do_not_specialize=["num_lookups", "num_buckets"])
def _place(keys, order, cell_key, slot_of, spilled, uses, slots, counts, num_lookups, num_buckets, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_lookups
    key = tl.load(keys + i, mask=inside, other=-1).to(tl.int64)
    cell = _find(cell_key, spilled, key, inside & (key >= 0), num_buckets)
    slot = tl.load(slot_of + cell, mask=cell >= 0, other=-1)
    position = tl.load(order + i, mask=inside, other=0)
    tl.store(slots + position, slot, mask=inside)
    new = (slot >= 0) & (tl.load(uses + slot, mask=slot >= 0, other=0) == _UNIT)
    num_new = tl.sum(new.to(tl.int64), axis=0)
    if num_new > 0:
        tl.atomic_add(counts + 7, num_new)


@triton.jit(do_not_specialize=["bits"])
def _drop(cells, num_keys, cell_key, slot_of, cell_future, counts, bits, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.load(num_keys)
    cell = tl.load(cells + i, mask=inside, other=0)
    future = tl.load(cell_future + cell, mask=inside, other=1) & ~bits
    tl.store(cell_future + cell, future, mask=inside)
    slot = tl.load(slot_of + cell, mask=inside, other=0)
    unused = inside & (future == 0) & (slot == _FREE)
    tl.store(cell_key + cell, tl.full(future.shape, _EMPTY, dtype=tl.int64), mask=unused)
    tl.atomic_add(counts + 6, tl.sum(unused.to(tl.int64), axis=0))


@triton.jit(do_not_specialize=["num_cells", "num_buckets"])
def _respill(cell_key, spilled, num_cells, num_buckets, BLOCK: tl.constexpr):
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(cell_key + cell, mask=cell < num_cells, other=_EMPTY)
    bucket = _home(key, num_buckets)
    away = (key != _EMPTY) & (bucket != cell // _WAYS)
    while tl.max(away.to(tl.int32), axis=0) > 0:
        tl.store(spilled + bucket, tl.full(bucket.shape, 1, dtype=tl.int32), mask=away)
        bucket = tl.where(bucket + 1 < num_buckets, bucket + 1, 0)
        away = away & (bucket != cell // _WAYS)


@triton.jit
def _where(condition, yes, no):
    return tl.where(condition, yes, no)


@cache
def _bound(scoring: Scoring) -> Any:
    return triton.jit(scoring.bind({"where": _where, "tl": tl}))


def _bits(bit: int) -> int:
    return (1 << bit) - (1 << 32 if bit == 31 else 0)


def _grid(count: int, block: int = _BLOCK) -> tuple[int]:
    return (triton.cdiv(count, block),)


_launch_arrive, _launch_collect, _launch_score = Launch(_arrive), Launch(_collect), Launch(_score)
_launch_assign, _launch_place, _launch_drop = Launch(_assign), Launch(_place), Launch(_drop)


def arrive(table: Cells, keys: Tensor, bit: int, counts: Tensor) -> Arrived:
    """Cells for the SORTED keys [L] of a batch, -1 for none."""
    num = keys.shape[0]
    cells = torch.empty(num, dtype=torch.int32, device=keys.device)
    if num:
        _launch_arrive(
            _grid(num), keys.dtype, keys, table.key, table.future, table.spilled, cells, counts,
            num, table.spilled.shape[0], _bits(bit), _BLOCK,
        )  # fmt: skip
    return Arrived(cells, None)


def collect(
    table: Cells, slots: SlotState, batch: Arrived, num_keys: Tensor, bit: int, clock: int, since: int, half: int,
    train: bool, misses: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """One batch's turn: counts grow by hits (first use since `since`) and misses, whose cells `misses` holds."""
    if batch.cells.shape[0]:
        _launch_collect(
            _grid(batch.cells.shape[0]), None, batch.cells, num_keys, table.slot, table.future, slots.last, slots.uses,
            slots.dirty, misses, counts, _bits(bit), clock, since, half, int(train), _BLOCK,
        )  # fmt: skip


def rank(table: Cells, slots: SlotState, scoring: Scoring, turn: int, clock: int, since: int, count: int) -> Tensor:
    """Slots int64 [>= M], in the order in which they may be taken; free ones first, never one used at `since` or later."""
    num_slots = slots.cell.shape[0]
    ranks = torch.empty(num_slots, dtype=torch.int64, device=slots.cell.device)
    _launch_score(
        _grid(num_slots, 1024), scoring.name, slots.cell, slots.last, slots.uses, table.key, table.future, ranks,
        turn, clock, since, scoring.half_life, num_slots, _bound(scoring), 1024,
    )  # fmt: skip
    return torch.sort(ranks).indices


def assign(
    table: Cells, slots: SlotState, misses: Tensor, order: Tensor, clock: int, train: bool, lists: Lists, counts: Tensor
) -> None:
    """Let misses (cells [M]) into slots; `lists` and `counts` say who came and who left."""
    num = misses.shape[0]
    if num:
        _launch_assign(
            _grid(num), None, misses, order, table.key, table.slot, table.future, *slots, *lists, counts,
            num, clock, int(train), _BLOCK,
        )  # fmt: skip


def place(table: Cells, state: SlotState, batch: Arrived, keys: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """The slot int32 [L] of every look-up, -1 for none, from SORTED keys [L] and their positions [L].

    Counts grow by the look-ups of rows that just came in.
    """
    slots = torch.empty(keys.shape[0], dtype=torch.int32, device=keys.device)
    if keys.shape[0]:
        _launch_place(
            _grid(keys.shape[0]), (keys.dtype, order.dtype), keys, order, table.key, table.slot, table.spilled,
            state.uses, slots, counts, keys.shape[0], table.spilled.shape[0], _BLOCK,
        )  # fmt: skip
    return slots


def drop(table: Cells, batch: Arrived, num_keys: Tensor, bit: int, counts: Tensor) -> None:
    """Forget a batch that arrived and was not planned."""
    if batch.cells.shape[0]:
        _launch_drop(
            _grid(batch.cells.shape[0]), None, batch.cells, num_keys, table.key, table.slot, table.future, counts,
            _bits(bit), _BLOCK,
        )  # fmt: skip


def respill(table: Cells) -> None:
    """Work the marks out again: they are only ever set, and would in time be everywhere."""
    table.spilled.zero_()
    _respill[_grid(table.key.shape[0], 256)](
        table.key, table.spilled, table.key.shape[0], table.spilled.shape[0], BLOCK=256
    )
