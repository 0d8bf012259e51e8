"""What a rank requests from the owners of its rows: distinct rows, or sums of parts of bags, whichever moves fewer bytes.

By rows, every distinct key goes to its owner once, its row comes back, and the sum of its gradients goes there. In parts, every
key of a bag goes to its owner, which sums its part of the bag; one vector for each bag and owner comes back, and one gradient
goes there. Long bags of ids that seldom repeat are cheaper in parts. Each rank chooses for every table, from the counts of its
batch: to an owner a row is a part with one key.

Of rows that are placed by column, every rank has a slice: the same request goes to all of them.

Shapes: L lookups, N bags, W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.ops.lookups import Lookups, Span
from hotbed.ops.partition import OwnerPartition, partition_by_owner
from hotbed.ops.parts import count_ways, split
from hotbed.ops.shard import Shard

SMALL = 1 << 31  # keys below travel in 32 bits


class PooledBags(NamedTuple):
    """Bags whose owners may pool them."""

    table_of_span: tuple[int, ...]  # the number of its table; -1: rows are requested
    row_bytes: int  # of a row or a sum on the wire
    always: bool = False  # in parts, whatever the cost


class WantedRows(NamedTuple):
    """The rows of one group that this rank needs."""

    lookups: Lookups  # slots are negative for padding
    keys: Tensor  # int64 [L], or dynamic ids
    shard: Shard  # of the group
    tables: Tensor | None = None  # int32 [L], of dynamic ids
    num_local: int = 0  # keys of a rank, at most
    bags: PooledBags | None = None  # None: rows are requested
    counted: bool = False  # owners get the number of occurrences of each key in the batch

    @property
    def key_type(self) -> torch.dtype:
        """The type of keys on the wire."""
        return torch.int32 if self.num_local < SMALL else torch.int64


class OwnerRequest(NamedTuple):
    """The request of this rank to all, by owner. A vector is a row, or the sum of a part of a bag."""

    own: Lookups  # slots are places among the vectors that come back
    keys: Tensor  # local keys as sent, or dynamic ids; in a part, all keys after the first are ~key
    num_keys: list[int]  # [W] keys for each owner
    num_vectors: list[int]  # [W] vectors of each owner
    marks: Tensor | None = None  # int32 [.., 2], of dynamic ids: table and occurrences of each; [.., 1]: occurrences


def make_request(want: WantedRows) -> OwnerRequest:
    """The request of this rank."""
    shard = want.shard
    if not shard.by_column:
        return _request(
            want, partition_by_owner(want.keys, want.lookups.slots, shard.owner_of_any, shard.world, want.tables)
        )
    partition = partition_by_owner(
        want.keys, want.lookups.slots, lambda keys, _: torch.zeros_like(keys), 1, want.tables
    )
    one, world = _request(want, partition), shard.world
    return one._replace(
        keys=one.keys.repeat(world),
        num_keys=one.num_keys * world,
        num_vectors=one.num_vectors * world,
        marks=None if one.marks is None else one.marks.repeat(world, 1),
    )


def _request(want: WantedRows, partition: OwnerPartition) -> OwnerRequest:
    own = want.lookups._replace(slots=partition.places, check=None, origin=None)
    if partition.kinds is not None:
        return OwnerRequest(
            own,
            partition.keys,
            partition.counts,
            partition.counts,
            torch.stack([partition.kinds, partition.times], dim=1),
        )
    keys = want.shard.local_of(partition.keys)
    if want.counted:
        return OwnerRequest(
            own, keys.to(want.key_type), partition.counts, partition.counts, partition.times.unsqueeze(1)
        )
    in_parts = _in_parts(want, partition)
    if in_parts is None or own.bags is None:
        return OwnerRequest(own, keys.to(want.key_type), partition.counts, partition.counts)
    parts = split(partition.places, own.bags.starts, in_parts, keys, partition.counts)
    own = own._replace(
        slots=parts.slots,
        spans=_moved(own.spans, own.bags.starts, parts.starts),
        bags=own.bags._replace(
            starts=parts.starts,
            scale=None if own.scale is None else own.scale[parts.source],  # bags in parts have one scale
        ),
    )
    return OwnerRequest(own, parts.keys.to(want.key_type), parts.num_keys, parts.num_vectors)


def _in_parts(want: WantedRows, partition: OwnerPartition) -> Tensor | None:
    """Whether each bag [N] is requested in parts; None if none is."""
    bags = want.bags
    if bags is None or want.lookups.bags is None:
        return None
    starts = want.lookups.bags.starts
    table_of_bag = _tables_of_bags(want.lookups.spans, bags.table_of_span, starts)
    num_tables = max(bags.table_of_span) + 1
    chosen = list(range(num_tables))
    if not bags.always:
        shard, key_bytes = want.shard, want.key_type.itemsize * want.shard.num_slices
        own = -1 if shard.by_column else shard.rank  # a slice of everything is here, which changes no ratio
        ways = count_ways(partition.places, starts, table_of_bag, partition.counts, own)
        chosen = [table for table, counts in enumerate(zip(*ways)) if _saves(*counts, bags.row_bytes, key_bytes)]
    if not chosen:
        return None
    goes = torch.zeros(num_tables + 1, dtype=torch.bool, device="cpu")  # the last entry is for table -1
    goes[chosen] = True
    return goes.to(starts.device)[table_of_bag]


def _saves(rows: int, keys: int, parts: int, row_bytes: int, key_bytes: int) -> bool:
    """Whether parts move fewer bytes than rows: keys there, vectors back, gradients there."""
    return keys * key_bytes + 2 * parts * row_bytes < rows * (key_bytes + 2 * row_bytes)


def _tables_of_bags(spans: tuple[Span, ...], tables: tuple[int, ...], starts: Tensor) -> Tensor:
    """The number of each bag's table, int64 [N]; arbitrary for an empty bag, which requests nothing."""
    device = starts.device
    firsts = torch.tensor([span.start for span in spans], device=device)
    span_of_bag = torch.searchsorted(firsts, starts[:-1].contiguous(), right=True) - 1
    return torch.tensor(tables, device=device)[span_of_bag]


def _moved(spans: tuple[Span, ...], before: Tensor, after: Tensor) -> tuple[Span, ...]:
    """Spans of bags that began at `before` [N + 1] and begin at `after` now."""
    borders = torch.tensor([*(span.start for span in spans), int(before[-1])], device=before.device)
    moved = after[torch.searchsorted(before, borders)].tolist()
    pairs = zip(spans, moved, moved[1:])
    return tuple(span._replace(start=start, length=stop - start) for span, start, stop in pairs)
