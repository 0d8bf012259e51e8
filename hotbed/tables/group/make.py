"""What a user declares in, a group out: the one place that chooses its keyspace and its residency."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotbed.cache import DEFAULT_POLICY
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

_EVERY_ROW = Room(None, Place())  # on the device


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
