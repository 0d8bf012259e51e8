"""The index on the CPU, compiled: one thread walks the keys in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.host.jit import digest_of, njit
from hotbed.ops.index import (
    CLAIMED,
    EMPTY,
    FREE,
    UNIT,
    UNPLACED,
    WAYS,
    ArrivalCells,
    Cells,
    Lists,
    ScoreFunction,
    SlotState,
)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S29, _S32 = np.uint64(29), np.uint64(32)
TIDY = (
    2  # a table more than half full is tidied when one cell in so many has been taken anew: 6 ns each, at 3 ns a cell
)
_EMPTY, _FREE, _CLAIMED, _WAYS, _UNIT, _UNPLACED = EMPTY, FREE, CLAIMED, WAYS, UNIT, UNPLACED


@njit(nogil=True, cache=True, inline="always")
def _home(key: Any, num_buckets: int) -> Any:
    x = np.uint64(key)
    x = ((x ^ (x >> _S29)) * _GOLDEN) >> _S32
    return np.int64((x * np.uint64(num_buckets)) >> _S32)


@njit(nogil=True, cache=True, inline="always")
def _find(keys: Any, spilled: Any, key: Any) -> Any:
    """The key's cell, or -1."""
    bucket = _home(key, spilled.size)
    for _ in range(spilled.size):  # all buckets of a nearly full table may be marked
        for cell in range(bucket * _WAYS, (bucket + 1) * _WAYS):
            if keys[cell] == key:
                return cell
        if spilled[bucket] == 0:
            return -1
        bucket = bucket + 1 if bucket + 1 < spilled.size else 0
    return -1


@njit(nogil=True, cache=True, inline="always")
def _insert(keys: Any, spilled: Any, key: Any) -> Any:
    """A cell for a key that has none; -1 when all are taken."""
    bucket = _home(key, spilled.size)
    for _ in range(spilled.size):
        for cell in range(bucket * _WAYS, (bucket + 1) * _WAYS):
            if keys[cell] == _EMPTY:
                keys[cell] = key
                return cell
        spilled[bucket] = 1
        bucket = bucket + 1 if bucket + 1 < spilled.size else 0
    return -1


@njit(nogil=True, cache=True)
def _arrive(
    lookups: Any, keys: Any, future: Any, spilled: Any, bits: Any, cells: Any, counts: Any, cell_of: Any
) -> None:
    mark = np.int32(
        -0x80000000
    )  # the bit of batches planned at once; it tells the first look-up of a key from the others
    for i in range(lookups.size):
        key = lookups[i]
        if key < 0:
            cell_of[i] = -1
            continue
        cell = _find(keys, spilled, key)
        if cell < 0:
            cell = _insert(keys, spilled, key)
            counts[1 if cell >= 0 else _UNPLACED] += 1
        cell_of[i] = cell
        if cell < 0:
            continue
        if future[cell] & mark == 0:
            future[cell] |= mark
            cells[counts[0]] = cell
            counts[0] += 1
    for i in range(counts[0]):
        future[cells[i]] = (future[cells[i]] & ~mark) | bits


def arrive(table: Cells, keys: Tensor, bits: int, counts: Tensor) -> ArrivalCells:
    """Cells for the keys [L] of a batch, -1 for none; `bits` are set in their futures."""
    cells, cell_of = np.empty(keys.shape[0], dtype=np.int32), np.empty(keys.shape[0], dtype=np.int32)
    arrays = (keys.numpy(), table.key.numpy(), table.future.numpy(), table.spilled.numpy())
    _arrive(*arrays, np.int32(bits), cells, counts.numpy(), cell_of)
    return ArrivalCells(torch.from_numpy(cells[: int(counts[0])].copy()), torch.from_numpy(cell_of))


