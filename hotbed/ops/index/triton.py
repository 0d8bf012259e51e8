"""The index as Triton kernels. Lanes of a program search side by side; distinct keys only, so nothing waits for a lock.

Misses and victims are listed in the order programs finish, which varies; the misses are then sorted by key, so that which
rows leave and which slot a row gets never varies.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.index import CLAIMED, EMPTY, FREE, UNIT, WAYS, Arrived, Assigned, Cells, Scoring, SlotState

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
        tl.atomic_add(counts, num_hits)
    missed = slot == _FREE
    num_misses = tl.sum(missed.to(tl.int64), axis=0)
    if num_misses > 0:
        start = tl.atomic_add(counts + 1, num_misses)
        rank = tl.cumsum(missed.to(tl.int64), axis=0)
        tl.store(misses + start + rank - 1, cell, mask=missed)
        tl.store(slot_of + cell, tl.full(cell.shape, _CLAIMED, dtype=tl.int32), mask=missed)


@triton.jit(do_not_specialize=["turn", "clock", "pinned", "half", "num_slots"])
def _score(
    cell_in, last, uses, cell_future, scores, turn, clock, pinned, half, num_slots,
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
    value = tl.where(used >= pinned, 0x7FFFFFFF, value.to(tl.int32))
    value = tl.where(cell < 0, -0x80000000, value)
    tl.store(scores + s, value, mask=inside)


@triton.jit(do_not_specialize=["count", "clock", "train"])
def _assign(
    misses, chosen, cell_key, slot_of, cell_future, cell_in, last, uses, dirty, victim_keys, victim_slots, counts,
    count, clock, train, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    slot = tl.load(chosen + i, mask=inside, other=0)
    cell = tl.load(misses + i, mask=inside, other=0)
    victim = tl.load(cell_in + slot, mask=inside, other=-1)
    leaves = victim >= 0
    key = tl.load(cell_key + victim, mask=leaves, other=-1)
    written = leaves & (tl.load(dirty + slot, mask=leaves, other=0) != 0)
    rank = tl.cumsum(written.to(tl.int64), axis=0)
    start = tl.atomic_add(counts, tl.sum(written.to(tl.int64), axis=0))
    tl.store(victim_keys + start + rank - 1, key, mask=written)
    tl.store(victim_slots + start + rank - 1, slot, mask=written)
    tl.atomic_add(counts + 1, tl.sum(leaves.to(tl.int64), axis=0))
    tl.store(slot_of + victim, tl.full(victim.shape, _FREE, dtype=tl.int32), mask=leaves)
    unused = leaves & (tl.load(cell_future + victim, mask=leaves, other=1) == 0)
    tl.store(cell_key + victim, tl.full(key.shape, _EMPTY, dtype=tl.int64), mask=unused)
    tl.atomic_add(counts + 2, tl.sum(unused.to(tl.int64), axis=0))
    tl.store(cell_in + slot, cell, mask=inside)
    tl.store(slot_of + cell, slot.to(tl.int32), mask=inside)
    tl.store(last + slot, tl.where(inside, clock, 0), mask=inside)
    tl.store(uses + slot, tl.full(cell.shape, _UNIT, dtype=tl.int32), mask=inside)
    tl.store(dirty + slot, tl.where(inside, train, 0).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["num_lookups", "num_buckets"])
def _place(keys, order, cell_key, slot_of, spilled, uses, slots, missed, num_lookups, num_buckets, BLOCK: tl.constexpr):
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
        tl.atomic_add(missed, num_new)


@triton.jit(do_not_specialize=["bits"])
def _drop(cells, counts, cell_key, slot_of, cell_future, freed, bits, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.load(counts)
    cell = tl.load(cells + i, mask=inside, other=0)
    future = tl.load(cell_future + cell, mask=inside, other=1) & ~bits
    tl.store(cell_future + cell, future, mask=inside)
    slot = tl.load(slot_of + cell, mask=inside, other=0)
    unused = inside & (future == 0) & (slot == _FREE)
    tl.store(cell_key + cell, tl.full(future.shape, _EMPTY, dtype=tl.int64), mask=unused)
    tl.atomic_add(freed, tl.sum(unused.to(tl.int64), axis=0))


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


def arrive(table: Cells, keys: Tensor, bit: int) -> Arrived:
    """Cells for the SORTED keys [L] of a batch, -1 for none."""
    num = keys.shape[0]
    arrived = Arrived(
        torch.empty(num, dtype=torch.int32, device=keys.device),
        torch.zeros(2, dtype=torch.int64, device=keys.device),
        None,
    )
    if num:
        _arrive[_grid(num)](
            keys, table.key, table.future, table.spilled, arrived.cells, arrived.counts,
            num, table.spilled.shape[0], _bits(bit), BLOCK=_BLOCK,
        )  # fmt: skip
    return arrived


def collect(
    table: Cells, slots: SlotState, batch: Arrived, bit: int, clock: int, since: int, half: int,
    train: bool, misses: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """One batch's turn; counts [2] grows by hits (first use since `since`) and misses, `misses` holds the cells."""
    if batch.cells.shape[0]:
        _collect[_grid(batch.cells.shape[0])](
            batch.cells, batch.counts, table.slot, table.future, slots.last, slots.uses, slots.dirty, misses, counts,
            _bits(bit), clock, since, half, int(train), BLOCK=_BLOCK,
        )  # fmt: skip


