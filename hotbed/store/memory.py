"""Host memory under a preset vocabulary: an array of records, one per key, untouched until it is used.

Opening it costs nothing, whatever its size: pages come when rows are written. A row that was never written reads as its
first value, which `first` computes from (seed, table, id); who can compute it elsewhere asks `fetch` for the others alone.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from hotbed.errors import BudgetError
from hotbed.memory import in_words
from hotbed.ops.move import gather_rows, scatter_rows
from hotbed.ops.records import Layout

_CHUNK = 1 << 16


class MemoryStore:
    """Records [R, W] of all keys 0..R-1 on the host."""

    def __init__(self, num_rows: int, layout: Layout, first: Callable[[Tensor], Tensor]) -> None:
        self._records = _untouched(num_rows, layout.width)
        self._written = torch.from_numpy(np.zeros(num_rows, dtype=np.bool_))
        self._first = first

    def read(self, keys: Tensor, out: Tensor) -> None:
        """The records of `keys` [U] into `out` [U, W], on the host."""
        gather_rows(self._records, keys, out)
        absent = ~self._written[keys]
        if bool(absent.any()):
            out[absent] = self._first(keys[absent])

    def fetch(self, keys: Tensor, out: Tensor, source: Tensor) -> int:
        """The rows that were ever written, close together, into `out` [>= U, W]; their number.

        source int32 [U]: the place of each key's row in `out`, or -1 for one that still has its first value.
        """
        written = self._written[keys]
        present = keys[written]
        count = int(present.shape[0])
        source.fill_(-1)
        source[written] = torch.arange(count, dtype=torch.int32)
        gather_rows(self._records, present, out[:count])
        return count

    def write(self, keys: Tensor, records: Tensor) -> None:
        """Keep the records [U, W] of `keys` [U], distinct, on the host."""
        scatter_rows(self._records, keys, records)
        self._written[keys] = True

    def write_first_values(self) -> None:
        """Write every row that was never written: what a run that has seen all its ids looks like."""
        for start in range(0, self._records.shape[0], _CHUNK):
            keys = (~self._written[start : start + _CHUNK]).nonzero().squeeze(1) + start
            self.write(keys, self._first(keys))

    def items(self, chunk: int = _CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of every row ever written, in key order."""
        written = self._written.nonzero().squeeze(1)
        for start in range(0, written.shape[0], chunk):
            keys = written[start : start + chunk]
            yield keys, self._records[keys]

    @property
    def num_written(self) -> int:
        return int(self._written.sum())

    @property
    def num_bytes(self) -> int:
        """Address space; pages become memory when they are written."""
        return self._records.nbytes + self._written.nbytes


def _untouched(num_rows: int, width: int) -> Tensor:
    """Float32 [R, W] that takes no memory until it is written, in huge pages where the system has them."""
    size = max(num_rows * width * 4, mmap.PAGESIZE)
    try:
        if hasattr(mmap, "MAP_NORESERVE"):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE
            pages = mmap.mmap(-1, size, flags=flags)
        else:
            pages = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise BudgetError(
            f"{num_rows:,} rows of {in_words(width * 4)} need {in_words(size)} of address space, which this machine refuses "
            f"({error}). Use fewer rows (hashing=True), a smaller dim, or a machine with more memory."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # advice only: a kernel without huge pages costs speed, not correctness
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.float32, count=num_rows * width).view(num_rows, width)