@njit(nogil=True, cache=True)
def _collect(
    batch: Any, slot_of: Any, last: Any, uses: Any, dirty: Any, clock: int, since: int, half: int, train: Any,
    misses: Any, counts: Any,
) -> None:  # fmt: skip
    for i in range(batch.size):
        cell = batch[i]
        slot = slot_of[cell]
        if slot >= 0:
            if last[slot] < since:
                counts[2] += 1
            uses[slot] = max(uses[slot] >> min((clock - last[slot]) // half, 31), 1) + _UNIT
            last[slot] = clock
            dirty[slot] |= train
        elif slot == _FREE:
            slot_of[cell] = _CLAIMED
            misses[counts[3]] = cell
            counts[3] += 1


def collect(
    table: Cells, slots: SlotState, batch: ArrivalCells, keys: Tensor, clock: int, since: int, half: int, train: bool,
    misses: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """One batch's turn: counts grow by hits (first use since `since`) and misses, whose cells `misses` holds."""
    assert batch.cells is not None
    _collect(
        batch.cells.numpy(), table.slot.numpy(), slots.last.numpy(), slots.uses.numpy(), slots.dirty.numpy(),
        clock, since, half, np.uint8(train), misses.numpy(), counts.numpy(),
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _sweep(keys: Any, slot_of: Any, future: Any, bits: Any, counts: Any) -> None:
    for cell in range(keys.size):
        if future[cell] & bits:
            future[cell] &= ~bits
            if future[cell] == 0 and slot_of[cell] == _FREE:
                keys[cell] = _EMPTY
                counts[6] += 1


def sweep(table: Cells, bits: int, counts: Tensor) -> None:
    """Clear `bits` in every future: the batches they stand for are past. Cells that serve nothing any more are freed."""
    _sweep(table.key.numpy(), table.slot.numpy(), table.future.numpy(), np.int32(bits), counts.numpy())


@njit(nogil=True, inline="always")
def _where(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


@cache
def _score_kernel(scoring: ScoreFunction) -> Callable[..., Any]:
    tag = f"{scoring.name}_{digest_of(tuple(scoring))}"
    score = njit(scoring.bind({"where": _where}), name=f"score_{tag}", nogil=True)

    @njit(name=f"kernel_{tag}", nogil=True)
    def kernel(
        cell: Any, last: Any, uses: Any, keys: Any, future: Any, turn: int, clock: int, since: int, half: int, out: Any
    ) -> None:
        for s in range(cell.size):
            rank = -0x80000000
            key = np.int64(s)
            if cell[s] >= 0:
                key = keys[cell[s]] & 0xFFFFFFFF
                rank = 0x7FFFFFFF
                if last[s] < since:
                    bits = np.int64(future[cell[s]])
                    ahead = bits & 0x3FFFFFFF
                    ahead = ((ahead >> turn) | (ahead << (30 - turn))) & 0x3FFFFFFF
                    next_use = 0
                    if ahead:
                        next_use = 1
                        while ahead & 1 == 0:  # ends: a bit is set
                            ahead >>= 1
                            next_use += 1
                    age = clock - last[s]
                    rank = score(next_use, np.int64(uses[s] >> min(age // half, 31)), age, (bits >> 30) & 1)
            out[s] = (np.int64(rank) << 32) | key

    return kernel


def rank(
    table: Cells, slots: SlotState, scoring: ScoreFunction, turn: int, clock: int, since: int, count: int
) -> Tensor:
    """Slots int64 [>= M], in the order in which they may be taken; free ones first, never one used at `since` or later."""
    ranks = np.empty(slots.cell.shape[0], dtype=np.int64)
    arrays = (slots.cell, slots.last, slots.uses, table.key, table.future)
    _score_kernel(scoring)(*(part.numpy() for part in arrays), turn, clock, since, scoring.half_life, ranks)
    lowest = np.argpartition(ranks, count - 1)[:count] if 0 < count < ranks.size else np.arange(ranks.size)
    return torch.from_numpy(lowest[np.argsort(ranks[lowest])])


@njit(nogil=True, cache=True)
def _assign(
    misses: Any, order: Any, keys: Any, slot_of: Any, future: Any, cell_in: Any, last: Any, uses: Any, dirty: Any,
    clock: int, train: Any, miss_keys: Any, miss_slots: Any, victim_slots: Any, victim_keys: Any, counts: Any,
) -> None:  # fmt: skip
    for i in range(misses.size):
        slot, cell = order[i], misses[i]
        victim = cell_in[slot]
        if victim >= 0:
            counts[5] += 1
            if dirty[slot]:
                victim_keys[counts[4]], victim_slots[counts[4]] = keys[victim], slot
                counts[4] += 1
            slot_of[victim] = _FREE
            if future[victim] == 0:
                keys[victim] = _EMPTY
                counts[6] += 1
        cell_in[slot], slot_of[cell], last[slot], uses[slot], dirty[slot] = cell, slot, clock, _UNIT, train
        miss_keys[i], miss_slots[i] = keys[cell], slot


def assign(
    table: Cells, slots: SlotState, misses: Tensor, order: Tensor, clock: int, train: bool, lists: Lists, counts: Tensor
) -> None:
    """Let misses (cells [M]) into slots, in the order of their keys; `lists` and `counts` say who came and who left."""
    cells = misses.numpy()
    cells = cells[np.argsort(table.key.numpy()[cells])]
    parts = (table.key, table.slot, table.future, *slots)
    arrays: list[Any] = [part.numpy() for part in parts]
    _assign(
        cells, order.numpy(), *arrays, clock, np.uint8(train), lists.miss_keys.numpy(), lists.miss_slots.numpy(),
        lists.victim_slots.numpy(), lists.host_victim_keys.numpy(), counts.numpy(),
    )  # type: ignore[call-arg]  # fmt: skip
    lists.host_miss_keys[: cells.size] = lists.miss_keys


@njit(nogil=True, cache=True)
def _place(cell_of: Any, slot_of: Any, uses: Any, slots: Any, missed: Any) -> None:
    for i in range(cell_of.size):
        slots[i] = -1
        if cell_of[i] >= 0:
            slots[i] = slot_of[cell_of[i]]
            missed[7] += uses[slots[i]] == _UNIT


def place(
    table: Cells, state: SlotState, batch: ArrivalCells, keys: Tensor, order: Tensor | None, counts: Tensor
) -> Tensor:
    """The slot int64 [L] of every look-up, -1 for none; counts grow by the look-ups of rows that just came in."""
    assert batch.cell_of_lookup is not None
    slots = torch.empty(keys.shape[0], dtype=torch.int64, device="cpu")
    parts = (batch.cell_of_lookup, table.slot, state.uses, slots, counts)
    _place(*(part.numpy() for part in parts))
    return slots


@njit(nogil=True, cache=True)
def _respill(keys: Any, spilled: Any) -> None:
    spilled[:] = 0
    for cell in range(keys.size):
        if keys[cell] != _EMPTY:
            bucket = _home(keys[cell], spilled.size)
            while bucket != cell // _WAYS:  # ends: it passes every bucket in turn
                spilled[bucket] = 1
                bucket = bucket + 1 if bucket + 1 < spilled.size else 0


def tidy(table: Cells, slots: SlotState) -> None:
    """Work the marks out again: they are only ever set, and would in time be everywhere. Batches know cells: none moves."""
    _respill(table.key.numpy(), table.spilled.numpy())
