"""The look-ups of the CPU benchmarks: those of `hotbed bench`, as id matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.bench.workload import KAGGLE_ROWS, ZIPF, make_workload

__all__ = ["KAGGLE_ROWS", "batches"]


def batches(
    rows: tuple[int, ...], batch_size: int, count: int, *, exponent: float = ZIPF, seed: int = 0
) -> list[Tensor]:
    """`count` id matrices int64 [B, F]."""
    return make_workload(rows, batch_size, count, torch.device("cpu"), zipf=exponent, seed=seed).matrices
