"""Weights of tables that are spread over ranks: whole and in order on rank 0, some rows at a time; and back to their owners.

Every rank sends its rows of the next stretch of ids to rank 0, which puts them in their places; so memory is a few stretches
whatever the size of a table. Who owns an id is known everywhere, so ids do not travel; dynamic ones do, once, because no rank
knows which there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hotbed.ops.shard import Shard
from hotbed.parallel.world import World
from hotbed.tables.group.group import TableGroup
from hotbed.tables.module import EmbeddingTables

_CHUNK = 1 << 17  # ids


def whole_ids(tables: EmbeddingTables, table: str, world: World) -> Tensor:
    """The dynamic ids of a table that have a row on any rank, ascending, on rank 0; elsewhere nothing of any use."""
    parts = world.collect(tables.ids(table).numpy())
    return torch.from_numpy(np.sort(np.concatenate([np.empty(0, np.int64), *parts])))


def pieces_of(tables: EmbeddingTables, table: str, ids: Tensor | None, world: World) -> Iterator[Tensor]:
    """The weights of a table, in order, on rank 0; elsewhere nothing of any use. All ranks go through all pieces.

    `ids` are those of `whole_ids`, where they are dynamic.
    """
    if world.size == 1:
        return tables.weight_pieces(table)
    return _pieces(tables, table, world) if ids is None else _dynamic_pieces(tables, table, ids, world)


def load_whole(tables: EmbeddingTables, table: str, weight: Tensor) -> None:
    """Put the rows of whole weights [rows, dim] that are this rank's in their places; optimizer state stays."""
    with tables.changes.loading(tables.claim, [table], whole=False):
        _load_whole(tables, table, weight)


def _load_whole(tables: EmbeddingTables, table: str, weight: Tensor) -> None:
    tables.claim()
    group = tables.group_of(table)
    for ids in _stretches(group, table):
        keys, mine = _mine(group, table, ids)
        given = weight[ids[group.shard.owner_of(keys) == group.shard.rank]]
        records = group.read_rows(mine)
        group.layout.weights(records).copy_(given)
        with tables.changes.changing("loading rows"):
            group.write_rows(mine, records)
    with tables.changes.changing("loading rows"):
        group.forget()
    tables.exchange.rows_replaced()


def _pieces(tables: EmbeddingTables, table: str, world: World) -> Iterator[Tensor]:
    tables.claim()
    group = tables.group_of(table)
    for ids in _stretches(group, table):
        keys, mine = _mine(group, table, ids)
        parts = world.collect(_bits(group.layout.weights(group.read_rows(mine))).numpy())
        whole = torch.empty(ids.shape[0], group.layout.dim, dtype=group.weight_type, device="cpu")
        for rank, part in enumerate(parts):
            here = Shard(rank, world.size).owner_of(keys) == rank
            whole[here] = torch.from_numpy(part).view(group.weight_type)
        yield whole


def _dynamic_pieces(tables: EmbeddingTables, table: str, ids: Tensor, world: World) -> Iterator[Tensor]:
    tables.claim()
    group = tables.group_of(table)
    mine, keys = group.keyspace.rows_of(table)
    lasts = [int(ids[min(start + _CHUNK, len(ids)) - 1]) for start in range(0, len(ids), _CHUNK)]
    done = 0
    for stretch, last in enumerate(world.from_first(lasts)):
        end = int(torch.searchsorted(mine, last, right=True))
        parts = world.collect(_bits(group.layout.weights(group.read_rows(keys[done:end]))).numpy())
        done = end
        here = ids[stretch * _CHUNK : (stretch + 1) * _CHUNK]
        owners = group.keyspace.owners_of(table, here)
        whole = torch.empty(here.shape[0], group.layout.dim, dtype=group.weight_type, device="cpu")
        for rank, part in enumerate(parts):
            whole[owners == rank] = torch.from_numpy(part).view(group.weight_type)
        yield whole


def _stretches(group: TableGroup, table: str) -> Iterator[Tensor]:
    rows = group.members[table].rows
    for start in range(0, rows, _CHUNK):
        yield torch.arange(start, min(start + _CHUNK, rows), device="cpu")


def _mine(group: TableGroup, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of all these ids, and the numbers of those that are here."""
    keys = ids + group.members[table].base
    return keys, group.shard.local_of(keys[group.shard.owner_of(keys) == group.shard.rank])


def _bits(weights: Tensor) -> Tensor:
    """As whole numbers of the same width, where numpy has no such type."""
    weights = weights.contiguous()
    return weights.view(torch.int16) if weights.dtype == torch.bfloat16 else weights
