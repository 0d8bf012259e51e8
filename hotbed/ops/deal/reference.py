"""Distinct keys by owner, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def deal(keys: Tensor, owners: Tensor, world: int, kinds: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int], Tensor]:
    """(distinct keys by owner, their kinds, how often each comes, how many each owner has, the place of every look-up's)."""
    real = owners >= 0
    pairs = torch.stack([owners[real], kinds[real].long(), keys[real]], dim=1)
    found, inverse, times = torch.unique(pairs, dim=0, return_inverse=True, return_counts=True)  # by owner first
    places = torch.full_like(keys, -1)
    places[real] = inverse
    counts = torch.bincount(found[:, 0], minlength=world).tolist()
    return found[:, 2].contiguous(), found[:, 1].int(), times.int(), counts, places
