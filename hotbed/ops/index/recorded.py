"""The index for batches below a capacity, CUDA only: every number that changes from batch to batch stays on the device.

So a whole arrival, and a whole plan, is the same sequence of launches every time, and can be recorded once and replayed. How
many lookups a batch has and whether rows learn is in its description (ops/inputs); what lies beyond is padding, which sorts
last and is never looked at. Numbers and lists that the host wants are written by the kernels into memory it can read.

Shapes: C lookups that a batch may have, N bags that it may have, K batches of a window, S slots, `room` misses of a window at
most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.host.devices import mapped_empty
from hotbed.ops.index import Cells, Lists, ScoreFunction, SlotState
from hotbed.ops.index.triton import (
    BLOCK,
    WIDE,
    bound,
    grid,
    launch_arrive_unsorted,
    launch_assign,
    launch_collect,
    launch_place,
    launch_score,
    launch_sweep,
    launch_tick,
)
from hotbed.ops.inputs import BATCHES, Capacity, InputLayout
from hotbed.ops.inputs.triton import Descriptions

ARRIVALS = 512  # batches ahead whose counts are kept
NEW_LISTS = 32  # batches whose new keys are kept
_NEW_SHARE = 4  # new keys listed per batch: at most one in this many of its lookups
WINDOWS = 8  # windows whose counts and lists are kept
ARRIVED, PLANNED, CLOCK, NUM_WINDOWS = range(4)  # places in the state


class RecordedBuffers(NamedTuple):
    """Device memory of a recorded planner, and what the host can read of it."""

    state: Tensor  # int64 [4]: batches arrived, batches planned, clock, windows planned
    arrival_counts: Tensor  # int64 [ARRIVALS, 8]
    host_arrival_counts: Tensor  # int64 [ARRIVALS, 16]; [8] is the batch's number + 1 once the counts are there
    window_counts: Tensor  # int64 [WINDOWS, 8]
    host_window_counts: Tensor  # int64 [WINDOWS, 16], likewise
    misses: Tensor  # int32 [room], cells
    lists: Lists  # [WINDOWS, room] each
    host_new_keys: (
        Tensor | None
    )  # int64 [NEW_LISTS, _]: of a batch, keys that were neither here nor ahead; some of them
    slots: Tensor  # int32 [batches, >= C]
    sorted_keys: Tensor  # [batches, >= C]
    order: Tensor  # int32 [batches, >= C]
    starts: Tensor | None  # of bags: int64 [batches, > N]
    out_row: Tensor | None  # of bags: int32 [batches, >= C]
    scale: Tensor | None  # of bags whose lookups have weights: float32 [batches, >= C]


def new_buffers(
    capacity: Capacity, batches: int, room: int, layout: InputLayout, device: torch.device, lists_new: bool = False
) -> RecordedBuffers:
    """For batches below a capacity, `batches` of them planned and in use at a time. Rows begin at 64 bytes, for kernels."""
    num_lookups, room = _aligned(capacity.num_lookups), _aligned(room)
    num_starts = _aligned(layout.num_spans * capacity.num_samples + 1)

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    def on_host(*shape: int) -> Tensor:
        return mapped_empty(shape, device).zero_()

    return RecordedBuffers(
        state=zeros(4),
        arrival_counts=zeros(ARRIVALS, 8),
        host_arrival_counts=on_host(ARRIVALS, 16),
        window_counts=zeros(WINDOWS, 8),
        host_window_counts=on_host(WINDOWS, 16),
        misses=zeros(room, dtype=torch.int32),
        lists=Lists(*(zeros(WINDOWS, room) for _ in range(3)), *(on_host(WINDOWS, room) for _ in range(2))),
        host_new_keys=on_host(NEW_LISTS, max(1024, _aligned(num_lookups // _NEW_SHARE))) if lists_new else None,
        slots=zeros(batches, num_lookups, dtype=torch.int32),
        sorted_keys=zeros(batches, num_lookups, dtype=layout.key_type),
        order=zeros(batches, num_lookups, dtype=torch.int32),
        starts=zeros(batches, num_starts) if layout.is_bags else None,
        out_row=zeros(batches, num_lookups, dtype=torch.int32) if layout.is_bags else None,
        scale=zeros(batches, num_lookups, dtype=torch.float32) if layout.is_scaled else None,
    )


def _aligned(count: int) -> int:
    return max(16, -(-count // 16) * 16)


def recorded_arrive(
    table: Cells, recorded: RecordedBuffers, inputs: Descriptions, num: int, stride: int, stamps: Tensor
) -> None:
    """The next batch ahead, of at most `num` lookups; `stride` batches share a bit of `future`.

    Stamps int32, one of each cell, are the planner's.
    """
    keys = inputs.make_keys(recorded.state, ARRIVED, 0, num)
    new_keys = recorded.arrival_counts if recorded.host_new_keys is None else recorded.host_new_keys
    num_lists = 0 if recorded.host_new_keys is None else NEW_LISTS
    launch_arrive_unsorted(
        grid(num), (keys.dtype, num_lists), keys, table.key, table.future, table.spilled, stamps, recorded.arrival_counts,
        recorded.state, inputs.rows, new_keys, inputs.words, table.spilled.shape[0], stride, new_keys.shape[1], ARRIVALS,
        BATCHES, num_lists, BLOCK,
    )  # fmt: skip
    launch_tick(
        (1,), ARRIVED, recorded.arrival_counts, recorded.host_arrival_counts, recorded.state, 0, ARRIVED, ARRIVALS
    )


def recorded_plan(
    table: Cells,
    slots: SlotState,
    recorded: RecordedBuffers,
    inputs: Descriptions,
    num: int,
    num_batches: int,
    num_samples: int,
    scoring: ScoreFunction,
    stride: int,
) -> None:
    """The next window of batches, of at most `num` lookups and `num_samples` samples: decided, placed, listed for the host."""
    num_slots = slots.cell.shape[0]
    num_buckets, num_cells, room = table.spilled.shape[0], table.key.shape[0], recorded.misses.shape[0]
    parts = []
    for k in range(num_batches):
        keys = inputs.make_keys(recorded.state, PLANNED, k, num)
        if recorded.starts is not None and recorded.out_row is not None:
            bags = (recorded.starts, recorded.out_row, recorded.scale)
            inputs.lay_bags(keys, recorded.state, PLANNED, k, num_samples, *bags)
        parts.append(torch.sort(keys, stable=True))
    for k, (sorted_keys, _) in enumerate(parts):
        launch_collect(
            grid(num), (sorted_keys.dtype, 1), sorted_keys, table.key, table.spilled, table.slot, slots.last, slots.uses,
            slots.dirty, recorded.misses, recorded.window_counts, recorded.state, inputs.rows, 0, num_buckets, k + 1, 0,
            scoring.half_life, 0, inputs.words, WINDOWS, BATCHES, BLOCK,
        )  # fmt: skip
    launch_sweep(
        grid(num_cells, WIDE), 1, table.key, table.slot, table.future, recorded.window_counts, recorded.state, 0, num_batches,
        stride, num_cells, WINDOWS, WIDE,
    )  # fmt: skip
    ranks = torch.empty(num_slots, dtype=torch.int64, device=slots.cell.device)
    launch_score(
        grid(num_slots, WIDE), (scoring.name, 1), slots.cell, slots.last, slots.uses, table.key, table.future, ranks,
        recorded.state, 0, 0, 0, scoring.half_life, num_slots, num_batches, stride, bound(scoring), 1, WIDE,
    )  # fmt: skip
    order = torch.sort(ranks).indices
    launch_assign(
        grid(min(room, num * num_batches)), 1, recorded.misses, order, table.key, table.slot, table.future, *slots,
        *recorded.lists, recorded.window_counts, recorded.state, inputs.rows, 0, num_batches, 0, room, inputs.words, WINDOWS,
        BATCHES, BLOCK,
    )  # fmt: skip
    for k, (sorted_keys, positions) in enumerate(parts):
        launch_place(
            grid(num), (sorted_keys.dtype, positions.dtype, recorded.slots.shape[0]), sorted_keys, positions, table.key,
            table.slot, table.spilled, slots.uses, recorded.slots, recorded.sorted_keys, recorded.order, recorded.window_counts,
            recorded.state, inputs.rows, 0, num_buckets, k, recorded.slots.shape[1], inputs.words, recorded.slots.shape[0],
            WINDOWS, BATCHES, BLOCK,
        )  # fmt: skip
    launch_tick(
        (1,),
        NUM_WINDOWS,
        recorded.window_counts,
        recorded.host_window_counts,
        recorded.state,
        num_batches,
        NUM_WINDOWS,
        WINDOWS,
    )
