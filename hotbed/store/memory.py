"""Host memory under a preset vocabulary: an array of records, one per key, untouched until it is used.

Opening it costs nothing: pages come when rows are written. A row that was never written reads as its first value, which
`first` computes from (seed, table, id).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hotbed.ops.records import Layout, empty_records


class MemoryStore:
    """Records [R, W] of all keys 0..R-1 on the host."""

    def __init__(self, num_rows: int, layout: Layout, first: Callable[[Tensor], Tensor]) -> None:
        self._records = empty_records(num_rows, layout, torch.float32, torch.device("cpu"))
        self._written = torch.zeros(num_rows, dtype=torch.bool)
        self._first = first

    def read(self, keys: Tensor, out: Tensor) -> None:
        """The records of `keys` [U] into `out` [U, W], on the host."""
        torch.index_select(self._records, 0, keys, out=out)
        absent = ~self._written[keys]
        if bool(absent.any()):
            out[absent] = self._first(keys[absent])

    def write(self, keys: Tensor, records: Tensor) -> None:
        """Keep the records [U, W] of `keys` [U], distinct, on the host."""
        self._records.index_copy_(0, keys, records)
        self._written[keys] = True

    def items(self, chunk: int = 1 << 16) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of every row ever written, in key order."""
        written = self._written.nonzero().squeeze(1)
        for start in range(0, written.shape[0], chunk):
            keys = written[start : start + chunk]
            yield keys, self._records[keys]

    @property
    def num_written(self) -> int:
        return int(self._written.sum())
