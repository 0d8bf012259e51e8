"""Keys of a batch to those that are asked of every rank: each once, sorted by the rank that owns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotbed.ops.backend import backend_of
from hotbed.ops.partition import reference

__all__ = ["OwnerPartition", "Owners", "partition_by_owner"]

Owners = Callable[[Tensor, Tensor | None], Tensor]  # (keys, their kinds) -> the ranks they belong to, int64


class OwnerPartition(NamedTuple):
    """What one rank requests from all."""

    keys: Tensor  # int64 [U], distinct, by owner
    kinds: Tensor | None  # int32 [U]
    times: Tensor  # int32 [U]: how often the batch has each
    counts: list[int]  # [W] of them for each owner
    places: Tensor  # int64 [L]: where the key of each lookup stands; -1 is padding


def partition_by_owner(
    keys: Tensor, slots: Tensor | None, owner_of: Owners, world: int, kinds: Tensor | None = None
) -> OwnerPartition:
    """Keys int64 [L], any; where slots [L] are negative there is padding. Owners are asked for once per distinct key.

    With `kinds` int32 [L], keys of different kinds are different.
    """
    if backend_of(keys) != "numba":
        return OwnerPartition(*reference.partition_by_owner(keys, slots, owner_of, world, kinds))
    from hotbed.ops.partition import numba

    empty = np.empty(0, np.int64)
    found, its_kinds, times, numbers = numba.distinct(
        keys.numpy(),
        empty if slots is None else slots.numpy(),
        empty.astype(np.int32) if kinds is None else kinds.numpy(),
    )
    those = None if kinds is None else torch.from_numpy(its_kinds)
    owners = owner_of(torch.from_numpy(found), those).numpy()
    by_owner, its_kinds, times, counts = numba.by_owner(found, its_kinds, times, owners, numbers, world)
    return OwnerPartition(
        torch.from_numpy(by_owner),
        None if kinds is None else torch.from_numpy(its_kinds),
        torch.from_numpy(times),
        np.asarray(counts).tolist(),
        torch.from_numpy(numbers),
    )
