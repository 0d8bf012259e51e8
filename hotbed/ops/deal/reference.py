"""Distinct keys by owner, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def deal(keys: Tensor, owners: Tensor, world: int) -> tuple[Tensor, list[int], Tensor]:
    """(distinct keys by owner, how many each owner has, the place of every look-up's key)."""
    real = keys >= 0
    found, inverse = torch.unique(keys[real], return_inverse=True)
    owner = torch.zeros_like(found).scatter_(0, inverse, owners[real])
    order = torch.argsort(owner, stable=True)
    place_of = torch.empty_like(order)
    place_of[order] = torch.arange(order.shape[0], device=keys.device)
    places = torch.full_like(keys, -1)
    places[real] = place_of[inverse]
    return found[order], torch.bincount(owner, minlength=world).tolist(), places
