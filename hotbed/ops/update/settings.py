"""What one update needs besides rows and gradients."""

from __future__ import annotations

from typing import NamedTuple

from hotbed.optim import RowOptimizer
from hotbed.optim.rules import Rule


class TableRows(NamedTuple):
    """The slots that rows of one table may be in, and the spans (first, stop) of the features that read it."""

    base: int
    rows: int
    first_span: int
    stop_span: int


class UpdateSettings(NamedTuple):
    """One update of one group."""

    rule: Rule
    constants: tuple[float, ...]
    lr: float
    l2: float
    weight_decay: float
    clip_norm: float
    scale_by_count: bool
    whole_table: bool  # visit every row, not only those with a gradient
    tables: tuple[TableRows, ...]
    salt: int = 0  # names this update of this group, where weights of 16 bits are rounded at random


def settings_of(optimizer: RowOptimizer, lr: float, tables: tuple[TableRows, ...], salt: int = 0) -> UpdateSettings:
    """The settings of one update under an optimizer at learning rate `lr`."""
    return UpdateSettings(
        rule=optimizer.rule,
        constants=optimizer.constants(),
        lr=lr,
        l2=optimizer.l2,
        weight_decay=optimizer.weight_decay,
        clip_norm=optimizer.clip_norm,
        scale_by_count=optimizer.scale_by_count,
        whole_table=optimizer.decay_scope == "table",
        tables=tables,
        salt=salt,
    )
