"""Which rank holds what of a table: rows spread over all ranks, the whole table on one, or columns of every row on each.

    row       every row has an owner: equal parts, whatever the tables
    table     one rank has all rows; the largest table goes first, each to the rank that has the fewest bytes so far
    column    every rank has D / W columns of every row, with their optimizer state

All ranks find the same places from the same tables. Rows are those of one process in each of them, to the bit: an update by
column knows a part of a row, so settings that need all of it are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from hotbed.errors import ConfigError
from hotbed.ops.records import Precision, layout_of
from hotbed.ops.shard import SPREAD, Shard
from hotbed.optim import ROW_OPTIMIZERS, RowOptimizer
from hotbed.tables.sizing.fit import GroupKind, TableSize, members_by_group

Placement = Literal["row", "table", "column"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
T = TypeVar("T", bound=TableSize)


def with_placements(tables: Mapping[str, T], usual: str, world: int) -> dict[str, T]:
    """The tables, each with its own placement or the usual one; one rank has all of every table."""
    if usual not in PLACEMENTS:
        raise ConfigError(f"placement must be one of {', '.join(map(repr, PLACEMENTS))}, not {usual!r}")
    placed = {}
    for name, table in tables.items():
        placement = (table.placement or usual) if world > 1 else None
        given: T = table if table.placement == placement else dataclasses.replace(table, placement=placement)  # type: ignore[type-var]
        placed[name] = given
    return placed


def group_shards(
    tables: Mapping[str, TableSize], optimizer: RowOptimizer, precision: Precision, shard: Shard
) -> list[Shard]:
    """What one rank has of every group."""
    groups = members_by_group(tables)
    if shard.world == 1:
        return [shard] * len(groups)
    check_columns(tables, optimizer, precision, shard.world)
    owners = _owners(groups, optimizer, precision, shard.world)
    return [
        shard._replace(by_column=True)
        if kind.by_column
        else shard.of_tables(tuple((table.rows or 0, owners.get(name, SPREAD)) for name, table in members.items()))
        for kind, members in groups.items()
    ]


def _owners(
    groups: Mapping[GroupKind, Mapping[str, TableSize]], optimizer: RowOptimizer, precision: Precision, world: int
) -> dict[str, int]:
    """The rank of every table that is on one: the largest first, to the rank with the fewest bytes, then lookups.

    Dynamic ids have no number of rows: after the others, each goes to the rank with the fewest such tables.
    """
    sizes: list[tuple[int, str, int]] = []
    for kind, members in groups.items():
        record = layout_of(kind.dim, kind.optimizer(optimizer), kind.precision(precision)).width * 4
        for name, table in members.items():
            if table.placement == "table":
                sizes.append((record * (table.rows or 0), name, len(table.features or (name,))))
    loads = [[0, 0, 0] for _ in range(world)]  # tables of dynamic ids, bytes, features that read them
    owners = {}
    for num_bytes, name, num_features in sorted(sizes, key=lambda one: -one[0]):  # stable: as declared
        is_dynamic = num_bytes == 0
        rank = min(range(world), key=lambda r: loads[r] if is_dynamic else loads[r][1:])
        owners[name] = rank
        for place, load in enumerate((int(is_dynamic), num_bytes, num_features)):
            loads[rank][place] += load
    return owners


def largest_rank(
    tables: Mapping[str, TableSize], optimizer: RowOptimizer, precision: Precision, world: int
) -> tuple[int, dict[str, int]]:
    """(the rank with the most bytes of tables that are on one, the rank of each of them)."""
    groups = members_by_group(tables)
    owners = _owners(groups, optimizer, precision, world)
    loads = [0] * world
    for kind, members in groups.items():
        record = layout_of(kind.dim, kind.optimizer(optimizer), kind.precision(precision)).width
        for name, table in members.items():
            if name in owners:
                loads[owners[name]] += record * (table.rows or 0)
    return loads.index(max(loads)), owners


def check_columns(tables: Mapping[str, TableSize], optimizer: RowOptimizer, precision: Precision, world: int) -> None:
    """A ConfigError for what cannot be updated, or cut, by column."""
    wrong = []
    for kind, members in members_by_group(tables).items():
        if not kind.by_column:
            continue
        rows_by, what = kind.optimizer(optimizer), f"tables {', '.join(members)} with placement='column'"
        if len(members) == 1:
            what = f"table {next(iter(members))!r} with placement='column'"
        if kind.dim % world:
            wrong.append(
                f"{what}: {world} ranks have equal parts of the columns, and {world} does not divide dim={kind.dim} (of a run, "
                "model.dim, and one more where the model has a linear part); change it, or give placement='row' or 'table'"
            )
        if kind.dynamic:
            wrong.append(
                f"{what}: dynamic ids (rows=None) are on one rank as a whole row; give placement='row' or 'table'"
            )
        if rows_by.rule.uses_mean_square:
            by_element = ", ".join(name for name, one in ROW_OPTIMIZERS.items() if not one.rule.uses_mean_square)
            wrong.append(
                f"{what}: {rows_by.rule.name} needs the mean square of a whole gradient, and a rank has some columns of it; "
                f"take an optimizer that works by element ({by_element}), or placement='row' or 'table'"
            )
        if rows_by.clip_norm:
            wrong.append(
                f"{what}: clip_norm={rows_by.clip_norm:g} needs the norm of a whole gradient, and a rank has some columns of "
                "it; leave it out, or give placement='row' or 'table'"
            )
        if kind.precision(precision) != "fp32":
            wrong.append(
                f"{what}: precision={kind.precision(precision)!r} rounds an element by its place in the whole row; give "
                "precision='fp32', or placement='row' or 'table'"
            )
    if wrong:
        raise ConfigError("; ".join(wrong))
