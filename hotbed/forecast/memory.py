"""Settings -> bytes of every tier and of the workspace.

Rows and their index are exact: budgets count the same bytes (tables/sizing/budget.py). The rest of the device memory is
batches ahead, vectors with their gradients, the model with gradients and optimizer state, and the workspace of kernels, which
the calibration measures.

Shapes: S slots, L lookups of a batch, T cells of the index.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from hotbed.cache import bounded_cells, look_ahead_for
from hotbed.cache.cache import CELL_BYTES, STAMP_BYTES, STATE_BYTES
from hotbed.forecast.replay import LookAhead
from hotbed.pipeline.reader import READ_AHEAD
from hotbed.pipeline.recorded import CELLS_FACTOR, CELLS_PER_KEY

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
