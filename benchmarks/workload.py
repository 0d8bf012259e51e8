"""The lookups of the CPU benchmarks: those of `hotbed bench`, as id matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.bench.setting import KAGGLE_ROWS, ZIPF, Setting
from hotbed.bench.workload import make_workload

__all__ = ["KAGGLE_ROWS", "batches"]


def batches(
    rows: tuple[int, ...], batch_size: int, count: int, *, exponent: float = ZIPF, seed: int = 0
) -> list[Tensor]:
    """`count` id matrices int64 [B, F]."""
    setting = Setting(torch.device("cpu"), batch=batch_size, zipf=exponent, rows=rows)
    return [ids for ids in make_workload(setting, count, seed=seed).batches if isinstance(ids, Tensor)]
