"""The look-ups every embedding benchmark shares: Criteo-Kaggle cardinalities, one Zipf id per feature, scattered rows."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306),
    *(10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def zipf_ids(num_rows: int, count: int, exponent: float, generator: torch.Generator) -> Tensor:
    """Bounded Zipf ranks, scattered over the rows by a multiplicative permutation: position says nothing about frequency."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    rank = ((float(num_rows) ** (1 - exponent) - 1) * uniform + 1) ** (1 / (1 - exponent))
    rank = (rank.floor().long() - 1).clamp_(0, num_rows - 1)
    stride = 2654435761 % num_rows if num_rows > 1 else 1
    while num_rows > 1 and (stride < 1 or gcd(stride, num_rows) != 1):
        stride += 1
    return (rank * stride) % num_rows


def batches(
    rows: tuple[int, ...], batch_size: int, count: int, *, exponent: float = 1.05, seed: int = 0
) -> list[Tensor]:
    """`count` id matrices int64 [B, F]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.stack([zipf_ids(n, batch_size, exponent, generator) for n in rows], dim=1) for _ in range(count)]
