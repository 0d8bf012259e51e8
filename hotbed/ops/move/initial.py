"""Initial records of rows that were never stored: described once per group, computed wherever one is missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.ops.init_rows.distributions import Init, kind_of, scale_of
from hotbed.ops.records import Layout, Precision, layout_of
from hotbed.ops.shard import WHOLE, Shard
from hotbed.optim import RowOptimizer
from hotbed.optim.rules import Rule


class InitialTable(NamedTuple):
    """One table of the group: keys from `base` on are its ids 0, 1, ..."""

    base: int
    stream: int  # stream_of(seed, table name)
    init: Init
    padding_id: int | None


@dataclass(frozen=True, eq=False)  # compared by identity: constants on the device are found by it, at no cost
class InitialRows:
    """The initial records of a group."""

    layout: Layout
    tables: tuple[InitialTable, ...]  # bases ascend
    rule: Rule
    constants: tuple[float, float, float]  # the f of rule.first
    shard: Shard = WHOLE  # keys are those of one rank

    @property
    def first_column(self) -> int:
        """The first column of the weights that this rank has; not 0 where a rank has a slice of every row."""
        return self.shard.columns_of(self.layout.dim * self.shard.num_slices)[0]


def initial_rows(
    dim: int,
    optimizer: RowOptimizer,
    tables: Iterable[InitialTable],
    precision: Precision = "fp32",
    shard: Shard = WHOLE,
) -> InitialRows:
    """The initial records of tables of `dim` weights under an optimizer."""
    ordered = tuple(sorted(tables, key=lambda table: table.base))
    layout = layout_of(dim, optimizer, precision)
    return InitialRows(layout, ordered, optimizer.rule, optimizer.first_constants(), shard)


class InitialArrays(NamedTuple):
    """InitialRows as kernels read it."""

    tables: NDArray[np.int64]  # [T, 4]: base, stream, kind, padding id
    scales: NDArray[np.float32]  # [T]
    constants: NDArray[np.float32]  # [3]


@lru_cache(maxsize=64)
def arrays(first: InitialRows) -> InitialArrays:
    """Made once; read them only."""
    tables = np.empty((len(first.tables), 4), dtype=np.int64)
    for row, table in zip(tables, first.tables):
        padding_id = -1 if table.padding_id is None else table.padding_id  # ids are counted from 0
        row[:] = table.base, np.uint64(table.stream).astype(np.int64), kind_of(table.init), padding_id
    scales = np.array([scale_of(table.init) for table in first.tables], dtype=np.float32)
    return InitialArrays(tables, scales, np.array(first.constants, dtype=np.float32))
