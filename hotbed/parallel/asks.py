"""What a rank asks of the owners of its rows: distinct rows, or the sums of its bags' parts, whichever moves fewer bytes.

In: a rank's look-ups of a group. By rows every distinct key goes to its owner once, its row comes back, the sum of its
gradients goes there. In parts every key of a bag goes to its owner, who adds up its part of the bag; one vector for each bag
and owner comes back, and one gradient goes there. Long bags of ids that seldom repeat are cheaper in parts. The rank
chooses for every table, from the counts of this batch and for itself: to an owner a row is a part with one key.

Shapes: L look-ups, N bags, W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.ops.lookups import Lookups, Span
from hotbed.ops.partition import OwnerPartition, Owners, deal
from hotbed.ops.parts import count_ways, split
from hotbed.ops.shard import Shard

SMALL = 1 << 31  # keys below travel in 32 bits


class Bags(NamedTuple):
    """Bags whose owners may pool them."""

    table_of_span: tuple[int, ...]  # the number of its table; -1: rows are asked for
    row_bytes: int  # of a row or a sum that travels
    always: bool = False  # in parts, whatever it costs


class WantedRows(NamedTuple):
    """What this rank wants of one group."""

    lookups: Lookups  # slots are negative for padding
    keys: Tensor  # int64 [L], or dynamic ids
    owner_of: Owners
    tables: Tensor | None = None  # int32 [L], of dynamic ids
    num_local: int = 0  # keys that a rank may have
    bags: Bags | None = None  # None: rows are asked for
    counted: bool = False  # owners are told how often the batch has each key

    @property
    def key_type(self) -> torch.dtype:
        """In which keys travel."""
        return torch.int32 if self.num_local < SMALL else torch.int64


class OwnerRequest(NamedTuple):
    """What this rank asks of all, by owner. A vector is a row, or the sum of a part of a bag."""

    own: Lookups  # slots are places among the vectors that come back
    keys: Tensor  # local keys as they travel, or dynamic ids; all keys of a part but its first are ~key
    num_keys: list[int]  # [W] keys for each owner
    num_vectors: list[int]  # [W] vectors of each owner
    marks: Tensor | None = (
        None  # int32 [.., 2], of dynamic ids: the table, and how often the batch has the id; [.., 1]: that
    )


def ask_of(want: WantedRows, shard: Shard) -> OwnerRequest:
    """What the rank that has this shard asks for."""
    dealt = deal(want.keys, want.lookups.slots, want.owner_of, shard.world, want.tables)
    own = want.lookups._replace(slots=dealt.places, check=None, bad=None, sense=None)
    if dealt.kinds is not None:
        return OwnerRequest(own, dealt.keys, dealt.counts, dealt.counts, torch.stack([dealt.kinds, dealt.times], dim=1))
    keys = shard.local_of(dealt.keys)
    if want.counted:
        return OwnerRequest(own, keys.to(want.key_type), dealt.counts, dealt.counts, dealt.times.unsqueeze(1))
    in_parts = _in_parts(want, dealt, shard)
    if in_parts is None or own.starts is None:
        return OwnerRequest(own, keys.to(want.key_type), dealt.counts, dealt.counts)
    parts = split(dealt.places, own.starts, in_parts, keys, dealt.counts)
    own = own._replace(
        slots=parts.slots,
        spans=_moved(own.spans, own.starts, parts.starts),
        starts=parts.starts,
        scale=None if own.scale is None else own.scale[parts.source],  # bags in parts have one scale
    )
    return OwnerRequest(own, parts.keys.to(want.key_type), parts.num_keys, parts.num_vectors)


def _in_parts(want: WantedRows, dealt: OwnerPartition, shard: Shard) -> Tensor | None:
    """Whether each bag [N] goes in parts; None where none does."""
    starts, bags = want.lookups.starts, want.bags
    if bags is None or starts is None:
        return None
    table_of_bag = _tables_of_bags(want.lookups.spans, bags.table_of_span, starts)
    num_tables = max(bags.table_of_span) + 1
    chosen = list(range(num_tables))
    if not bags.always:
        ways = count_ways(dealt.places, starts, table_of_bag, dealt.counts, shard.rank)
        chosen = [table for table, counts in enumerate(zip(*ways)) if _saves(*counts, bags.row_bytes, want.key_type)]
    if not chosen:
        return None
    goes = torch.zeros(num_tables + 1, dtype=torch.bool, device="cpu")  # the last is that of table -1
    goes[chosen] = True
    return goes.to(starts.device)[table_of_bag]


def _saves(rows: int, keys: int, parts: int, row_bytes: int, key_type: torch.dtype) -> bool:
    """Whether parts move fewer bytes than rows: keys there, vectors back, gradients there."""
    return keys * key_type.itemsize + 2 * parts * row_bytes < rows * (key_type.itemsize + 2 * row_bytes)


def _tables_of_bags(spans: tuple[Span, ...], tables: tuple[int, ...], starts: Tensor) -> Tensor:
    """The number of each bag's table, int64 [N]. That of an empty one is any: it asks for nothing."""
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
