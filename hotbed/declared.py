"""Tables as a user declares them: checked, and made into features, an output form and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hotbed.budget import Room
from hotbed.cached_group import CachedGroup
from hotbed.errors import ConfigError
from hotbed.group import Member, TableGroup
from hotbed.inputs import Feature
from hotbed.ops.init_rows import Init, Normal
from hotbed.ops.records import Precision, layout_of
from hotbed.optim import RowOptimizer

Pooling = Literal["sum", "mean", "none"]
Output = Literal["auto", "stack", "dict", "concat"]


@dataclass(frozen=True)
class Table:
    """One embedding table: `rows` vectors of `dim` numbers, read by one feature of the same name or by `features`."""

    rows: int
    dim: int
    pooling: Pooling = "sum"  # "none": every value keeps its own vector, for sequences
    features: tuple[str, ...] | None = None
    hashing: bool = False  # ids modulo rows; else an id outside 0..rows-1 is an error
    padding_id: int | None = None  # this id contributes nothing and is never updated
    init: Init = Normal(0.01)  # noqa: RUF009  frozen


def features_of(tables: dict[str, Table]) -> list[Feature]:
    """The features in declared order; all mistakes in the tables at once."""
    wrong: list[str] = []
    features: list[Feature] = []
    owners: dict[str, str] = {}
    if not tables:
        wrong.append("no tables were given")
    for name, table in tables.items():
        for field in ("rows", "dim"):
            value = getattr(table, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                wrong.append(f"table {name!r}: {field} must be a whole number from 1, not {value!r}")
        if table.pooling not in ("sum", "mean", "none"):
            wrong.append(f"table {name!r}: pooling must be 'sum', 'mean' or 'none', not {table.pooling!r}")
        if isinstance(table.features, str) or table.features == ():
            wrong.append(f"table {name!r}: features must be a tuple of names, not {table.features!r}")
        for feature in table.features or (name,):
            if feature in owners:
                wrong.append(f"feature {feature!r} reads two tables, {owners[feature]!r} and {name!r}")
            owners[feature] = name
            features.append(Feature(feature, name, table.pooling))
    if wrong:
        raise ConfigError("; ".join(wrong))
    return features


def output_of(output: Output, tables: dict[str, Table], features: list[Feature]) -> Output:
    dims = {table.dim for table in tables.values()}
    sequences = [feature.name for feature in features if feature.pooling == "none"]
    if output == "auto":
        return "stack" if len(dims) == 1 and not sequences else "dict"
    if output not in ("stack", "dict", "concat"):
        raise ConfigError(f"output must be 'auto', 'stack', 'dict' or 'concat', not {output!r}")
    if output == "stack" and len(dims) > 1:
        raise ConfigError(f"output 'stack' needs equal dims; the tables have {sorted(dims)}. Use 'concat' or 'dict'.")
    if output != "dict" and sequences:
        raise ConfigError(f"output {output!r} cannot hold sequence features ({', '.join(sequences)}). Use 'dict'.")
    return output


def sizes_of(tables: dict[str, Table], optimizer: RowOptimizer, precision: Precision) -> list[tuple[int, int]]:
    """(rows, bytes of a record) of every group."""
    dims = dict.fromkeys(table.dim for table in tables.values())
    rows = [sum(table.rows for table in tables.values() if table.dim == dim) for dim in dims]
    return list(zip(rows, (layout_of(dim, optimizer, precision).width * 4 for dim in dims)))


def groups_of(
    tables: dict[str, Table],
    optimizer: RowOptimizer,
    device: torch.device,
    rooms: Sequence[Room],
    policy: str,
    precision: Precision,
) -> list[TableGroup]:
    """Tables of one dim share a group (the optimizer is the same for all, so the record width is too)."""
    if any(room.num_slots is not None for room in rooms) and optimizer.decay_scope == "table":
        raise ConfigError(
            "decay_scope='table' visits every row at every step, which a cache cannot hold; use 'touched'"
        )
    groups: list[TableGroup] = []
    for room, dim in zip(rooms, dict.fromkeys(table.dim for table in tables.values())):
        members, base = [], 0
        for name, table in tables.items():
            if table.dim == dim:
                members.append(Member(name, table.rows, base, table.init, table.hashing, table.padding_id))
                base += table.rows
        if room.num_slots is None:
            groups.append(TableGroup(members, dim, optimizer, device, precision=precision))
        else:
            groups.append(CachedGroup(members, dim, optimizer, device, room, policy, precision))
    return groups
