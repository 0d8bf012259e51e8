"""Which rank owns a key: the keys of a group divided among W ranks, and numbered anew on each.

By row, W neighbouring keys go to W different ranks, so that every rank has the same number, whatever the tables. Which of them
goes where turns with a hash of their block, so that ids with a common step (all even, say) are spread too. On its rank key k
has the number k // W: no list is needed in either direction.

By table, all keys of a table are on one rank. Its numbers there come after those of the rows that are spread. Tables of both
kinds share a group, and their keys have the order of the tables.

By column, every rank has every key, and a slice of each of their rows; keys are their own numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_SHIFT, _MASK = 33, (1 << 30) - 1
SPREAD = -1  # the owner of a table whose rows are spread


class Shard(NamedTuple):
    """The keys of one rank among `world`."""

    rank: int = 0
    world: int = 1
    tables: tuple[tuple[int, int], ...] = ()  # (rows, owner or SPREAD) of the tables of a group; empty: all are spread
    by_column: bool = False

    def of_tables(self, tables: tuple[tuple[int, int], ...]) -> Shard:
        """The shard of a group with these (rows, owner or SPREAD)."""
        return self._replace(tables=tables if any(owner != SPREAD for _, owner in tables) else ())

    @property
    def num_slices(self) -> int:
        """How many slices each row has."""
        return self.world if self.by_column else 1

    def columns_of(self, dim: int) -> tuple[int, int]:
        """(first, end) of the columns that are here, of rows of `dim`."""
        width = dim // self.num_slices
        first = self.rank * width if self.by_column else 0
        return first, first + width

    def num_local(self, num_keys: int) -> int:
        """Room for the rank's share of `num_keys` keys."""
        return self._room(num_keys, self.rank)

    def most_local(self, num_keys: int) -> int:
        """The number of rows of the rank with the most."""
        return (
            max(self._room(num_keys, rank) for rank in range(self.world)) if self.tables else self.num_local(num_keys)
        )

    def _room(self, num_keys: int, rank: int) -> int:
        if self.by_column:
            return num_keys
        whole = sum(rows for rows, owner in self.tables if owner != SPREAD)
        spread = -(-(num_keys - whole) // self.world)
        return max(1, spread + sum(rows for rows, owner in self.tables if owner == rank))

    def owner_of(self, keys: Tensor) -> Tensor:
        """The rank that owns each key, int64."""
        if self.by_column:
            return torch.full_like(keys, self.rank)
        if not self.tables:
            return self._row_owner(keys)
        found = _places(self.tables, self.world, keys.device)
        table = found.table_of(keys)
        owner = found.owner[table]
        return torch.where(owner == SPREAD, self._row_owner(keys - found.shift[table]), owner)

    def _row_owner(self, keys: Tensor) -> Tensor:
        block = keys // self.world
        return (keys - block * self.world + _turn(block)) % self.world

    def owner_of_ids(self, tables: Tensor, ids: Tensor) -> Tensor:
        """The rank that owns each dynamic id of tables, int64: by a hash, for there is no number of them."""
        mixed = (ids ^ (ids >> 29) ^ tables) * _GOLDEN
        hashed = (mixed >> _SHIFT & _MASK) % self.world
        if not self.tables:
            return hashed
        owner = _places(self.tables, self.world, ids.device).owner[tables.to(torch.int64)]
        return torch.where(owner == SPREAD, hashed, owner)

    def owner_of_any(self, keys: Tensor, tables: Tensor | None) -> Tensor:
        """The owners of keys or, with the numbers of their tables, of dynamic ids."""
        return self.owner_of(keys) if tables is None else self.owner_of_ids(tables, keys)

    def local_of(self, keys: Tensor) -> Tensor:
        """The number of each key on its rank."""
        if self.world == 1 or self.by_column:
            return keys
        if not self.tables:
            return keys // self.world
        found = _places(self.tables, self.world, keys.device)
        table = found.table_of(keys)
        spread = found.owner[table] == SPREAD
        return torch.where(
            spread, (keys - found.shift[table]) // self.world, keys - found.base[table] + found.first[table]
        )

    def keys_of(self, numbers: Tensor) -> Tensor:
        """The keys that have these numbers here; behind all keys, for numbers that are only room."""
        if self.world == 1 or self.by_column:
            return numbers
        keys = numbers * self.world + (self.rank - _turn(numbers)) % self.world
        if not self.tables:
            return keys
        spread, own = _numbered(self, numbers.device)
        return torch.where(numbers < spread.room, spread.keys_of(keys), own.keys_of(numbers))


WHOLE = Shard()


def _turn(blocks: Tensor) -> Tensor:
    return (blocks * _GOLDEN) >> _SHIFT & _MASK


class _TablePlaces(NamedTuple):
    """Where the tables of a group are, int64 [T] each."""

    base: Tensor  # the first key
    owner: Tensor
    shift: Tensor  # keys before it that are of tables on one rank
    first: Tensor  # on its owner, the number of its first key, if it is there as a whole
    room: int  # numbers of spread keys on every rank

    def table_of(self, keys: Tensor) -> Tensor:
        return torch.searchsorted(self.base, keys, right=True).clamp(min=1) - 1


@lru_cache(maxsize=256)
def _places(tables: tuple[tuple[int, int], ...], world: int, device: torch.device) -> _TablePlaces:
    num_spread = sum(rows for rows, owner in tables if owner == SPREAD)
    room = -(-num_spread // world)
    base, shift, first = [], [], []
    before: dict[int, int] = {}  # the next number on a rank
    key = whole = 0
    for rows, owner in tables:
        base.append(key)
        shift.append(whole)
        first.append(before.setdefault(owner, room))
        key += rows
        whole += rows if owner != SPREAD else 0
        before[owner] += rows
    named = (torch.tensor(one, device=device) for one in (base, [owner for _, owner in tables], shift, first))
    return _TablePlaces(next(named), next(named), next(named), next(named), room)


class _Stretches(NamedTuple):
    """Numbers of some tables, one after the other, and their keys."""

    numbers: Tensor  # int64 [n]: the first of each, ascending
    bases: Tensor  # int64 [n]: its key
    room: int  # as above

    def keys_of(self, numbers: Tensor) -> Tensor:
        at = torch.searchsorted(self.numbers, numbers, right=True).clamp(min=1) - 1
        return numbers - self.numbers[at] + self.bases[at]


@lru_cache(maxsize=256)
def _numbered(shard: Shard, device: torch.device) -> tuple[_Stretches, _Stretches]:
    """The tables that are spread, and those that are all on the rank of a shard; behind them, numbers of no key."""
    found = _places(shard.tables, shard.world, device)
    end = torch.tensor([sum(rows for rows, _ in shard.tables)], device=device)
    stretches = []
    for owner, firsts, start in ((SPREAD, found.base - found.shift, 0), (shard.rank, found.first, found.room)):
        mine = found.owner == owner
        used = start + sum(rows for rows, its_owner in shard.tables if its_owner == owner)
        numbers = torch.cat([firsts[mine], torch.tensor([used], device=device)])
        stretches.append(_Stretches(numbers, torch.cat([found.base[mine], end]), found.room))
    return stretches[0], stretches[1]
