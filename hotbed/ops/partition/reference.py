"""Distinct keys by owner, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def partition_by_owner(
    keys: Tensor,
    slots: Tensor | None,
    owner_of: Callable[[Tensor, Tensor | None], Tensor],
    world: int,
    kinds: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, list[int], Tensor]:
    """(distinct keys by owner, their kinds, how often each comes, how many each owner has, the place of every lookup's)."""
    real = torch.ones_like(keys, dtype=torch.bool) if slots is None else slots >= 0
    if kinds is None:
        found, inverse, times = torch.unique(keys[real], return_inverse=True, return_counts=True)
        found_kinds = None
    else:
        pairs = torch.stack([kinds[real].long(), keys[real]], dim=1)
        found_pairs, inverse, times = torch.unique(pairs, dim=0, return_inverse=True, return_counts=True)
        found, found_kinds = found_pairs[:, 1].contiguous(), found_pairs[:, 0].int()
    owners, order = torch.sort(owner_of(found, found_kinds), stable=True)
    place_of = torch.empty_like(order)
    place_of[order] = torch.arange(order.shape[0], device=order.device)
    places = torch.full_like(keys, -1)
    places[real] = place_of[inverse]
    counts = torch.bincount(owners, minlength=world).tolist()
    return found[order], None if found_kinds is None else found_kinds[order], times[order].int(), counts, places
