"""Host memory under a preset vocabulary: an array of records, one per key, untouched until it is used.

Opening it costs nothing, whatever its size: pages come when rows are written. A row that was never written reads as its
first value, which `first` computes from (seed, table, id); who can compute it elsewhere asks `fetch` for the others alone.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import BudgetError
from hotbed.memory import in_words
from hotbed.ops.move import gather_rows, scatter_rows
from hotbed.ops.move.states import ABSENT, EXPECTED, WRITTEN, mark, sort_out
from hotbed.ops.records import Layout

_CHUNK = 1 << 16
_NO_RESERVE = 0x4000  # Linux: address space beyond the memory there is; Python 3.12 has no name for it


class MemoryStore:
    """Records [R, W] of all keys 0..R-1 on the host."""

    def __init__(self, num_rows: int, layout: Layout, first: Callable[[Tensor], Tensor]) -> None:
        self._records = _untouched(num_rows, layout.width)
        self._state = np.zeros(num_rows, dtype=np.uint8)  # ABSENT, WRITTEN or EXPECTED
        self._first = first

    def read(self, keys: Tensor, out: Tensor) -> None:
        """The records of `keys` [U] into `out` [U, W], on the host."""
        gather_rows(self._records, keys, out)
        absent = torch.from_numpy(self._state[keys.numpy()] == ABSENT)
        if bool(absent.any()):
            out[absent] = self._first(keys[absent])

    def expect(self, keys: Tensor) -> None:
        """These rows are on their way here: who wants one before it was written must wait."""
        mark(self._state, keys.numpy(), EXPECTED)

    def fetch(self, keys: Tensor, out: Tensor, source: Tensor) -> tuple[int, Tensor]:
        """The rows that were ever written, close together, into `out` [>= U, W]: (their number, positions of late ones).

        source int32 [U]: the place of each key's row in `out`, or -1 for one that still has its first value. Late rows are
        those that are expected; they have no place yet.
        """
        found, late = np.empty(keys.shape[0], dtype=np.int64), np.empty(keys.shape[0], dtype=np.int64)
        num_found, num_late = sort_out(self._state, keys.numpy(), source.numpy(), found, late)
        gather_rows(self._records, torch.from_numpy(found[:num_found]), out[:num_found])
        return num_found, torch.from_numpy(late[:num_late])

    def write(self, keys: Tensor, records: Tensor) -> None:
        """Keep the records [U, W] of `keys` [U], distinct, on the host."""
        scatter_rows(self._records, keys, records)
        mark(self._state, keys.numpy(), WRITTEN)

    def parts(self) -> tuple[Tensor, NDArray[np.uint8]]:
        """(records [R, W], state [R]) for who moves rows without asking."""
        return self._records, self._state

    def write_first_values(self) -> None:
        """Write every row that was never written: what a run that has seen all its ids looks like."""
        for start in range(0, self._records.shape[0], _CHUNK):
            keys = torch.from_numpy(np.flatnonzero(self._state[start : start + _CHUNK] == ABSENT) + start)
            self.write(keys, self._first(keys))

    def items(self, chunk: int = _CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of every row ever written, in key order."""
        written = torch.from_numpy(np.flatnonzero(self._state != ABSENT))
        for start in range(0, written.shape[0], chunk):
            keys = written[start : start + chunk]
            yield keys, self._records[keys]

    @property
    def num_written(self) -> int:
        return int(np.count_nonzero(self._state))

    @property
    def num_bytes(self) -> int:
        """Address space; pages become memory when they are written."""
        return self._records.nbytes + self._state.nbytes


def _untouched(num_rows: int, width: int) -> Tensor:
    """Float32 [R, W] that takes no memory until it is written, in huge pages where the system has them."""
    size = max(num_rows * width * 4, mmap.PAGESIZE)
    try:
        if sys.platform == "linux":  # private: shared memory, the default, gets no huge pages
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
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
