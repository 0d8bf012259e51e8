"""Records what every call of tables reads and writes, group by group, without changing it.

A watch wraps lookup and update of each group and copies the records of the batch. It wraps every exchange to know which rows
have come to the device.

`inject` flips one bit on purpose, to check that `verify` finds it. Each place flips it at the first opportunity after some
steps: in a weight of a row on the device, in a state of its optimizer, in a record on its way to the store, or in a vector on
its way to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotbed.cache.plans import WindowPlan
from hotbed.errors import ConfigError
from hotbed.ops.lookups import Lookups
from hotbed.ops.update import TableRows
from hotbed.tables.group.cached import CachedRows
from hotbed.tables.group.fetch import Fetch
from hotbed.tables.group.group import TableGroup, UpdateStep
from hotbed.tables.module import EmbeddingTables


@dataclass
class GroupCall:
    """One call of one group; L lookups, O vectors, records of W numbers."""

    group: TableGroup
    keys: Tensor  # int64 [L]; negative is padding
    before: Tensor  # [L, W], zeros for padding
    vectors: Tensor  # [O, D]
    out_rows: Tensor | None  # int64 [L]: the vector each lookup goes to; None where lookup i goes to vector i
    grad: Tensor | None = None  # [O, D]
    after: Tensor | None = None  # [L, W]


class TableWatch:
    """Watches one EmbeddingTables; `take` returns what was recorded since the last time."""

    def __init__(self, tables: EmbeddingTables) -> None:
        self.tables = tables
        self._seen: list[GroupCall] = []
        self._came: list[tuple[int, Tensor]] = []
        self._undo: list[Callable[[], None]] = []
        tables.stop_recording()  # recorded launches bypass the groups
        for number, group in enumerate(tables.groups):
            self._attend(group, "lookup", self._lookup_of(group))
            self._attend(group, "apply", self._update_of(group))
            for cache in group.caches:
                self._attend(cache, "fetch", _fetch_of(cache, partial(self._exchanged, number)))
                self._attend(cache, "exchange_with", self._exchange_with_of(cache, number))

    def take(self) -> list[GroupCall]:
        """The calls since the last time, in their order; those of one step have as many as there are groups."""
        seen, self._seen = self._seen, []
        return seen

    def take_came(self) -> list[tuple[int, Tensor]]:
        """(number of the group, keys) of rows that came to the device since the last time."""
        came, self._came = self._came, []
        return came

    def close(self) -> None:
        """Leave the tables as they were."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _attend(self, owner: Any, name: str, stand_in: Callable[..., Any]) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, stand_in)
        self._undo.append(lambda: delattr(owner, name) if before is None else setattr(owner, name, before))

    def _lookup_of(self, group: TableGroup) -> Callable[[Lookups], Tensor]:
        lookup = group.lookup

        def watched(lookups: Lookups) -> Tensor:
            vectors = lookup(lookups)
            before = _records(group, lookups.slots)
            out_rows = lookups.out_row_of_lookup()
            out_rows = (
                None if out_rows is None else out_rows.to(torch.int64, copy=True)
            )  # a recording may write there again
            self._seen.append(GroupCall(group, keys_of(lookups), before, vectors.detach().clone(), out_rows))
            return vectors

        return watched

    def _update_of(self, group: TableGroup) -> Callable[..., None]:
        update = group.apply

        def watched(lookups: Lookups, rows: tuple[TableRows, ...], grad: Tensor, step: UpdateStep) -> None:
            update(lookups, rows, grad, step)
            call = next(seen for seen in reversed(self._seen) if seen.group is group and seen.grad is None)
            call.grad, call.after = grad.clone(), _records(group, lookups.slots)

        return watched

    def _exchanged(self, number: int, plan: WindowPlan) -> None:
        self._came.append((number, plan.miss_keys.cpu().clone()))

    def _exchange_with_of(self, cache: CachedRows, number: int) -> Callable[..., None]:
        exchange_with = cache.exchange_with

        def watched(transfer: Any, window: int, plan: Any, num_batches: int, num_lookups: int) -> None:
            exchange_with(transfer, window, plan, num_batches, num_lookups)  # waits for the lists
            self._exchanged(number, plan)

        return watched


def _fetch_of(cache: CachedRows, exchanged: Callable[[WindowPlan], None]) -> Callable[..., Fetch]:
    """A stand-in for `cache.fetch`: `exchanged` is called after every exchange."""
    new_fetch = cache.fetch

    def watched_fetch(plan: WindowPlan, num_batches: int, num_lookups: int) -> Fetch:
        fetch = new_fetch(plan, num_batches, num_lookups)
        exchange = fetch.exchange

        def watched() -> None:
            exchange()
            exchanged(plan)

        fetch.exchange = watched  # type: ignore[method-assign]
        return fetch

    return watched_fetch


def bits_of(values: Tensor) -> Tensor:
    """The same numbers as integers of their width: a view of contiguous values."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


def keys_of(lookups: Lookups) -> Tensor:
    """int64 [L], negative for padding."""
    if lookups.keys is not None:
        return lookups.keys.to(torch.int64)
    if lookups.renew is not None:
        return lookups.renew().slots.to(torch.int64)
    return lookups.slots.to(torch.int64)


def _records(group: TableGroup, slots: Tensor) -> Tensor:
    found = group.records[slots.clamp(min=0)]
    return torch.where((slots >= 0)[:, None], found, torch.zeros_like(found))


PLACES = ("row", "state", "write-back", "lookup")
_OLD_PLACES = {"look-up": "lookup"}  # names of 0.1


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
    store, write = cache.store, cache.store.write
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

    def damage_store(plan: WindowPlan) -> None:
        if is_due(plan.num_victims):
            for key in plan.victim_keys.tolist():
                flip_bit(store.parts()[0], key, 0)

    if cache.is_direct:  # victims go straight from their slots to the store
        cache.fetch = _fetch_of(cache, damage_store)
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
