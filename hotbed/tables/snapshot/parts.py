"""Rows of a group by table: as a checkpoint saves them, and back. Here for preset keys; ids.py for dynamic ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from hotbed.ids.index import Ints
from hotbed.ops.records import Layout
from hotbed.ops.shard import Shard
from hotbed.types import RowPart

if TYPE_CHECKING:
    from hotbed.store.held import Holder
    from hotbed.tables.group.keyspace import Member


class KeysSnapshot(Protocol):
    """A snapshot of one group, as of one moment."""

    def parts(self) -> Iterator[RowPart]:
        """Rows by table; each part is good until the next."""

    def gone(self) -> Iterator[tuple[str, Tensor]]:
        """Ids that have expired."""

    def rest(self) -> dict[str, Tensor]:
        """Everything that does not belong to a row."""


class KeysSink(Protocol):
    """Takes the rows of one group back, oldest first."""

    def add(self, part: RowPart) -> Tensor:
        """The keys of a part's rows; negative for what has none here."""

    def join(self, group: str, rests: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What each of another number of ranks saved beyond rows, as this rank needs it."""

    def end(self, group: str, tensors: Mapping[str, Tensor], written: Callable[[], Iterator[Ints]]) -> Ints:
        """All parts are there; which of the keys that have a record no id has."""


class PresetSnapshot:
    """Rows that are found by a table's own numbers."""

    def __init__(self, layout: Layout, members: Sequence[Member], shard: Shard, held: Holder) -> None:
        self._layout, self._members, self._shard, self._held = layout, members, shard, held

    def parts(self) -> Iterator[RowPart]:
        """Parts of the rows that no file holds."""
        for keys, rows in self._held.items():
            yield from parts_of(self._layout, self._members, self._shard.keys_of(keys), rows)

    def gone(self) -> Iterator[tuple[str, Tensor]]:
        """None."""
        return iter(())

    def rest(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}


class PresetSink:
    """An id says where its row is; nothing is to be remembered."""

    def __init__(self, keys_of: Callable[[str, Tensor], Tensor]) -> None:
        self._keys_of = keys_of

    def add(self, part: RowPart) -> Tensor:
        """The keys of its ids."""
        return self._keys_of(part.table, part.ids)

    def join(self, group: str, rests: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def end(self, group: str, tensors: Mapping[str, Tensor], written: Callable[[], Iterator[Ints]]) -> Ints:
        """None."""
        return np.empty(0, dtype=np.int64)


def parts_of(layout: Layout, members: Sequence[Member], keys: Tensor, records: Tensor) -> Iterator[RowPart]:
    """Rows of a group, by table."""
    end = members[-1].base + members[-1].rows  # keys behind it are only room
    bases = torch.tensor([*(member.base for member in members), end], device="cpu")
    number = torch.bucketize(keys, bases, right=True) - 1
    for m, member in enumerate(members):
        which = (number == m).nonzero().squeeze(1)
        if which.shape[0]:
            rows = records if which.shape[0] == keys.shape[0] else records[which]
            yield RowPart(member.name, keys[which] - member.base, layout.cut(rows))
