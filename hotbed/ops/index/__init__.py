"""The index of a cache: which key is in which slot, and which batches ahead will use it. Its size follows the cache.

A hash table of cells in buckets of 16. A cell belongs to one key that is in a slot, or that a batch ahead will use, or both;
on the CPU it stays where it is for its whole life, so batches remember cells. A key is searched for in its home bucket
and, while buckets on the way are marked as spilled, in the next ones. Freeing a cell needs no tombstone: the mark stays.
No search goes round twice: a key that all buckets were searched for has no cell, and one that finds all of them full is
counted as unplaced, which the host reports before the batch is planned.

    arrive    distinct keys of a batch get cells, with the batch's bit in `future`     (look-ahead)
    collect   a batch is planned: hits are marked as used, misses listed                   (plan)
    sweep     bits of batches that are past are cleared                                (plan)
    rank      slots in the order in which they may be taken, by the policy's score     (plan)
    assign    misses take slots, victims leave them                                    (plan)
    place     lookups of a batch -> slots
    tidy      keys go back towards their homes (on CUDA), and the marks of spilled buckets are worked out again

What they count goes to a row of eight numbers on the device, named below. Which rows stay never depends on the order in
which threads finish: slots with equal scores rank by the key they hold.

Shapes: T cells, S slots, L lookups, U distinct keys, M misses, V victims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.ops.backend import backend_of

__all__ = [
    "AHEAD_BITS",
    "EMPTY",
    "FREE",
    "HOT_BIT",
    "SYNC_BIT",
    "UNIT",
    "WAYS",
    "ArrivalCells",
    "Cells",
    "Lists",
    "ScoreFunction",
    "SlotState",
    "WindowClock",
    "bits_of",
    "new_cells",
    "new_slots",
    "ops_for",
]

WAYS = 16  # cells of a bucket
EMPTY = -1  # key of an unused cell
FREE = -1  # cell of an unused slot; slot of a cell whose key is in none
MOVED = -4  # key of a cell whose key has just gone back towards its home
CLAIMED = -2  # slot of a cell whose key is missed in the window being planned
UNIT = 16  # what one use adds to the aged count
NUM_KEYS, NEW_CELLS, HITS, MISSES, VICTIMS, EVICTIONS, FREED, MISSED_LOOKUPS = range(8)  # places in a row of counts
UNPLACED = 2  # in the row of an arrival, which has no hits: keys for which no cell was left
AHEAD_BITS = 30  # of `future`, for batches ahead
HOT_BIT = 30  # of `future`: a row that the policy has to keep; its cell stays for good
SYNC_BIT = 31  # of `future`: the batch that is planned at once


class _CellTensors(NamedTuple):
    key: Tensor  # int64 [T]
    slot: Tensor  # int32 [T]
    future: Tensor  # int32 [T]: bit n < 30 stands for one step of batches ahead
    spilled: Tensor  # int32 [T / 16]: a key of this bucket may be in the next one


class Cells(_CellTensors):
    """The hash table."""

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """The same memory for compiled code on the CPU; to ask every tensor again takes 4 us a time."""
        return tuple(part.numpy() for part in self)


class _SlotTensors(NamedTuple):
    cell: Tensor  # int32 [S]
    last: Tensor  # int32 [S]: clock of the last use
    uses: Tensor  # int32 [S]: uses, halved with age, as of `last`
    dirty: Tensor  # uint8 [S]: may differ from the row below


class SlotState(_SlotTensors):
    """What is known of every slot."""

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """As those of Cells."""
        return tuple(part.numpy() for part in self)


MOST_USES = 1 << 20  # that a row may begin with


class ScoreFunction(NamedTuple):
    """How a policy values a slot: score(next_use, uses, age, hot) -> int32, the lowest leave first.

    next_use: steps to the next use, counted from the end of the window; 0 when none is known (a step is a batch, or several).
    uses: aged count. age: batches since the last use. hot: 1 for rows that the policy has to keep. Integer arithmetic and
    `where` only, so that every device and the simulator agree.

    Of two slots that nothing happens to, the one with the lower score keeps the lower one while both grow older, except where
    one comes to a multiple of the half-life or to `oldest`; and a slot's score does not fall when a next use becomes known. So
    the CPU need not look at all of them (victims.py). An age may be negative there: that of a use after the moment in question.
    """

    name: str
    score: Callable[..., Any]
    half_life: int  # batches without use after which a count is halved
    oldest: int = 0  # ages from this one on count alike; 0: none do

    def bind(self, names: Mapping[str, Any]) -> Callable[..., Any]:
        """The score with `where` taken from `names`."""
        return FunctionType(self.score.__code__, dict(names), self.score.__name__)


class WindowClock(NamedTuple):
    """The point at which a window chooses its slots."""

    next_bit: int  # of the next batch ahead
    step: int  # the same, counted without end
    clock: int  # of its last batch
    since: int  # of its first one
    num_keys: int  # distinct keys of its batches, one by one


class ArrivalCells(NamedTuple):
    """A batch that has cells."""

    cells: Tensor | None  # int32 [U], one for each distinct key; on CUDA they are found again from the sorted keys
    number_of_lookup: Tensor | None  # int32 [L]: which of the distinct keys, -1 for none; likewise
    new_keys: Any = None  # int64 [_]: keys that had no cell, on the host, where they are listed


class Lists(NamedTuple):
    """What `assign` decided: which rows come in, and which changed rows leave. The first counts[VICTIMS] victims are valid."""

    miss_keys: Tensor  # int64 [M]
    miss_slots: Tensor  # int64 [M]
    victim_slots: Tensor  # int64 [M]
    host_miss_keys: Tensor  # int64 [>= M], in memory the host can read
    host_victim_keys: Tensor  # int64 [>= M], likewise


def new_cells(num_cells: int, device: torch.device) -> Cells:
    """A table of at least `num_cells` cells, all empty."""
    num_buckets = max(1, -(-num_cells // WAYS))
    return Cells(
        key=torch.full((num_buckets * WAYS,), EMPTY, dtype=torch.int64, device=device),
        slot=torch.full((num_buckets * WAYS,), FREE, dtype=torch.int32, device=device),
        future=torch.zeros(num_buckets * WAYS, dtype=torch.int32, device=device),
        spilled=torch.zeros(num_buckets, dtype=torch.int32, device=device),
    )


def new_slots(num_slots: int, device: torch.device) -> SlotState:
    """Free slots."""
    return SlotState(
        cell=torch.full((num_slots,), FREE, dtype=torch.int32, device=device),
        last=torch.zeros(num_slots, dtype=torch.int32, device=device),
        uses=torch.zeros(num_slots, dtype=torch.int32, device=device),
        dirty=torch.zeros(num_slots, dtype=torch.uint8, device=device),
    )


def bits_of(bit: int) -> int:
    """One bit as a 32-bit number with a sign."""
    return (1 << bit) - (1 << 32 if bit == SYNC_BIT else 0)


def ops_for(tensor: Tensor) -> Any:
    """The module with the functions above for tensors on this device."""
    if backend_of(tensor) == "triton":
        from hotbed.ops.index import triton

        return triton
    from hotbed.ops.index import numba

    return numba