def select(table: Cells, slots: SlotState, scoring: Scoring, turn: int, clock: int, pinned: int, count: int) -> Tensor:
    """The `count` slots int64 [M] with the lowest (score, slot), ascending; free ones first, never one used since `pinned`."""
    num_slots = slots.cell.shape[0]
    scores = torch.empty(num_slots, dtype=torch.int32, device=slots.cell.device)
    _score[_grid(num_slots, 1024)](
        slots.cell, slots.last, slots.uses, table.future, scores, turn, clock, pinned, scoring.half_life, num_slots,
        SCORE=_bound(scoring), BLOCK=1024,
    )  # fmt: skip
    return torch.sort(torch.sort(scores, stable=True).indices[:count]).values


def assign(table: Cells, slots: SlotState, misses: Tensor, chosen: Tensor, clock: int, train: bool) -> Assigned:
    """Let misses (cells [M]) into the chosen slots [M], in the order of their keys."""
    miss_keys, order = torch.sort(table.key.index_select(0, misses))
    num = misses.shape[0]
    result = Assigned(
        miss_keys,
        victim_keys=torch.empty_like(miss_keys),
        victim_slots=torch.empty_like(miss_keys),
        counts=torch.zeros(3, dtype=torch.int64, device=misses.device),
    )
    if num:
        _assign[_grid(num)](
            misses.index_select(0, order), chosen, table.key, table.slot, table.future, *slots, *result[1:],
            num, clock, int(train), BLOCK=_BLOCK,
        )  # fmt: skip
    return result


def place(table: Cells, state: SlotState, batch: Arrived, keys: Tensor, order: Tensor, missed: Tensor) -> Tensor:
    """The slot int32 [L] of every look-up, -1 for none, from SORTED keys [L] and their positions [L].

    `missed` [1] grows by the look-ups of rows that just came in.
    """
    slots = torch.empty(keys.shape[0], dtype=torch.int32, device=keys.device)
    if keys.shape[0]:
        _place[_grid(keys.shape[0])](
            keys, order, table.key, table.slot, table.spilled, state.uses, slots, missed,
            keys.shape[0], table.spilled.shape[0], BLOCK=_BLOCK,
        )  # fmt: skip
    return slots


def drop(table: Cells, batch: Arrived, bit: int) -> Tensor:
    """Forget a batch that arrived and was not planned; the number of cells freed, int64 [1]."""
    freed = torch.zeros(1, dtype=torch.int64, device=table.key.device)
    if batch.cells.shape[0]:
        _drop[_grid(batch.cells.shape[0])](
            batch.cells, batch.counts, table.key, table.slot, table.future, freed, _bits(bit), BLOCK=_BLOCK
        )
    return freed


def respill(table: Cells) -> None:
    """Work the marks out again: they are only ever set, and would in time be everywhere."""
    table.spilled.zero_()
    _respill[_grid(table.key.shape[0], 256)](
        table.key, table.spilled, table.key.shape[0], table.spilled.shape[0], BLOCK=256
    )
