"""The learning rate of rows, as torch's schedulers want it: in `param_groups` of an optimizer.

Rows move in backward, so this optimizer steps nothing; what a scheduler writes into its `lr` is the rate of the next updates.
The `lr` follows `set_lr`, `lr_factor` and a checkpoint that is loaded: many schedulers work the next rate out of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from hotbed.optim.schedules import Schedule


class RatedTables(Protocol):
    """EmbeddingTables, as far as this needs them."""

    schedule: Schedule
    num_updates: int
    lr_factor: float

    def set_lr(self, lr: float) -> None:
        """The rate from the next update on."""


class RowRates(torch.optim.Optimizer):
    """One param group, whose `lr` is that of the rows."""

    def __init__(self, tables: RatedTables) -> None:
        self._tables = tables
        super().__init__([nn.Parameter(torch.zeros(0, dtype=torch.float32, device="cpu"))], {"lr": self._rate})
        self.param_groups = [_Group(self.param_groups[0], tables)]

    @property
    def _rate(self) -> float:
        return self._tables.schedule.at(self._tables.num_updates) * self._tables.lr_factor

    def follow(self) -> None:
        """The rate was set elsewhere."""
        dict.__setitem__(self.param_groups[0], "lr", self._rate)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: rows moved in backward, or move in tables.step()."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.param_groups = [_Group(self.param_groups[0], self._tables)]
        self._tables.set_lr(float(self.param_groups[0]["lr"]))


class _Group(dict[str, Any]):
    """A param group that passes on what a scheduler writes into it."""

    def __init__(self, values: dict[str, Any], tables: RatedTables) -> None:
        super().__init__(values)
        self._tables = tables

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "lr":
            self._tables.set_lr(float(value))
        super().__setitem__(name, value)  # last: the rate that follows may be rounded

    def update(self, *others: Any, **values: Any) -> None:
        for name, value in dict(*others, **values).items():
            self[name] = value
