"""Settings in, bytes of every tier and of the workspace out.

Rows and what finds them are exact: they are what budgets promise (sizing/budget.py). The rest of the device is the batches
ahead, vectors with their gradients, the model with gradients and optimizer state, and what kernels need besides, which is
measured in the calibration.

Shapes: S slots, L lookups of a batch, T cells of the index.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from hotbed.cache import bounded_cells, look_far
from hotbed.forecast.replay import LookAhead
from hotbed.pipeline.recorded import CELLS_FACTOR, CELLS_PER_KEY

WORKSPACE = "workspace (measured)"  # the part that a calibration adds
READ_AHEAD = 8  # batches that are read and not asked for yet
_CELL = 16.25  # bytes of index, with its share of a mark
_SLOT = 13  # bytes of slot state


class Part(NamedTuple):
    """Bytes of one thing in one tier."""

    tier: str  # device, memory or ssd
    name: str
    num_bytes: float
    exact: bool


class Shape(NamedTuple):
    """What a batch is like."""

    samples: int
    features: int
    dense: int
    lookups: float
    keys: float  # distinct
    width: int  # of a vector


def lane_cells(num_slots: int, shape: Shape, ahead: LookAhead) -> float:
    """Of the index on CUDA, where room for the keys ahead is made at once; on a CPU it is simulated (replay_kernels.py)."""
    if ahead.bounded:
        return bounded_cells(num_slots, "cuda")
    _, far = look_far(int(shape.keys), num_slots, ahead.look_ahead)
    return max(2.0 * num_slots, CELLS_FACTOR * (num_slots + CELLS_PER_KEY * far * shape.keys))


def index_bytes(num_slots: int, num_cells: float, cuda: bool) -> int:
    """Of index and slot states; CUDA marks every cell with the batch that came last."""
    return round(num_cells * (_CELL + (4 if cuda else 0)) + num_slots * _SLOT)


def batch_bytes(shape: Shape) -> float:
    """Of one batch as it is read."""
    return 8 * shape.lookups + 4 * shape.samples * (shape.dense + 1)


def batches_ahead(num_slots: int, shape: Shape, ahead: LookAhead) -> int:
    """Batches that are on the device before their turn."""
    return look_far(int(shape.keys), num_slots, ahead.look_ahead, ahead.bounded)[1] + READ_AHEAD


def vector_bytes(shape: Shape) -> float:
    """Of looked-up vectors and their gradients."""
    return 2 * 4 * shape.samples * shape.features * shape.width


def model_bytes(model: nn.Module) -> int:
    """Of weights, gradients and two states of Adam."""
    return 16 * sum(one.numel() for one in model.parameters())


def staging_bytes(moved: float, record: int) -> float:
    """Pinned host memory for rows on their way: three windows of two batches, both ways."""
    return 3 * 2 * 2 * math.ceil(moved) * record
