"""Keys of a batch to those that are asked of every rank: each once, sorted by the rank that owns it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.ops.backend import backend_of
from hotbed.ops.deal import reference

__all__ = ["Dealt", "deal"]


class Dealt(NamedTuple):
    """What one rank asks of all."""

    keys: Tensor  # int64 [U], distinct, by owner
    counts: list[int]  # [W] of them for each owner
    places: Tensor  # int64 [L]: where the key of each look-up stands; -1 is padding


def deal(keys: Tensor, owners: Tensor, world: int) -> Dealt:
    """Keys int64 [L], -1 is padding; owners int64 [L] are the ranks they belong to."""
    if backend_of(keys) != "numba":
        return Dealt(*reference.deal(keys, owners, world))
    from hotbed.ops.deal import numba

    found, counts, places = numba.deal(keys.numpy(), owners.numpy(), world)
    return Dealt(torch.from_numpy(found), np.asarray(counts).tolist(), torch.from_numpy(places))
