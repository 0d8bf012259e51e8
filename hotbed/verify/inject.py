"""Flips one bit on purpose, to check that `verify` finds it.

Each place flips it at the first opportunity after some steps: in a weight of a row on the device, in a state of its optimizer,
in a record on its way to the store, or in a vector on its way to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotbed.errors import ConfigError
from hotbed.ops.lookups import Lookups
from hotbed.tables.module import EmbeddingTables
from hotbed.verify.watch import bits_of, keys_of

PLACES = ("row", "state", "write-back", "lookup")
_OLD_PLACES = {"lookup": "lookup"}  # names of 0.1


def inject(place: str, after: int = 3) -> Callable[[EmbeddingTables], None]:
    """A function that damages tables in this place after `after` steps."""
    place = _OLD_PLACES.get(place, place)
    if place not in PLACES:
        raise ConfigError(f"inject: {place!r} is not one of {', '.join(PLACES)}.")

    def damage(tables: EmbeddingTables) -> None:
        group = tables.groups[0]
        if place == "state" and not group.layout.states:
            raise ConfigError("inject: this optimizer keeps no state to damage.")
        if place == "write-back":
            _damage_writes(group, after)
        elif place == "lookup":
            _damage_lookups(group, after)
        else:
            _damage_records(group, place, after)

    return damage


def _damage_records(group: Any, place: str, after: int) -> None:
    """Damage a row that this batch and the previous one use, in the same slot."""
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
    cache = group.caches[0]
    store, write, exchange = cache.store, cache.store.write, cache.exchange
    writes = 0

    def is_due(num_rows: int) -> bool:
        nonlocal writes
        writes += num_rows > 0
        due = writes == after
        writes += due
        return due

    def damaged(keys: Tensor, records: Tensor) -> None:
        if is_due(keys.shape[0]):
            records = records.clone()
            for row in range(records.shape[0]):  # it is not known which of them comes back
                flip_bit(records, row, 0)
        write(keys, records)

    def damaged_exchange(fetch: Any) -> None:
        exchange(fetch)
        if is_due(fetch.plan.num_victims):
            for key in fetch.plan.victim_keys.tolist():
                flip_bit(store.parts()[0], key, 0)

    if cache.is_direct:  # victims go straight from their slots to the store
        cache.exchange = damaged_exchange
    else:
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
    bits_of(values)[row, column] ^= 1
