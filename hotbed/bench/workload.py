"""The lookups every system gets: Criteo-Kaggle cardinalities, one Zipf id per feature, scattered rows.

Out: the same numbers in two shapes, both on the device before anything is timed: [F * B] table by table, which FBGEMM takes,
and [B, F], which hotbed takes. Batches are drawn in order from one seed, so a longer run begins with a shorter one's ids.

Shapes: B samples of a batch, F features (one table each).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

OPTIMIZERS = ("rowwise_adagrad", "adam", "adagrad", "sgd")
LR, EPS = 0.01, 1e-8  # of the rows, for every system
GROUP = 10  # steps between two looks at the clock
_STATES = {"rowwise_adagrad": (1, 0), "adam": (1, 2), "adagrad": (0, 1), "sgd": (0, 0)}  # numbers (per row, per weight)
KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306),
    *(10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
ZIPF = 1.05


@dataclass(frozen=True)
class Workload:
    """The ids of a run."""

    rows: tuple[int, ...]
    batch: int
    flat: list[Tensor]  # int64 [F * B] each, table by table
    matrices: list[Tensor]  # int64 [B, F] each, the same ids

    def distinct_keys(self, batches: int = 8) -> float:
        """The mean number of distinct rows a batch touches, over the first `batches`."""
        bases = torch.tensor([0, *self.rows[:-1]], device=self.flat[0].device).cumsum(0)
        some = self.matrices[:batches]
        return sum(int(torch.unique(ids + bases).shape[0]) for ids in some) / len(some)


def make_workload(
    rows: tuple[int, ...], batch: int, count: int, device: torch.device, *, zipf: float = ZIPF, seed: int = 0
) -> Workload:
    """Draw `count` batches on `device`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    flat = [torch.cat([zipf_ids(n, batch, zipf, generator) for n in rows]) for _ in range(count)]
    return Workload(rows, batch, flat, [ids.view(len(rows), batch).t().contiguous() for ids in flat])


def zipf_ids(num_rows: int, count: int, exponent: float, generator: torch.Generator) -> Tensor:
    """Bounded Zipf ranks, scattered over the rows by a multiplicative permutation: position says nothing about frequency."""
    uniform = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
    rank: Tensor = ((float(num_rows) ** (1 - exponent) - 1) * uniform + 1) ** (1 / (1 - exponent))
    rank = (rank.floor().long() - 1).clamp_(0, num_rows - 1)
    stride = 2654435761 % num_rows if num_rows > 1 else 1
    while num_rows > 1 and (stride < 1 or gcd(stride, num_rows) != 1):
        stride += 1
    return rank * stride % num_rows


def scaled_rows(scale: float) -> tuple[int, ...]:
    """Kaggle's tables with `scale` times the rows; small tables keep at least their first hundred rows."""
    return tuple(max(min(n, 100), round(n * scale)) for n in KAGGLE_ROWS)


@dataclass(frozen=True)
class Setting:
    """One line of the benchmark, for every system."""

    device: torch.device
    dim: int
    batch: int
    optimizer: str
    dense: int  # width of the MLP behind the lookup; 0: a given gradient instead, the embedding step alone
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
