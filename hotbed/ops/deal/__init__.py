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
    kinds: Tensor  # int32 [U]
    times: Tensor  # int32 [U]: how often the batch has each
    counts: list[int]  # [W] of them for each owner
    places: Tensor  # int64 [L]: where the key of each look-up stands; -1 is padding


def deal(keys: Tensor, owners: Tensor, world: int, kinds: Tensor | None = None) -> Dealt:
    """Keys int64 [L], any; owners int64 [L] are the ranks they belong to, -1 is padding.

    With `kinds` int32 [L], keys of different kinds are different.
    """
    if kinds is None:
        kinds = torch.zeros(keys.shape[0], dtype=torch.int32, device=keys.device)
    if backend_of(keys) != "numba":
        return Dealt(*reference.deal(keys, owners, world, kinds))
    from hotbed.ops.deal import numba

    found, its_kinds, times, counts, places = numba.deal(keys.numpy(), owners.numpy(), world, kinds.numpy())
    return Dealt(
        torch.from_numpy(found),
        torch.from_numpy(its_kinds),
        torch.from_numpy(times),
        np.asarray(counts).tolist(),
        torch.from_numpy(places),
    )
