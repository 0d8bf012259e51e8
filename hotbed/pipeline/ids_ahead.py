"""Dynamic ids of a batch, read ahead: the reader thread removes repeats and looks rows up while earlier batches train.

In: a batch as the loader gave it, and as it is on the device. Out: for each group of dynamic ids what kernels need of it, on
its way to the device (tables/group/ahead.py). Ids that a loader left on the host are read there; those on the device are copied
to page-locked memory on the reader's own stream, so that nothing waits for the training stream.

Lookups stand as tables/inputs.py lays them out: which id comes first decides which row it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import ShapeError
from hotbed.host.devices import pinned_empty
from hotbed.host.intrinsics import load64
from hotbed.host.jit import njit
from hotbed.ids.distinct import DistinctIds
from hotbed.ops.inputs import FIRST, HEADER, LENGTH, OFFSETS, SPAN, STEP, VALUES
from hotbed.ops.streams import mark
from hotbed.pipeline.batches import IdFinder, Ids
from hotbed.tables.descriptions import BatchParts, GroupDescriber, Kinds, parts_of, why_not_described
from hotbed.tables.group.ahead import IdsAhead
from hotbed.tables.group.group import TableGroup
from hotbed.tables.group.keyspace import AheadKeys
from hotbed.tables.inputs import GroupInputs
from hotbed.tables.keyed import is_keyed, tensors_of
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.ownership import Contents
from hotbed.types import Jagged

_HOST = torch.device("cpu")


class BatchAhead(NamedTuple):
    """What was read ahead of one batch."""

    groups: list[IdsAhead | None]  # None where keys are preset
    contents: Contents  # of the batch on the device, then

    def is_of(self, named: Ids) -> bool:
        """Whether the batch still holds what was read."""
        if len(named.contents) != len(self.contents):
            return False
        pairs = zip(named.contents, self.contents)
        return all(now is then and version == before for (now, version), (then, before) in pairs)


class IdReader:
    """Reads batches of one feed ahead; in the thread of its reader."""

    def __init__(self, tables: EmbeddingTables, find_ids: IdFinder) -> None:
        self._features = tables.features
        self._find_ids = find_ids
        self._device = tables.device
        self._groups = [
            None
            if group.keyspace.ahead is None
            else _GroupSpans(group, group.keyspace.ahead, inputs, [feature.name for feature in tables.features])
            for group, inputs in zip(tables.groups, tables.group_inputs)
        ]
        self._distinct = DistinctIds("hotbed-ids-ahead")

    def read(self, batch: Any, moved: Any) -> BatchAhead | None:
        """Read the ids of a batch, as the loader gave it and on the device; None if it must be planned launch by launch."""
        try:
            given, named = self._find_ids(batch), self._find_ids(moved)
            parts = parts_of(self._features, *self._on_host(given), _HOST)
        except ShapeError:  # reported when it is planned
            return None
        if isinstance(parts, str):
            return None
        groups: list[IdsAhead | None] = []
        for group in self._groups:
            if group is None:
                groups.append(None)
                continue
            spans = group.spans(parts)
            if spans is None:
                return None  # likewise
            groups.append(group.keys.read_ahead(self._distinct, spans, self._device))
        return BatchAhead(groups, named.contents)

    def _on_host(self, given: Ids) -> tuple[Any, Any]:
        """Ids and bags in host memory, without weights."""
        copied: list[Tensor] = []

        def fetch(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or tensor.device.type != "cuda":
                return tensor
            copied.append(tensor)
            return pinned_empty(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True)

        if is_keyed(given.ids):
            if any(tensor.device.type == "cuda" for tensor in tensors_of(given.ids)):
                raise ShapeError("where its keys begin is known on the device only")
            return given.ids, given.bags
        found = _fetched(given.ids, fetch), None if given.bags is None else _fetched(given.bags, fetch)
        if copied:
            mark(self._device).synchronize()
        return found


def reads_ahead(tables: EmbeddingTables) -> bool:
    """Whether ids of these tables can be read ahead, if batches are planned by recordings."""
    dynamic = any(group.keyspace.ahead is not None for group in tables.groups)
    return dynamic and not tables.is_shared and why_not_described(tables.features) is None


def _fetched(value: Any, fetch: Callable[[Any], Any]) -> Any:
    if isinstance(value, Jagged):
        return Jagged(fetch(value.values), fetch(value.offsets))
    if isinstance(value, Mapping):
        return {name: _fetched(part, fetch) for name, part in value.items()}
    return fetch(value)


class _GroupSpans:
    """Where the ids of one group's features are, and where their lookups stand."""

    def __init__(self, group: TableGroup, keys: AheadKeys, inputs: GroupInputs, names: list[str]) -> None:
        self.keys = keys
        self._group, self._inputs, self._names = group, inputs, names
        self._describers: dict[Kinds, GroupDescriber] = {}

    def spans(self, batch: BatchParts) -> NDArray[np.int64] | None:
        """[P, 6] (ids/distinct.py), in the order of the group's descriptions; None where offsets are wrong."""
        describer = self._describers.get(batch.kinds)
        if describer is None:
            describer = GroupDescriber(self._group, self._inputs, self._names, batch.kinds)
            self._describers[batch.kinds] = describer
        is_bags, features = describer.layout.is_bags, self._inputs.features
        words = describer.describe(batch, False).words[HEADER:].reshape(-1, SPAN)
        if is_bags and not _offsets_rise(words, batch.size):
            return None
        spans = np.empty((len(features), 6), dtype=np.int64)
        spans[:, :3] = words[:, [VALUES, STEP, LENGTH]]
        order = self._inputs.order if is_bags else range(len(features))
        spans[:, 3] = [self.keys.names.index(features[j].table) for j in order]
        spans[:, 4] = words[:, FIRST] if is_bags else np.arange(len(features))
        spans[:, 5] = 1 if is_bags else len(features)
        return spans


@njit(nogil=True, cache=True)
def _offsets_rise(spans: Any, size: int) -> bool:
    """Whether the offsets of bags rise from 0 to the number of values, in all spans that have some."""
    good: Any = True
    for p in range(spans.shape[0]):
        offsets = spans[p, OFFSETS]
        if offsets != 0:
            good &= load64(offsets) == 0 and load64(offsets + 8 * size) == spans[p, LENGTH]
            for b in range(size):
                good &= load64(offsets + 8 * b) <= load64(offsets + 8 * b + 8)
    return bool(good)
