"""Which rank owns a key: the keys of a group divided among W ranks, and numbered anew on each.

W neighbouring keys go to W different ranks, so that every rank has the same number, whatever the tables. Which of them goes
where turns with a hash of their block, so that ids with a common step (all even, say) are spread too. On its rank key k has
the number k // W: no list is needed in either direction.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_SHIFT, _MASK = 33, (1 << 30) - 1


class Shard(NamedTuple):
    """The keys of one rank among `world`."""

    rank: int = 0
    world: int = 1

    def num_local(self, num_keys: int) -> int:
        """Room for the rank's share of `num_keys` keys."""
        return -(-num_keys // self.world)

    def owner_of(self, keys: Tensor) -> Tensor:
        """The rank that owns each key, int64."""
        block = keys // self.world
        return (keys - block * self.world + _turn(block)) % self.world

    def owner_of_ids(self, tables: Tensor, ids: Tensor) -> Tensor:
        """The rank that owns each dynamic id of tables, int64: by a hash, for there is no number of them."""
        mixed = (ids ^ (ids >> 29) ^ tables) * _GOLDEN
        return (mixed >> _SHIFT & _MASK) % self.world

    def owner_of_any(self, keys: Tensor, tables: Tensor | None) -> Tensor:
        """Of keys, or, with the numbers of their tables, of dynamic ids."""
        return self.owner_of(keys) if tables is None else self.owner_of_ids(tables, keys)

    def local_of(self, keys: Tensor) -> Tensor:
        """The number of each key on its rank."""
        return keys if self.world == 1 else keys // self.world

    def keys_of(self, numbers: Tensor) -> Tensor:
        """The keys that have these numbers here."""
        if self.world == 1:
            return numbers
        return numbers * self.world + (self.rank - _turn(numbers)) % self.world


WHOLE = Shard()


def _turn(blocks: Tensor) -> Tensor:
    return (blocks * _GOLDEN) >> _SHIFT & _MASK
