"""One wrong bit on purpose, to see `verify` find it: a check of the checker.

Each place damages the first chance it gets after some steps: a weight of a row on the device, a state of its optimizer, a
record on its way to the store, a vector on its way to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotbed.errors import ConfigError
from hotbed.ops.lookups import Lookups
from hotbed.tables.module import EmbeddingTables
from hotbed.verify.watch import keys_of

PLACES = ("row", "state", "write-back", "look-up")


def inject(place: str, after: int = 3) -> Callable[[EmbeddingTables], None]:
    """Something that damages tables in this place after so many steps."""
    if place not in PLACES:
        raise ConfigError(f"inject: {place!r} is not one of {', '.join(PLACES)}.")

    def damage(tables: EmbeddingTables) -> None:
        group = tables.groups[0]
        if place == "state" and not group.layout.states:
            raise ConfigError("inject: this optimizer keeps no state to damage.")
        if place == "write-back":
            _damage_writes(group, after)
        elif place == "look-up":
            _damage_lookups(group, after)
        else:
            _damage_records(group, place, after)

    return damage


def _damage_records(group: Any, place: str, after: int) -> None:
    """A row that this batch and the one before have, in the same slot."""
    lookup, layout = group.lookup, group.layout
    column = 0 if place == "row" else layout.columns(layout.states[0]).start
    calls, last, done = 0, torch.zeros(0, dtype=torch.int64, device="cpu"), False

    def damaged(lookups: Lookups) -> Tensor:
        nonlocal calls, last, done
        calls += 1
        keys = keys_of(lookups)
        places = torch.where(keys >= 0, keys * group.records.shape[0] + lookups.slots, -1)
        if calls > after and not done:
            both = ((places >= 0) & torch.isin(places, last)).nonzero()[:, 0]
            if both.shape[0]:
                flip_bit(group.records, int(lookups.slots[both[0]]), column)
                done = True
        last = places
        vectors: Tensor = lookup(lookups)
        return vectors

    group.lookup = damaged


def _damage_writes(group: Any, after: int) -> None:
    if not group.caches:
        raise ConfigError("inject write-back: these tables write nothing back; give them a cache.")
    store = group.caches[0].store
    write = store.write
    writes = 0

    def damaged(keys: Tensor, records: Tensor, *slots: Tensor) -> None:
        nonlocal writes
        writes += keys.shape[0] > 0
        if writes == after:
            writes += 1
            records = records.clone()
            for row in slots[0].tolist() if slots else range(records.shape[0]):  # which of them comes back is not known
                flip_bit(records, row, 0)
        write(keys, records, *slots)

    store.write = damaged


def _damage_lookups(group: Any, after: int) -> None:
    lookup = group.lookup
    calls = 0

    def damaged(lookups: Lookups) -> Tensor:
        nonlocal calls
        vectors: Tensor = lookup(lookups)
        calls += 1
        if calls == after:
            flip_bit(vectors, vectors.shape[0] // 2, 0)
        return vectors

    group.lookup = damaged


def flip_bit(values: Tensor, row: int, column: int) -> None:
    """The lowest bit of one number."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    values.view(kind)[row, column] ^= 1
