"""What a rank wants of the owners: the keys of its look-ups, or, where ids are dynamic, the ids themselves.

Keys of dynamic ids are their owner's business, and it has to know how often each id comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.ops.keys import FirstBad
from hotbed.ops.lookups import Lookups, Span
from hotbed.parallel.asks import Wanted
from hotbed.parallel.routes import Route
from hotbed.tables.group.cached import CachedGroup
from hotbed.tables.group.dynamic import DynamicIds, Sense
from hotbed.tables.group.group import TableGroup
from hotbed.tables.inputs import Given, GroupInputs


def wanted_of(group: TableGroup, flattened: Callable[[Any], Lookups]) -> Wanted:
    """Of one group; `flattened` gives the look-ups of a batch for what makes keys of ids."""
    if isinstance(group, CachedGroup) and group.ids is not None:
        lookups = flattened(_RawIds(group, group.ids))
        ids, tables = lookups.sense
        return Wanted(lookups, ids, group.shard.owner_of_any, tables)
    lookups = flattened(group)
    if lookups.check is not None:
        lookups.check()
    return Wanted(lookups, lookups.slots.to(torch.int64), group.shard.owner_of_any, num_local=group.num_rows)


def tables_in_parts(inputs: GroupInputs, given: Given) -> tuple[int, ...] | None:
    """The table of every span, or -1 where owners cannot pool: features with weights, sequences, tables without bags."""
    features = [inputs.features[j] for j in inputs.order]
    tables = dict.fromkeys(feature.table for feature in features if feature.name in given.bags)
    for feature in features:
        bag = given.bags.get(feature.name)
        if feature.pooling == "none" or (bag is not None and bag.weights is not None):
            tables.pop(feature.table, None)
    number_of_table = {table: number for number, table in enumerate(tables)}
    return tuple(number_of_table.get(feature.table, -1) for feature in features) if tables else None


def keys_of_ids(ids: DynamicIds, route: Route, learns: bool) -> tuple[Tensor, Sense]:
    """The keys of dynamic ids that all ranks ask for, each once for every rank; they count as often as they come."""
    assert route.tables is not None
    assert route.times is not None
    times = route.times.cpu().numpy()
    tables = np.repeat(route.tables.cpu().numpy().astype(np.uint16), times)
    keys, sense = ids.keys_of(tables, np.repeat(route.keys.cpu().numpy(), times), learns)
    first = np.cumsum(times) - times
    return torch.from_numpy(keys[first]).to(route.keys.device), sense


class _RawIds:
    """Stands in for a group: its keys are no keys yet, the sense is (ids, numbers of their tables)."""

    def __init__(self, group: CachedGroup, ids: DynamicIds) -> None:
        self.records = group.records
        self._members = group.members
        self._ids = ids

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Any]:
        """Positions, and -1 for padding."""
        numbers = torch.from_numpy(self._ids.numbers_of(spans, tables, ids.shape[0]).astype(np.int32)).to(ids.device)
        places = torch.arange(ids.shape[0], device=ids.device)
        for number, name in enumerate(self._ids.names):
            padding = self._members[name].padding_id
            if padding is not None:
                places[(numbers == number) & (ids == padding)] = -1
        return places, FirstBad(None), (ids, numbers)
