"""What one measurement varies: widths, optimizer, cache and how long. Systems are built from it and timed by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hotbed.bench.workload import KAGGLE_ROWS

OPTIMIZERS = ("rowwise_adagrad", "adam", "adagrad", "sgd")
LR, EPS = 0.01, 1e-8  # of the rows, for every system
GROUP = 10  # steps between two looks at the clock
_STATES = {"rowwise_adagrad": (1, 0), "adam": (1, 2), "adagrad": (0, 1), "sgd": (0, 0)}  # numbers (per row, per weight)


@dataclass(frozen=True)
class Setting:
    """One line of the benchmark, for every system."""

    device: torch.device
    dim: int
    batch: int
    optimizer: str
    dense: int  # width of the MLP behind the look-up; 0: a given gradient instead, the embedding step alone
    cache: float  # share of the rows on the device, where a system has a cache
    policy: str | None  # hotbed's; None: its default
    window: int | None
    look_ahead: int | None
    warm_store: bool  # hotbed's store counts every row as written before the first step
    steps: int
    warmup: int
    rows: tuple[int, ...] = KAGGLE_ROWS

    @property
    def width(self) -> int:
        """Numbers of one sample's vectors."""
        return len(self.rows) * self.dim

    @property
    def record_bytes(self) -> int:
        """One row with its optimizer state."""
        per_row, per_weight = _STATES[self.optimizer]
        return 4 * (self.dim * (1 + per_weight) + per_row)

    @property
    def table_bytes(self) -> int:
        """All rows with their optimizer state."""
        return sum(self.rows) * self.record_bytes
