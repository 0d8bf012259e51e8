"""The settings of one line of the benchmark, for every system."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice

import torch

IDS = ("single", "bags", "varying", "dynamic")
OUTPUTS = ("stack", "concat", "dict")
OPTIMIZERS = ("rowwise_adagrad", "adam", "adagrad", "sgd")
LR, EPS = 0.01, 1e-8  # of the rows, for every system
ZIPF = 1.05
KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306),
    *(10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)  # 214 ids a sample
_STATES = {"rowwise_adagrad": (1, 0), "adam": (1, 2), "adagrad": (0, 1), "sgd": (0, 0)}  # numbers (per row, per weight)


@dataclass(frozen=True)
class Setting:
    """One line of the benchmark."""

    device: torch.device
    dim: int = 128
    batch: int = 16384
    optimizer: str = "rowwise_adagrad"
    dense: int = 0  # width of the MLP behind the lookup; 0: a given gradient instead, the embedding step alone
    ids: str = "single"
    zipf: float = ZIPF
    output: str = "stack"  # hotbed's
    cache: float = 0.015  # share of the rows on the device, where a system has a cache
    ssd: float | None = (
        None  # share of the rows in memory below hotbed's cache, the others in files; None: all in memory
    )
    ssd_folder: str = ""  # of these files
    ranks: int = 0  # processes that hotbed's rows are sharded over; 0: no ranks
    cold: bool = False  # no row was written before the first step
    policy: str | None = None  # hotbed's; None: its default
    window: int | None = None
    look_ahead: int | None = None
    steps: int = 100
    warmup: int = 80
    rows: tuple[int, ...] = KAGGLE_ROWS

    @property
    def bag_sizes(self) -> tuple[int, ...]:
        """Ids of one sample by table, exact or on average."""
        if self.ids in ("bags", "varying"):
            return tuple(islice(cycle(MLPERF_BAGS), len(self.rows)))
        return (1,) * len(self.rows)

    @property
    def ids_per_sample(self) -> int:
        """On average."""
        return sum(self.bag_sizes)

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


def scaled_rows(scale: float) -> tuple[int, ...]:
    """Kaggle's tables with `scale` times the rows; small tables keep at least their first hundred rows."""
    return tuple(max(min(n, 100), round(n * scale)) for n in KAGGLE_ROWS)
