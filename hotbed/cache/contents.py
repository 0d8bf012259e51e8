"""What a cache holds and all its policy knows, of one moment, so that another cache of the same size can continue from there.

Scores are worked out from a slot's last use, its aged count and the rows that the policy has to keep, so these are all
there is to remember: 16 bytes a slot. Which batches are ahead is not part of it: they arrive again.

Shapes: N rows in the cache, H rows that the policy has to keep.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.cache.cache import Cache
from hotbed.ops.index import EMPTY, HOT_BIT, NEW_CELLS, UNPLACED, bits_of, ops_for


class CacheContents(NamedTuple):
    """The contents of a cache between two windows, on the host."""

    clock: int
    keys: Tensor  # int64 [N]
    last: Tensor  # int32 [N]
    uses: Tensor  # int32 [N]
    hot: Tensor  # int64 [H], ascending

    def only(self, which: Tensor) -> CacheContents:
        """Without the rows that `which`, bool [N], does not name."""
        return self._replace(keys=self.keys[which], last=self.last[which], uses=self.uses[which])


def contents_of(cache: Cache) -> CacheContents:
    """Copies, as of now."""
    _, state = cache.parts()
    keys, slots = cache.resident()
    parts = (keys, state.last[slots], state.uses[slots], hot_keys(cache))
    return CacheContents(cache.clock, *(part.cpu() for part in parts))


def hot_keys(cache: Cache) -> Tensor:
    """The keys [H] that the policy has to keep, ascending."""
    cells, _ = cache.parts()
    return torch.sort(cells.key[(cells.future & bits_of(HOT_BIT)) != 0]).values


def restore_contents(cache: Cache, held: CacheContents) -> None:
    """Let an empty cache know what another one held; the row of key n, in ascending order, is in slot n."""
    assert cache.resident()[0].shape[0] == 0, "the cache holds rows"
    cache.clock = held.clock
    if held.hot.shape[0]:
        cache.keep(held.hot)
    count = int(held.keys.shape[0])
    if not count:
        return
    keys, by_key = torch.sort(held.keys)
    keys, last, uses = (part.to(cache.device) for part in (keys, held.last[by_key], held.uses[by_key]))
    cache.make_room(count)
    cells, state = cache.parts()
    row = cache.counters.take()
    ops_for(cells.key).arrive(cells, keys, 0, row.counts)
    numbers = row.read()
    cache.check_placed(numbers[UNPLACED])
    cache.index.count(numbers[NEW_CELLS])
    used = (cells.key != EMPTY).nonzero().squeeze(1)
    used = used[torch.sort(cells.key[used]).indices]
    at = used[torch.searchsorted(cells.key[used], keys)]
    cells.slot[at] = torch.arange(count, dtype=torch.int32, device=cache.device)
    state.cell[:count] = at.to(torch.int32)
    state.last[:count], state.uses[:count] = last, uses
