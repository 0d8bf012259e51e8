"""The index as Triton kernels. Lanes of a program search side by side; distinct keys only, so nothing waits for a lock.

Misses and victims are listed in the order in which programs finish, and rows take slots in that order: which slot a row gets
varies from run to run, which rows are in the cache does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.index import (
    CLAIMED,
    EMPTY,
    FREE,
    MOVED,
    UNIT,
    UNPLACED,
    WAYS,
    ArrivalCells,
    Cells,
    Lists,
    ScoreFunction,
    SlotState,
    WindowClock,
)
from hotbed.ops.index.victims import Victims
from hotbed.ops.launch import Launch, cdiv

_EMPTY: tl.constexpr = tl.constexpr(EMPTY)
_FREE: tl.constexpr = tl.constexpr(FREE)
_MOVED: tl.constexpr = tl.constexpr(MOVED)
_CLAIMED: tl.constexpr = tl.constexpr(CLAIMED)
_UNIT: tl.constexpr = tl.constexpr(UNIT)
_UNPLACED: tl.constexpr = tl.constexpr(UNPLACED)
_WAYS: tl.constexpr = tl.constexpr(WAYS)
# A bucket is looked at once more than it has cells at most: each time a cell that was empty is another lane's now.
_LOOKS: tl.constexpr = tl.constexpr(WAYS + 1)
TIDY = 8  # a table more than half full is tidied when one cell in this many was taken anew
BLOCK = 128  # keys of one program
WIDE = 1024  # cells or slots of one program


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
    looked = 0
    while (tl.max(active.to(tl.int32), axis=0) > 0) & (looked < num_buckets):  # ends: no bucket is looked at twice
        looked += 1
        here = tl.load(cell_key + bucket[:, None] * _WAYS + way[None, :], mask=active[:, None], other=-3)
        at = tl.max(tl.where(here == key[:, None], way[None, :], -1), axis=1)
        cell = tl.where(active & (at >= 0), bucket * _WAYS + at, cell)
        goes_on = tl.load(spilled + bucket, mask=active & (at < 0), other=0)
        active = active & (at < 0) & (goes_on != 0)
        bucket = tl.where(bucket + 1 < num_buckets, bucket + 1, 0)
    return cell


@triton.jit
def _first_of(keys, i, num_lookups):
    """(key, whether it is the first of its kind) of sorted keys."""
    inside = i < num_lookups
    key = tl.load(keys + i, mask=inside, other=-1).to(tl.int64)
    before = tl.load(keys + i - 1, mask=inside & (i > 0), other=-1).to(tl.int64)
    return key, inside & (key >= 0) & (key != before)


@triton.jit(do_not_specialize=["num_lookups", "num_buckets", "bits"])
def _arrive(keys, cell_key, cell_future, spilled, counts, num_lookups, num_buckets, bits, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key, first = _first_of(keys, i, num_lookups)
    cell = _find(cell_key, spilled, key, first, num_buckets)
    active = first & (cell < 0)
    num_new = tl.sum(active.to(tl.int64), axis=0)
    way = tl.arange(0, _WAYS)
    bucket = _home(key, num_buckets)
    looks = 0
    while (tl.max(active.to(tl.int32), axis=0) > 0) & (looks < _LOOKS * num_buckets):  # ends: looks are counted
        looks += 1
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
    placed = first & (active == 0)
    future = tl.load(cell_future + cell, mask=placed, other=0)
    tl.store(cell_future + cell, future | bits, mask=placed)
    num_keys = tl.sum(first.to(tl.int64), axis=0)
    num_unplaced = tl.sum(active.to(tl.int64), axis=0)
    if num_keys > 0:
        tl.atomic_add(counts, num_keys)
    if num_new > num_unplaced:
        tl.atomic_add(counts + 1, num_new - num_unplaced)
    if num_unplaced > 0:
        tl.atomic_add(counts + _UNPLACED, num_unplaced)


@triton.jit(do_not_specialize=["words", "num_buckets", "stride", "length"])
def _arrive_unsorted(
    keys, cell_key, cell_future, spilled, stamps, counts, state, batches, new_keys, words, num_buckets, stride, length,
    ARRIVALS: tl.constexpr, BATCHES: tl.constexpr, LISTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `_arrive`, for keys in any order, many of them equal: stamps say in which batch a cell was last used.

    How many keys there are is in the batch's description (ops/inputs): batches [BATCHES, words]. With LISTS, keys that had no
    cell are listed in new_keys [LISTS, length], as many as fit.

    Two lanes with one new key try the same cell, because both try the first empty one: the second finds the key there.
    """
    number = tl.load(state)
    num_lookups = tl.load(batches + (number % BATCHES) * words)
    stamp = (number + 1).to(tl.int32)
    bits = tl.full([], 1, dtype=tl.int32) << ((number // stride) % 30).to(tl.int32)
    counts += (number % ARRIVALS) * 8
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i, mask=i < num_lookups, other=-1).to(tl.int64)
    real = key >= 0
    cell = _find(cell_key, spilled, key, real, num_buckets)
    active = real & (cell < 0)
    is_new = active & (cell >= 0)  # none yet
    way = tl.arange(0, _WAYS)
    bucket = _home(key, num_buckets)
    looks = 0
    while (tl.max(active.to(tl.int32), axis=0) > 0) & (looks < _LOOKS * num_buckets):  # ends: looks are counted
        looks += 1
        place = cell_key + bucket[:, None] * _WAYS + way[None, :]
        here = tl.load(place, mask=active[:, None], other=-3, volatile=True)
        own = tl.max(tl.where(here == key[:, None], way[None, :], -1), axis=1)
        cell = tl.where(active & (own >= 0), bucket * _WAYS + own, cell)
        active = active & (own < 0)
        at = tl.min(tl.where(here == _EMPTY, way[None, :], _WAYS), axis=1)
        full = active & (at == _WAYS)
        tl.store(spilled + bucket, 1, mask=full)
        tries = active & (at < _WAYS)
        target = bucket * _WAYS + tl.where(tries, at, 0)
        seen = tl.atomic_cas(cell_key + target, tl.where(tries, _EMPTY, -5).to(tl.int64), key)
        won = tries & (seen == _EMPTY)
        there = won | (tries & (seen == key))
        is_new = is_new | won
        cell = tl.where(there, target, cell)
        active = active & (there == 0)
        bucket = tl.where(full, tl.where(bucket + 1 < num_buckets, bucket + 1, 0), bucket)
    num_unplaced = tl.sum(active.to(tl.int64), axis=0)
    placed = real & (active == 0)
    first = placed & (tl.load(stamps + cell, mask=placed, other=0) != stamp)
    first = first & (tl.atomic_xchg(stamps + cell, tl.full(key.shape, 0, dtype=tl.int32) + stamp, mask=first) != stamp)
    future = tl.load(cell_future + cell, mask=first, other=0)
    tl.store(cell_future + cell, future | bits, mask=first)
    num_keys = tl.sum(first.to(tl.int64), axis=0)
    num_new = tl.sum(is_new.to(tl.int64), axis=0)
    if num_keys > 0:
        tl.atomic_add(counts, num_keys)
    if num_new > 0:
        start = tl.atomic_add(counts + 1, num_new)
        if LISTS:
            place = start + tl.cumsum(is_new.to(tl.int64), axis=0) - 1
            tl.store(new_keys + (number % LISTS) * length + place, key, mask=is_new & (place < length))
    if num_unplaced > 0:
        tl.atomic_add(counts + _UNPLACED, num_unplaced)


@triton.jit(do_not_specialize=["num_lookups", "num_buckets", "clock", "since", "half", "train", "words"])
def _collect(
    keys, cell_key, spilled, slot_of, last, uses, dirty, misses, counts, state, batches,
    num_lookups, num_buckets, clock, since, half, train, words,
    LANE: tl.constexpr, BATCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if (
        LANE
    ):  # `clock` counts the batches of the window up to this one, which is described in `batches` [BATCHES, words]
        described = batches + ((tl.load(state + 1) + clock - 1) % BATCHES) * words
        num_lookups = tl.load(described)
        train = tl.load(described + 2)
        since = tl.load(state + 2).to(tl.int32) + 1
        clock = since + clock - 1
        counts += (tl.load(state + 3) % LANE) * 8
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key, first = _first_of(keys, i, num_lookups)
    cell = _find(cell_key, spilled, key, first, num_buckets)
    slot = tl.load(slot_of + cell, mask=first & (cell >= 0), other=_CLAIMED)
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
        tl.store(misses + start + rank - 1, cell.to(tl.int32), mask=missed)
        tl.store(slot_of + cell, tl.full(cell.shape, _CLAIMED, dtype=tl.int32), mask=missed)


@triton.jit(do_not_specialize=["bits", "num_batches", "stride", "num_cells"])
def _sweep(
    cell_key, slot_of, cell_future, counts, state, bits, num_batches, stride, num_cells,
    LANE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if LANE:
        number = tl.load(state + 1)
        past, stop = number // stride, (number + num_batches) // stride
        bits = tl.full([], 0, dtype=tl.int32)
        while past < stop:  # ends: one pass for each batch of the window
            bits = bits | (tl.full([], 1, dtype=tl.int32) << (past % 30).to(tl.int32))
            past += 1
        counts += (tl.load(state + 3) % LANE) * 8
    if bits != 0:
        cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        future = tl.load(cell_future + cell, mask=cell < num_cells, other=0)
        past_use = (future & bits) != 0
        tl.store(cell_future + cell, future & ~bits, mask=past_use)
        unused = past_use & ((future & ~bits) == 0) & (tl.load(slot_of + cell, mask=past_use, other=0) == _FREE)
        tl.store(cell_key + cell, tl.full(cell.shape, _EMPTY, dtype=tl.int64), mask=unused)
        num_freed = tl.sum(unused.to(tl.int64), axis=0)
        if num_freed > 0:
            tl.atomic_add(counts + 6, num_freed)


@triton.jit(do_not_specialize=["next_bit", "clock", "since", "half", "num_slots", "num_batches", "stride"])
def _score(
    cell_in, last, uses, cell_key, cell_future, ranks, state, next_bit, clock, since, half, num_slots, num_batches, stride,
    SCORE: tl.constexpr, LANE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if LANE:
        next_bit = (((tl.load(state + 1) + num_batches) // stride) % 30).to(tl.int32)
        since = tl.load(state + 2).to(tl.int32) + 1
        clock = since + num_batches - 1
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = s < num_slots
    cell = tl.load(cell_in + s, mask=inside, other=-1)
    used = tl.load(last + s, mask=inside, other=0)
    count = tl.load(uses + s, mask=inside, other=0)
    bits = tl.load(cell_future + cell, mask=cell >= 0, other=0)
    ahead = (bits & 0x3FFFFFFF).to(tl.int64)
    ahead = ((ahead >> next_bit) | (ahead << (30 - next_bit))) & 0x3FFFFFFF
    lowest = (ahead & -ahead).to(tl.float32)  # a power of two: its exponent is the position of the bit
    next_use = tl.where(ahead > 0, (lowest.to(tl.int32, bitcast=True) >> 23) - 126, 0)
    age = clock - used
    value = SCORE(next_use, count >> tl.minimum(age // half, 31), age, (bits >> 30) & 1)
    value = tl.where(used >= since, 0x7FFFFFFF, value.to(tl.int32))
    value = tl.where(cell < 0, -0x80000000, value).to(tl.int64)
    key = tl.load(cell_key + cell, mask=cell >= 0, other=0)
    key = tl.where(cell < 0, s.to(tl.int64), key & 0xFFFFFFFF)
    tl.store(ranks + s, (value << 32) | key, mask=inside)


@triton.jit(do_not_specialize=["count", "clock", "train", "room", "words"])
def _assign(
    misses, order, cell_key, slot_of, cell_future, cell_in, last, uses, dirty, miss_keys, miss_slots, victim_slots,
    host_miss_keys, host_victim_keys, counts, state, batches, count, clock, train, room, words,
    LANE: tl.constexpr, BATCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if LANE:  # all batches of a window learn, or none does
        train = tl.load(batches + (tl.load(state + 1) % BATCHES) * words + 2)
        window = tl.load(state + 3) % LANE
        counts += window * 8
        count = tl.load(counts + 3).to(tl.int32)
        clock = tl.load(state + 2).to(tl.int32) + clock
        miss_keys += window * room
        miss_slots += window * room
        victim_slots += window * room
        host_miss_keys += window * room
        host_victim_keys += window * room
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    slot = tl.load(order + i, mask=inside, other=0)
    cell = tl.load(misses + i, mask=inside, other=0)
    victim = tl.load(cell_in + slot, mask=inside, other=-1)
    leaves = victim >= 0
    key = tl.load(cell_key + victim, mask=leaves, other=-1)
    written = leaves & (tl.load(dirty + slot, mask=leaves, other=0) != 0)
    num_written = tl.sum(written.to(tl.int64), axis=0)
    if num_written > 0:
        rank = tl.cumsum(written.to(tl.int64), axis=0)
        start = tl.atomic_add(counts + 4, num_written)
        tl.store(host_victim_keys + start + rank - 1, key, mask=written)
        tl.store(victim_slots + start + rank - 1, slot, mask=written)
    num_leaving = tl.sum(leaves.to(tl.int64), axis=0)
    if num_leaving > 0:
        tl.atomic_add(counts + 5, num_leaving)
        tl.store(slot_of + victim, tl.full(victim.shape, _FREE, dtype=tl.int32), mask=leaves)
        unused = leaves & (tl.load(cell_future + victim, mask=leaves, other=1) == 0)
        tl.store(cell_key + victim, tl.full(key.shape, _EMPTY, dtype=tl.int64), mask=unused)
        num_unused = tl.sum(unused.to(tl.int64), axis=0)
        if num_unused > 0:
            tl.atomic_add(counts + 6, num_unused)
    tl.store(cell_in + slot, cell, mask=inside)
    tl.store(slot_of + cell, slot.to(tl.int32), mask=inside)
    tl.store(last + slot, tl.where(inside, clock, 0), mask=inside)
    tl.store(uses + slot, tl.full(cell.shape, _UNIT, dtype=tl.int32), mask=inside)
    tl.store(dirty + slot, tl.where(inside, train, 0).to(tl.uint8), mask=inside)
    new_key = tl.load(cell_key + cell, mask=inside, other=0)
    tl.store(miss_keys + i, new_key, mask=inside)
    tl.store(host_miss_keys + i, new_key, mask=inside)
    tl.store(miss_slots + i, slot, mask=inside)


@triton.jit(do_not_specialize=["num_lookups", "num_buckets", "batch", "row_length", "words"])
def _place(
    keys, order, cell_key, slot_of, spilled, uses, slots, kept_keys, kept_order, counts, state, batches,
    num_lookups, num_buckets, batch, row_length, words,
    LANE: tl.constexpr, WINDOWS: tl.constexpr, BATCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if LANE:  # LANE rows of slots, sorted keys and their order; `batch` is the place in the window
        number = tl.load(state + 1) + batch
        num_lookups = tl.load(batches + (number % BATCHES) * words)
        row = number % LANE
        counts += (tl.load(state + 3) % WINDOWS) * 8
        slots += row * row_length
        kept_keys += row * row_length
        kept_order += row * row_length
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_lookups
    key = tl.load(keys + i, mask=inside, other=-1).to(tl.int64)
    cell = _find(cell_key, spilled, key, inside & (key >= 0), num_buckets)
    slot = tl.load(slot_of + cell, mask=cell >= 0, other=-1)
    position = tl.load(order + i, mask=inside, other=0)
    tl.store(slots + position, slot, mask=inside)
    if LANE:
        tl.store(kept_keys + i, key, mask=inside)
        tl.store(kept_order + i, position.to(tl.int32), mask=inside)
    new = (slot >= 0) & (tl.load(uses + slot, mask=slot >= 0, other=0) == _UNIT)
    num_new = tl.sum(new.to(tl.int64), axis=0)
    if num_new > 0:
        tl.atomic_add(counts + 7, num_new)


@triton.jit(do_not_specialize=["num_batches"])
def _tick(counts, host_counts, state, num_batches, AT: tl.constexpr, ROWS: tl.constexpr):
    """A row of counts is complete: the host may read it, the next one is cleared, the state moves on."""
    number = tl.load(state + AT)
    row = number % ROWS
    n = tl.arange(0, 8)
    tl.store(host_counts + row * 16 + n, tl.load(counts + row * 8 + n))
    tl.store(host_counts + row * 16 + 8, number + 1)
    tl.store(counts + ((number + 1) % ROWS) * 8 + n, tl.zeros([8], dtype=tl.int64))
    tl.store(state + AT, number + 1)
    if AT == 3:
        tl.store(state + 1, tl.load(state + 1) + num_batches)
        tl.store(state + 2, tl.load(state + 2) + num_batches)


@triton.jit(do_not_specialize=["num_cells", "num_buckets"])
def _go_home(cell_key, slot_of, cell_future, cell_in, num_cells, num_buckets, BLOCK: tl.constexpr):
    """Keys that are not in their home bucket take the first empty cell on the way to where they are.

    The cell they leave is marked, and emptied by the next kernel: it must not be taken while this one is about to clear it.
    """
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(cell_key + cell, mask=cell < num_cells, other=_EMPTY)
    bucket = _home(key, num_buckets)
    active = (key >= 0) & (bucket != cell // _WAYS)
    way = tl.arange(0, _WAYS)
    looks = 0
    while (tl.max(active.to(tl.int32), axis=0) > 0) & (looks < _LOOKS * num_buckets):  # ends: looks are counted
        looks += 1
        place = cell_key + bucket[:, None] * _WAYS + way[None, :]
        here = tl.load(place, mask=active[:, None], other=-3, volatile=True)
        at = tl.min(tl.where(here == _EMPTY, way[None, :], _WAYS), axis=1)
        full = active & (at == _WAYS)
        tries = active & (at < _WAYS)
        target = bucket * _WAYS + tl.where(tries, at, 0)
        seen = tl.atomic_cas(cell_key + target, tl.where(tries, _EMPTY, -5).to(tl.int64), key)
        won = tries & (seen == _EMPTY)
        slot = tl.load(slot_of + cell, mask=won, other=_FREE)
        tl.store(slot_of + target, slot, mask=won)
        tl.store(cell_future + target, tl.load(cell_future + cell, mask=won, other=0), mask=won)
        tl.store(cell_in + slot, target.to(tl.int32), mask=won & (slot >= 0))
        tl.store(cell_key + cell, tl.full(cell.shape, _MOVED, dtype=tl.int64), mask=won)
        bucket = tl.where(full, tl.where(bucket + 1 < num_buckets, bucket + 1, 0), bucket)
        active = active & (won == 0) & (bucket != cell // _WAYS)


@triton.jit(do_not_specialize=["num_cells", "num_buckets"])
def _respill(cell_key, slot_of, cell_future, spilled, num_cells, num_buckets, BLOCK: tl.constexpr):
    """Empty the cells that keys have left, and mark the buckets that a search must not stop at."""
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(cell_key + cell, mask=cell < num_cells, other=_EMPTY)
    left = key == _MOVED
    tl.store(cell_key + cell, tl.full(cell.shape, _EMPTY, dtype=tl.int64), mask=left)
    tl.store(slot_of + cell, tl.full(cell.shape, _FREE, dtype=tl.int32), mask=left)
    tl.store(cell_future + cell, tl.full(cell.shape, 0, dtype=tl.int32), mask=left)
    bucket = _home(key, num_buckets)
    away = (key >= 0) & (bucket != cell // _WAYS)
    while tl.max(away.to(tl.int32), axis=0) > 0:  # ends: each lane passes every bucket, its own too
        tl.store(spilled + bucket, tl.full(bucket.shape, 1, dtype=tl.int32), mask=away)
        bucket = tl.where(bucket + 1 < num_buckets, bucket + 1, 0)
        away = away & (bucket != cell // _WAYS)


@triton.jit
def _where(condition, yes, no):
    return tl.where(condition, yes, no)


@cache
def bound(scoring: ScoreFunction) -> Any:
    """The policy's score as a Triton function."""
    return triton.jit(scoring.bind({"where": _where, "tl": tl}))


def grid(count: int, block: int = BLOCK) -> tuple[int]:
    """Programs for `count` items."""
    return (cdiv(count, block),)


launch_arrive, launch_arrive_unsorted = Launch(_arrive), Launch(_arrive_unsorted)
launch_collect, launch_sweep = Launch(_collect), Launch(_sweep)
launch_score, launch_assign, launch_place = Launch(_score), Launch(_assign), Launch(_place)
launch_tick = Launch(_tick, num_warps=1)
launch_go_home, launch_respill = Launch(_go_home), Launch(_respill)


def arrive(table: Cells, keys: Tensor, bits: int, counts: Tensor, lists_new: bool = False) -> ArrivalCells:
    """Cells for the SORTED keys [L] of a batch, -1 for none; `bits` are set in their futures. New keys are not listed."""
    num = keys.shape[0]
    if num:
        launch_arrive(
            grid(num), keys.dtype, keys, table.key, table.future, table.spilled, counts,
            num, table.spilled.shape[0], bits, BLOCK,
        )  # fmt: skip
    return ArrivalCells(None, None)


def collect(
    table: Cells, slots: SlotState, batch: ArrivalCells, keys: Tensor, clock: int, since: int, half: int, train: bool,
    past: int, misses: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Plan a batch with SORTED keys [L]: counts grow by hits (first use since `since`) and misses.

    The bits of `past` stay until `sweep`, which goes through all cells.
    """
    if keys.shape[0]:
        launch_collect(
            grid(keys.shape[0]), keys.dtype, keys, table.key, table.spilled, table.slot, slots.last, slots.uses,
            slots.dirty, misses, counts, counts, counts, keys.shape[0], table.spilled.shape[0], clock, since, half,
            int(train), 0, 0, 1, BLOCK,
        )  # fmt: skip


def sweep(table: Cells, bits: int, counts: Tensor, past: Sequence[ArrivalCells] | None = None) -> None:
    """Clear `bits` in every future: the batches they stand for are past. Cells that nothing uses are freed."""
    num_cells = table.key.shape[0]
    launch_sweep(
        grid(num_cells, WIDE), 0, table.key, table.slot, table.future, counts, counts, bits, 0, 1, num_cells, 0, WIDE
    )


def rank(table: Cells, slots: SlotState, victims: Victims, moment: WindowClock, count: int) -> Tensor:
    """Slots int64 [>= M], in the order in which they may be taken; free ones first, never one that the window uses."""
    scoring = victims.scoring
    num_slots = slots.cell.shape[0]
    ranks = torch.empty(num_slots, dtype=torch.int64, device=slots.cell.device)
    launch_score(
        grid(num_slots, WIDE), scoring.name, slots.cell, slots.last, slots.uses, table.key, table.future, ranks, ranks,
        moment.next_bit, moment.clock, moment.since, scoring.half_life, num_slots, 0, 1, bound(scoring), 0, WIDE,
    )  # fmt: skip
    return torch.sort(ranks).indices


def note(table: Cells, victims: Victims, batches: Iterable[ArrivalCells]) -> None:
    """All slots are ranked for every window."""


def assign(
    table: Cells, slots: SlotState, misses: Tensor, order: Tensor, clock: int, train: bool, lists: Lists, counts: Tensor
) -> None:
    """Let misses (cells [M]) into slots; `lists` and `counts` say which rows came and which left."""
    num = misses.shape[0]
    if num:
        launch_assign(
            grid(num), 0, misses, order, table.key, table.slot, table.future, *slots, *lists, counts, counts,
            counts, num, clock, int(train), 0, 0, 0, 1, BLOCK,
        )  # fmt: skip


def place(table: Cells, state: SlotState, batch: ArrivalCells, keys: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """The slot int32 [L] of every lookup, -1 for none, from SORTED keys [L] and their positions [L].

    Counts grow by the lookups of rows that just came in.
    """
    slots = torch.empty(keys.shape[0], dtype=torch.int32, device=keys.device)
    if keys.shape[0]:
        launch_place(
            grid(keys.shape[0]), (keys.dtype, order.dtype), keys, order, table.key, table.slot, table.spilled,
            state.uses, slots, slots, slots, counts, counts, counts, keys.shape[0], table.spilled.shape[0], 0, 0, 0, 0, 0,
            1, BLOCK,
        )  # fmt: skip
    return slots


def tidy(table: Cells, slots: SlotState) -> None:
    """Bring keys back towards their homes and work the marks out again. Between windows only: cells move.

    Marks are only ever set, and keys that found their home full stay away when it empties. At 0.9 load with uniform ids
    nearly all buckets came to be marked, and a search for a key without a cell passed 200 of them; tidied in time it is 7.
    """
    num_cells, num_buckets = table.key.shape[0], table.spilled.shape[0]
    parts = (table.key, table.slot, table.future)
    launch_go_home(grid(num_cells, BLOCK), 0, *parts, slots.cell, num_cells, num_buckets, BLOCK)
    table.spilled.zero_()
    launch_respill(grid(num_cells, 2 * BLOCK), 0, *parts, table.spilled, num_cells, num_buckets, 2 * BLOCK)
