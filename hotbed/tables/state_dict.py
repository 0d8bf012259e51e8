"""Rows in a state_dict: `<table>.weight` and `<table>.<state>` of every table, and the two numbers that learning rates need.

The caller has exclusive use of the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hotbed.tables.group.group import TableGroup
from hotbed.tables.transaction import Changes

_NUMBERS = ("num_updates", "lr_factor")


class SavedTables(Protocol):
    """EmbeddingTables, as far as this needs them."""

    groups: list[TableGroup]
    changes: Changes
    num_updates: int
    lr_factor: float

    def claim(self) -> None:
        """Before anything reads or writes all rows."""

    def group_of(self, table: str) -> TableGroup:
        """The group of a table."""


def save_columns(tables: SavedTables, destination: dict[str, Any], prefix: str) -> None:
    """Put views of all rows, for writing, and the numbers into a state_dict."""
    destination |= {prefix + name: column for name, column in _columns(tables, writable=True).items()}
    destination[prefix + "num_updates"] = torch.tensor(tables.num_updates, device="cpu")
    destination[prefix + "lr_factor"] = torch.tensor(tables.lr_factor, dtype=torch.float64, device="cpu")


def load_columns(
    tables: SavedTables, state_dict: Mapping[str, Tensor], prefix: str, missing_keys: list[str], error_msgs: list[str]
) -> set[str]:
    """Take back what fits, and list what does not; returns the names that a state_dict of these tables has."""
    with tables.changes.loading(tables.claim, (), whole=True):
        columns = _columns(tables, writable=False)
    fitting: dict[str, dict[str, Tensor]] = {}
    for name, column in columns.items():
        saved = state_dict.get(prefix + name)
        if saved is None:
            missing_keys.append(prefix + name)
        elif saved.shape != column.shape:
            error_msgs.append(f"{prefix + name} is {list(saved.shape)}, but the table has {list(column.shape)}")
        else:
            table, _, part = name.rpartition(".")
            fitting.setdefault(table, {})[part] = saved
    missing_keys += [prefix + name for name in _NUMBERS if prefix + name not in state_dict]
    is_whole = sum(len(parts) for parts in fitting.values()) == len(columns)
    with tables.changes.loading(tables.claim, fitting, whole=is_whole):
        for table, saved_columns in fitting.items():
            tables.group_of(table).load(table, saved_columns)
        tables.num_updates = int(state_dict.get(prefix + "num_updates", tables.num_updates))
        tables.lr_factor = float(state_dict.get(prefix + "lr_factor", tables.lr_factor))
    return {prefix + name for name in (*columns, *_NUMBERS)}


def _columns(tables: SavedTables, *, writable: bool) -> dict[str, Tensor]:
    tables.claim()
    columns: dict[str, Tensor] = {}
    for group in tables.groups:
        for table in group.members:
            found = group.writable(table) if writable else group.columns(table)
            columns |= {f"{table}.{name}": column for name, column in found.items()}
    return columns
