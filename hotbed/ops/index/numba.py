"""The index on the CPU, compiled: one thread walks the keys in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from hotbed.ops.index import CLAIMED, EMPTY, FREE, UNIT, WAYS, Arrived, Assigned, Cells, Scoring, SlotState

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S29, _S32 = np.uint64(29), np.uint64(32)
_EMPTY, _FREE, _CLAIMED, _WAYS, _UNIT = EMPTY, FREE, CLAIMED, WAYS, UNIT


@njit(nogil=True, cache=True, inline="always")
def _home(key: Any, num_buckets: int) -> Any:
    x = np.uint64(key)
    x = ((x ^ (x >> _S29)) * _GOLDEN) >> _S32
    return np.int64((x * np.uint64(num_buckets)) >> _S32)


@njit(nogil=True, cache=True, inline="always")
def _find(keys: Any, spilled: Any, key: Any) -> Any:
    """The key's cell, or -1."""
    bucket = _home(key, spilled.size)
    while True:
        for cell in range(bucket * _WAYS, (bucket + 1) * _WAYS):
            if keys[cell] == key:
                return cell
        if spilled[bucket] == 0:
            return -1
        bucket = bucket + 1 if bucket + 1 < spilled.size else 0


@njit(nogil=True, cache=True, inline="always")
def _insert(keys: Any, spilled: Any, key: Any) -> Any:
    """A cell for a key that has none."""
    bucket = _home(key, spilled.size)
    while True:
        for cell in range(bucket * _WAYS, (bucket + 1) * _WAYS):
            if keys[cell] == _EMPTY:
                keys[cell] = key
                return cell
        spilled[bucket] = 1
        bucket = bucket + 1 if bucket + 1 < spilled.size else 0


@njit(nogil=True, cache=True)
def _arrive(
    lookups: Any, keys: Any, future: Any, spilled: Any, bit: Any, cells: Any, counts: Any, cell_of: Any
) -> None:
    for i in range(lookups.size):
        key = lookups[i]
        if key < 0:
            cell_of[i] = -1
            continue
        cell = _find(keys, spilled, key)
        if cell < 0:
            cell = _insert(keys, spilled, key)
            counts[1] += 1
        cell_of[i] = cell
        if future[cell] & bit == 0:
            future[cell] |= bit
            cells[counts[0]] = cell
            counts[0] += 1


def arrive(table: Cells, keys: Tensor, bit: int) -> Arrived:
    """Cells for the keys [L] of a batch, -1 for none."""
    cells, cell_of = np.empty(keys.shape[0], dtype=np.int32), np.empty(keys.shape[0], dtype=np.int32)
    counts = np.zeros(2, dtype=np.int64)
    arrays = (keys.numpy(), table.key.numpy(), table.future.numpy(), table.spilled.numpy())
    _arrive(*arrays, np.int32(_signed(bit)), cells, counts, cell_of)
    return Arrived(torch.from_numpy(cells[: counts[0]].copy()), torch.from_numpy(counts), torch.from_numpy(cell_of))


def _signed(bit: int) -> int:
    return (1 << bit) - (1 << 32 if bit == 31 else 0)


