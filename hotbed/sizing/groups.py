"""Tables in; which of them share a group, its rows and the bytes of a record out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from hotbed.ops.records import Precision, layout_of
from hotbed.ops.shard import WHOLE, Shard
from hotbed.optim import RowOptimizer
from hotbed.sizing.budget import Size


class TableSize(Protocol):
    """A table, as far as its size goes."""

    @property
    def rows(self) -> int | None:
        """None: dynamic ids."""

    @property
    def dim(self) -> int: ...

    @property
    def hashing(self) -> bool: ...


T = TypeVar("T", bound=TableSize)


def members_by_group(tables: Mapping[str, T]) -> dict[tuple[int, bool], dict[str, T]]:
    """The tables of every group, by (dim, whether ids are dynamic)."""
    members: dict[tuple[int, bool], dict[str, T]] = {}
    for name, table in tables.items():
        members.setdefault((table.dim, table.rows is None), {})[name] = table
    return members


def sizes_of(
    tables: Mapping[str, TableSize], optimizer: RowOptimizer, precision: Precision, shard: Shard = WHOLE
) -> list[Size]:
    """(rows here, bytes of a record) of every group; None for dynamic ids."""
    return [
        (
            None if dynamic else shard.num_local(sum(table.rows or 0 for table in members.values())),
            layout_of(dim, optimizer, precision).width * 4,
        )
        for (dim, dynamic), members in members_by_group(tables).items()
    ]
