"""The layout of a record: a row's weights and its optimizer state, one contiguous block.

    [ weights (D) | element state (D) ... | row state (1) ... | padding ]        padded to 16 bytes

One block means one cache miss, one copy and one write-back per row, whatever the optimizer. Columns are words of float32;
weights of 16 bits stand two in a word, an odd one next to zeros.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.host.pages import advise_huge
from hotbed.optim import RowOptimizer
from hotbed.types import TableShape

Precision = Literal["fp32", "fp16", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
STORE_PRECISIONS = ("same", "int8")  # of rows below the device
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Layout(NamedTuple):
    """Where the parts of a record are, in columns."""

    dim: int
    element_states: tuple[str, ...]
    row_states: tuple[str, ...]
    precision: Precision = "fp32"  # of the weights; state is float32

    @property
    def weight_columns(self) -> int:
        """How many columns the weights take."""
        return self.dim if self.precision == "fp32" else -(-self.dim // 2)

    @property
    def used(self) -> int:
        """How many columns are not padding."""
        return self.weight_columns + self.dim * len(self.element_states) + len(self.row_states)

    @property
    def width(self) -> int:
        return -(-self.used // 4) * 4

    def columns(self, state: str) -> slice:
        """The columns of one state."""
        if state in self.element_states:
            start = self.weight_columns + self.dim * self.element_states.index(state)
            return slice(start, start + self.dim)
        start = self.weight_columns + self.dim * len(self.element_states) + self.row_states.index(state)
        return slice(start, start + 1)

    def numbers(self, records: Tensor) -> Tensor:
        """Records [S, W] in the type of their weights, which are the first D columns of the result: a view."""
        return records if self.precision == "fp32" else records.view(_TYPES[self.precision])

    def weights(self, records: Tensor) -> Tensor:
        """The weights [S, D] of records [S, W]: a view."""
        return self.numbers(records)[:, : self.dim]

    @property
    def states(self) -> tuple[str, ...]:
        return self.element_states + self.row_states

    def cut(self, records: Tensor) -> dict[str, Tensor]:
        """`weight` [S, D] and every state [S, D] or [S, 1] of records [S, W]: views."""
        return {"weight": self.weights(records)} | {state: records[:, self.columns(state)] for state in self.states}


def layout_of(dim: int, optimizer: RowOptimizer, precision: Precision = "fp32") -> Layout:
    """The layout of records of `dim` weights under an optimizer."""
    return Layout(dim, optimizer.rule.element_states, optimizer.rule.row_states, precision)


def saved_layout(shape: TableShape) -> Layout:
    """The layout of a table's records in its files."""
    by_element = tuple(state for state, width in shape.states.items() if width == shape.dim and shape.dim > 1)
    by_row = tuple(state for state in shape.states if state not in by_element)
    first, end = shape.span
    return Layout(end - first, by_element, by_row, cast(Precision, shape.precision))


def as_numpy(tensor: Tensor) -> NDArray[Any]:
    """A view; numpy has no bf16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def empty_records(num_rows: int, layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised records [num_rows, width]; on Linux hosts in huge pages, which random reads of short rows need."""
    records = torch.empty(num_rows, layout.width, dtype=dtype, device=device)
    if device.type == "cpu":
        advise_huge(records.data_ptr(), records.nbytes)
    return records
