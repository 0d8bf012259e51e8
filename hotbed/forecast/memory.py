"""Settings -> bytes of every tier and of the workspace.

Rows and their index are exact: budgets count the same bytes (tables/sizing/budget.py). So is a budget for rows on their way
(`staging`); without one they are estimated from the first window, of which every row is missed. The rest of the device memory
is batches ahead, vectors with their gradients, the model with gradients and optimizer state, on CUDA the buffers of the
recorded planner, and the workspace of kernels, which the calibration measures.

Shapes: S slots, L lookups of a batch, T cells of the index.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from hotbed.cache import MOST_BATCHES, bounded_cells, look_ahead_for
from hotbed.cache.index import CELL_BYTES, STAMP_BYTES, STATE_BYTES
from hotbed.forecast.replay import LookAhead
from hotbed.ops.inputs import bucket
from hotbed.ops.move.compiled_transfer import rows_of_piece
from hotbed.ops.move.transfer_loop import RING
from hotbed.pipeline.reader import READ_AHEAD
from hotbed.pipeline.recorded import CELLS_FACTOR, CELLS_PER_KEY
from hotbed.tables.sizing.budget import Room, staged_row_bytes

ON_THEIR_WAY = "rows on their way"
_SPARE = 1.25  # buffers of rows on their way have a quarter more than the largest window needed
_PLANNED, _WINDOWS = 4, 8  # of the recorded planner: windows whose slots, and whose lists, are kept
WORKSPACE = "workspace (measured)"  # the part that a calibration adds


class MemoryPart(NamedTuple):
    """Bytes of one thing in one tier."""

    tier: str  # device, memory or ssd
    name: str
    num_bytes: float
    exact: bool


class BatchShape(NamedTuple):
    """Sizes of a batch."""

    samples: int
    features: int
    dense: int
    lookups: float
    keys: float  # distinct
    width: int  # of a vector


def recorded_cells(num_slots: int, shape: BatchShape, ahead: LookAhead) -> float:
    """Cells of the index on CUDA, with room for all keys ahead from the start; for a CPU see replay_kernels.py."""
    if ahead.bounded:
        return bounded_cells(num_slots, "cuda")
    _, far = look_ahead_for(int(shape.keys), num_slots, ahead.look_ahead)
    return max(2.0 * num_slots, CELLS_FACTOR * (num_slots + CELLS_PER_KEY * far * shape.keys))


def index_bytes(num_slots: int, num_cells: float, cuda: bool) -> int:
    """Bytes of index and slot states; on CUDA every cell has a stamp, the last batch that used it."""
    return round(num_cells * (CELL_BYTES + (STAMP_BYTES if cuda else 0)) + num_slots * STATE_BYTES)


def batch_bytes(shape: BatchShape) -> float:
    """Bytes of one batch as it is read."""
    return 8 * shape.lookups + 4 * shape.samples * (shape.dense + 1)


def batches_ahead(num_slots: int, shape: BatchShape, ahead: LookAhead) -> int:
    """Batches that are on the device ahead of training."""
    return look_ahead_for(int(shape.keys), num_slots, ahead.look_ahead, ahead.bounded)[1] + READ_AHEAD


def vector_bytes(shape: BatchShape) -> float:
    """Bytes of looked-up vectors and their gradients."""
    return 2 * 4 * shape.samples * shape.features * shape.width


def model_bytes(model: nn.Module) -> int:
    """Bytes of weights, gradients and two states of Adam."""
    return 16 * sum(one.numel() for one in model.parameters())


def staged_rows(room: Room, cuda: bool) -> int | None:
    """Rows of a window that `staging` allows on their way; None: not limited."""
    return None if is_direct(room, cuda) else room.staged_rows


def is_direct(room: Room, cuda: bool) -> bool:
    """Whether rows move from memory to memory, and none waits in a buffer; see CachedRows.is_direct."""
    return not cuda and room.place.folder is None and not room.place.int8 and room.ids is None


def transit_bytes(num_rows: float, record: int, cuda: bool) -> float:
    """Bytes of buffers, on the host and on a CUDA device each, for windows of which the largest misses `num_rows` rows."""
    return _SPARE * num_rows * staged_row_bytes(record, "cuda" if cuda else "cpu")


def ring_bytes(num_rows: int, record: int, staged: int | None) -> float:
    """Host memory through which compiled transfers send windows of up to `num_rows` rows in pieces, in and out."""
    return 2.0 * RING * rows_of_piece(record, num_rows, staged) * record


def planner_bytes(shape: BatchShape, num_slots: int, window: int | None, *, key_bytes: int) -> tuple[float, float]:
    """(device, page-locked host) bytes of a recorded planner; see ops/index/recorded.py."""
    num_batches, lookups, per_lookup, starts = window or MOST_BATCHES, shape.lookups, 8 + key_bytes, 0
    if lookups != shape.samples * shape.features:  # bags: a vector and a weight for each lookup, and room to spare
        lookups, per_lookup = bucket(int(lookups) + int(lookups) // 16), per_lookup + 8
        starts = 8 * (bucket(shape.samples) * shape.features + 1)
    room = min(num_slots, lookups * num_batches)
    batches = _PLANNED * num_batches * (lookups * per_lookup + starts)
    return batches + room * (4 + 24 * _WINDOWS), 16 * _WINDOWS * room
