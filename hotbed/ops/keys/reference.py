"""Ids to keys in plain torch; runs on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.ops.keys.addresses import Addresses, FirstBad
from hotbed.ops.lookups import Span


def make_keys(ids: Tensor, spans: tuple[Span, ...], addresses: Addresses) -> tuple[Tensor, FirstBad]:
    """Keys [L] of ids [L], and the first position whose id lies outside its table."""
    keys = torch.empty_like(ids)
    bad = torch.zeros_like(ids, dtype=torch.bool)
    for p, span in enumerate(spans):
        positions = slice(span.start, span.start + span.length * span.stride, span.stride)
        values, rows = ids[positions], int(addresses.rows[p])
        inside = (values >= 0) & (values < rows)
        local = values
        if addresses.hashing[p]:
            local, inside = torch.remainder(values, rows), torch.ones_like(inside)
        wanted = torch.ones_like(inside)
        if addresses.has_padding[p]:
            wanted = values != int(addresses.padding[p])
        keys[positions] = torch.where(wanted, local + int(addresses.base[p]), -1)
        bad[positions] = wanted & ~inside
    where = bad.nonzero()
    return keys, FirstBad(int(where[0, 0]) if where.numel() else None)
