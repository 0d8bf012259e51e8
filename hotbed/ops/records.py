"""The layout of a record: a row's weights and its optimizer state, one contiguous block.

    [ weights (D) | element state (D) ... | row state (1) ... | padding ]        padded to 16 bytes of float32

One block means one cache miss, one copy and one write-back per row, whatever the optimizer.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.optim import RowOptimizer

_HUGE_PAGE = 2 << 20


class Layout(NamedTuple):
    """Where the parts of a record are, in columns."""

    dim: int
    element_states: tuple[str, ...]
    row_states: tuple[str, ...]

    @property
    def width(self) -> int:
        used = self.dim * (1 + len(self.element_states)) + len(self.row_states)
        return -(-used // 4) * 4

    def columns(self, state: str) -> slice:
        """The columns of one state."""
        if state in self.element_states:
            start = self.dim * (1 + self.element_states.index(state))
            return slice(start, start + self.dim)
        start = self.dim * (1 + len(self.element_states)) + self.row_states.index(state)
        return slice(start, start + 1)

    @property
    def states(self) -> tuple[str, ...]:
        return self.element_states + self.row_states


def layout_of(dim: int, optimizer: RowOptimizer) -> Layout:
    """The layout of records of `dim` weights under an optimizer."""
    return Layout(dim, optimizer.rule.element_states, optimizer.rule.row_states)


def empty_records(num_rows: int, layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised records [num_rows, width]; on Linux hosts in huge pages, which random reads of short rows need."""
    records = torch.empty(num_rows, layout.width, dtype=dtype, device=device)
    if device.type == "cpu" and records.nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-records.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        length = (records.data_ptr() + records.nbytes - start) // _HUGE_PAGE * _HUGE_PAGE
        if length > 0:  # advice only: a kernel that refuses it costs speed, not correctness
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return records
