"""What a user declares in, groups out: the one place that chooses their keyspace and their residency."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotbed.cache import DEFAULT_POLICY
from hotbed.errors import ConfigError
from hotbed.ids import TableRules
from hotbed.ops.records import Precision, layout_of
from hotbed.ops.shard import WHOLE, Shard
from hotbed.optim import RowOptimizer
from hotbed.store import Place
from hotbed.tables.group.cached import CachedRows
from hotbed.tables.group.dynamic import DynamicIds
from hotbed.tables.group.group import Residency, TableGroup
from hotbed.tables.group.keyspace import Keyspace, Member, PresetKeys
from hotbed.tables.group.resident import ResidentRows
from hotbed.tables.sizing.budget import Room
from hotbed.tables.sizing.fit import members_by_group
from hotbed.tables.spec import Table

_EVERY_ROW = Room(None, Place())  # on the device


def groups_of(
    tables: dict[str, Table],
    optimizer: RowOptimizer,
    device: torch.device,
    rooms: Sequence[Room],
    policy: str,
    precision: Precision,
    shards: Sequence[Shard],
) -> list[TableGroup]:
    """Tables of one dim and the same settings share a group; those of dynamic ids have groups of their own."""
    groups: list[TableGroup] = []
    for room, shard, (kind, named) in zip(rooms, shards, members_by_group(tables).items()):
        own, rows_by = kind.own, kind.optimizer(optimizer)
        if room.num_slots is not None and rows_by.decay_scope == "table":
            raise ConfigError(
                "decay_scope='table' visits every row at every step, which a cache cannot hold; use 'touched'"
            )
        members, base = [], 0
        for name, table in named.items():
            rules = TableRules(table.admit, table.expire, table.padding_id) if kind.dynamic else None
            members.append(Member(name, table.rows or 0, base, table.init, table.hashing, table.padding_id, rules))
            base += table.rows or 0
        made = make_group(
            members,
            kind.dim // shard.num_slices,
            rows_by,
            device,
            room,
            policy=(own and own.policy) or policy,
            precision=kind.precision(precision),
            shard=shard,
            own=members[0].name if own or kind.by_column else "",
            is_frozen=own is not None and own.frozen,
        )
        groups.append(made)
    return groups


def make_group(
    members: Sequence[Member],
    dim: int,
    optimizer: RowOptimizer,
    device: torch.device,
    room: Room = _EVERY_ROW,
    *,
    policy: str = DEFAULT_POLICY,
    precision: Precision = "fp32",
    shard: Shard = WHOLE,
    own: str = "",
    is_frozen: bool = False,
) -> TableGroup:
    """A group of tables of one dim; its rows mean nothing until `initialise`."""
    layout = layout_of(dim, optimizer, precision)
    keyspace: Keyspace = (
        PresetKeys(members, layout, optimizer, shard)
        if room.ids is None
        else DynamicIds(members, layout, optimizer, room.ids, shard)
    )
    residency: Residency = (
        ResidentRows(members, layout, optimizer, keyspace, device, shard)
        if room.num_slots is None
        else CachedRows(members, layout, keyspace, device, room, policy, shard)
    )
    return TableGroup(members, optimizer, keyspace, residency, shard, own=own, is_frozen=is_frozen)