@njit(nogil=True, cache=True)
def _collect(
    batch: Any, slot_of: Any, future: Any, last: Any, uses: Any, dirty: Any,
    bit: Any, clock: int, since: int, half: int, train: Any, misses: Any, counts: Any,
) -> None:  # fmt: skip
    for i in range(batch.size):
        cell = batch[i]
        future[cell] &= ~bit
        slot = slot_of[cell]
        if slot >= 0:
            if last[slot] < since:
                counts[0] += 1
            uses[slot] = max(uses[slot] >> min((clock - last[slot]) // half, 31), 1) + _UNIT
            last[slot] = clock
            dirty[slot] |= train
        elif slot == _FREE:
            slot_of[cell] = _CLAIMED
            misses[counts[1]] = cell
            counts[1] += 1


def collect(
    table: Cells, slots: SlotState, batch: Arrived, bit: int, clock: int, since: int, half: int,
    train: bool, misses: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """One batch's turn; counts [2] grows by hits (first use since `since`) and misses, `misses` holds the cells."""
    _collect(
        batch.cells.numpy(), table.slot.numpy(), table.future.numpy(), slots.last.numpy(), slots.uses.numpy(),
        slots.dirty.numpy(), np.int32(_signed(bit)), clock, since, half, np.uint8(train), misses.numpy(), counts.numpy(),
    )  # fmt: skip


@njit(nogil=True, inline="always")
def _where(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


@cache
def _score_kernel(scoring: Scoring) -> Callable[..., Any]:
    score = njit(nogil=True)(scoring.bind({"where": _where}))

    @njit(nogil=True)
    def kernel(
        cell: Any, last: Any, uses: Any, future: Any, turn: int, clock: int, pinned: int, half: int, out: Any
    ) -> None:
        for s in range(cell.size):
            if cell[s] < 0:
                out[s] = -0x80000000
            elif last[s] >= pinned:
                out[s] = 0x7FFFFFFF
            else:
                bits = np.int64(future[cell[s]])
                ahead = bits & 0x3FFFFFFF
                ahead = ((ahead >> turn) | (ahead << (30 - turn))) & 0x3FFFFFFF
                next_use = 0
                if ahead:
                    next_use = 1
                    while ahead & 1 == 0:
                        ahead >>= 1
                        next_use += 1
                age = clock - last[s]
                out[s] = score(next_use, np.int64(uses[s] >> min(age // half, 31)), age, (bits >> 30) & 1)

    return kernel


def select(table: Cells, slots: SlotState, scoring: Scoring, turn: int, clock: int, pinned: int, count: int) -> Tensor:
    """The `count` slots int64 [M] with the lowest (score, slot), ascending; free ones first, never one used since `pinned`."""
    scores = np.empty(slots.cell.shape[0], dtype=np.int32)
    arrays = (slots.cell.numpy(), slots.last.numpy(), slots.uses.numpy(), table.future.numpy())
    _score_kernel(scoring)(*arrays, turn, clock, pinned, scoring.half_life, scores)
    chosen = np.empty(count, dtype=np.int64)
    if count:
        _lowest(scores, np.partition(scores, count - 1)[count - 1], chosen)
    return torch.from_numpy(chosen)


@njit(nogil=True, cache=True)
def _lowest(scores: Any, threshold: Any, chosen: Any) -> None:
    below = 0
    for score in scores:
        below += score < threshold
    at_threshold = chosen.size - below
    found = 0
    for s in range(scores.size):
        if scores[s] < threshold:
            chosen[found] = s
            found += 1
        elif scores[s] == threshold and at_threshold:
            at_threshold -= 1
            chosen[found] = s
            found += 1


@njit(nogil=True, cache=True)
def _assign(
    misses: Any, chosen: Any, keys: Any, slot_of: Any, future: Any, cell_in: Any, last: Any, uses: Any,
    dirty: Any, clock: int, train: Any, miss_keys: Any, victim_keys: Any, victim_slots: Any, counts: Any,
) -> None:  # fmt: skip
    for i in range(misses.size):
        slot, cell, victim = chosen[i], misses[i], cell_in[chosen[i]]
        if victim >= 0:
            counts[1] += 1
            if dirty[slot]:
                victim_keys[counts[0]], victim_slots[counts[0]] = keys[victim], slot
                counts[0] += 1
            slot_of[victim] = _FREE
            if future[victim] == 0:
                keys[victim] = _EMPTY
                counts[2] += 1
        cell_in[slot], slot_of[cell], last[slot], uses[slot], dirty[slot] = cell, slot, clock, _UNIT, train
        miss_keys[i] = keys[cell]


def assign(table: Cells, slots: SlotState, misses: Tensor, chosen: Tensor, clock: int, train: bool) -> Assigned:
    """Let misses (cells [M]) into the chosen slots [M], in the order of their keys."""
    cells = misses.numpy()
    cells = cells[np.argsort(table.key.numpy()[cells])]
    miss_keys, victim_keys, victim_slots = (torch.empty(cells.size, dtype=torch.int64) for _ in range(3))
    result = Assigned(miss_keys, victim_keys, victim_slots, torch.zeros(3, dtype=torch.int64))
    arrays: list[Any] = [part.numpy() for part in (table.key, table.slot, table.future, *slots)]
    lists: list[Any] = [part.numpy() for part in result]
    _assign(cells, chosen.numpy(), *arrays, clock, np.uint8(train), *lists)  # type: ignore[call-arg]
    return result


@njit(nogil=True, cache=True)
def _place(cell_of: Any, slot_of: Any, uses: Any, slots: Any, missed: Any) -> None:
    for i in range(cell_of.size):
        slots[i] = -1
        if cell_of[i] >= 0:
            slots[i] = slot_of[cell_of[i]]
            missed[0] += uses[slots[i]] == _UNIT


def place(table: Cells, state: SlotState, batch: Arrived, keys: Tensor, order: Tensor | None, missed: Tensor) -> Tensor:
    """The slot int64 [L] of every look-up, -1 for none; `missed` [1] grows by the look-ups of rows that just came in."""
    assert batch.cell_of_lookup is not None
    slots = torch.empty(keys.shape[0], dtype=torch.int64)
    parts = (batch.cell_of_lookup, table.slot, state.uses, slots, missed)
    _place(*(part.numpy() for part in parts))
    return slots


@njit(nogil=True, cache=True)
def _drop(batch: Any, keys: Any, slot_of: Any, future: Any, freed: Any, bit: Any) -> None:
    for cell in batch:
        future[cell] &= ~bit
        if future[cell] == 0 and slot_of[cell] == _FREE and keys[cell] != _EMPTY:
            keys[cell] = _EMPTY
            freed[0] += 1


def drop(table: Cells, batch: Arrived, bit: int) -> Tensor:
    """Forget a batch that arrived and was not planned; the number of cells freed, int64 [1]."""
    arrays = (table.key.numpy(), table.slot.numpy(), table.future.numpy())
    freed = np.zeros(1, dtype=np.int64)
    _drop(batch.cells.numpy(), *arrays, freed, np.int32(_signed(bit)))
    return torch.from_numpy(freed)


@njit(nogil=True, cache=True)
def _respill(keys: Any, spilled: Any) -> None:
    spilled[:] = 0
    for cell in range(keys.size):
        if keys[cell] != _EMPTY:
            bucket = _home(keys[cell], spilled.size)
            while bucket != cell // _WAYS:
                spilled[bucket] = 1
                bucket = bucket + 1 if bucket + 1 < spilled.size else 0


def respill(table: Cells) -> None:
    """Work the marks out again: they are only ever set, and would in time be everywhere."""
    _respill(table.key.numpy(), table.spilled.numpy())
