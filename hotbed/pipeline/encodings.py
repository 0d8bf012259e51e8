"""How a batch enters a recording.

    IdEncoding     described by where its ids are; kernels of the recording make keys of them and lay bags out
    MapEncoding    dynamic ids, which only the host can translate: described by where the numbers of ids are that were read
                   ahead (ids_ahead.py), and by a map from numbers to keys, which is settled when the batch is made known
    KeyEncoding    flattened launch by launch, as the eager planner does it; the recording takes the keys

Features that are not pooled and weights that want a gradient need the last. All that comes after it, knowing a batch and
planning its window, is replayed all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hotbed.ops.inputs import HEADER, MAP, SPAN, STEP, VALUES, Capacity, Description, InputLayout, describe_ids
from hotbed.ops.keys import Addresses, FirstBad
from hotbed.ops.lookups import BatchSlots, KeyMeaning, Lookups, Origin, Span
from hotbed.pipeline.batches import Ids
from hotbed.pipeline.planner import Candidate, KnownBatch
from hotbed.tables.descriptions import BatchParts, GroupDescriber, Kinds
from hotbed.tables.group.ahead import IdsAhead
from hotbed.tables.inputs import BatchInputs, flatten, read_inputs
from hotbed.tables.keyed import is_keyed
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.ownership import PreparedBatch
from hotbed.types import Jagged

KEYS: Kinds = ("keys",)
NARROW, WIDE = "keys of 32 bits", "keys of 64 bits"
NARROW_KEYS = 2**31 - 2  # keys below fit, and padding sorts behind them
_ANY_KEY = Addresses(  # a key stands for itself, and -1 for none
    base=np.zeros(1, dtype=np.int64),
    rows=np.full(1, 2**62, dtype=np.int64),
    hashing=np.zeros(1, dtype=np.bool_),
    has_padding=np.ones(1, dtype=np.bool_),
    padding=np.full(1, -1, dtype=np.int64),
)


class BatchEncoding(Protocol):
    """How batches of some kinds are described, by group."""

    kinds: Kinds
    layouts: list[InputLayout]
    is_described_early: bool  # when a batch is read; else when it is made known
    is_checked_late: bool  # by the kernels of a recording; else bad ids are looked for batch by batch
    names_rows: bool  # keys are rows; else some may be temporary, which no store has

    def prepare(self, candidate: Candidate, learns: bool) -> tuple[BatchInputs, list[Description]]:
        """The batch as the tables see it, and its descriptions."""

    def lookups(self, g: int, batch: KnownBatch, row: BatchSlots) -> Lookups:
        """The lookups of a planned batch in group g."""

    def check(self, batch: KnownBatch | PreparedBatch) -> None:
        """Raise for a bad id; waits for the device."""


class IdEncoding:
    """Batches whose features come in some kinds (tables/descriptions.py)."""

    is_described_early = is_checked_late = names_rows = True

    def __init__(self, tables: EmbeddingTables, kinds: Kinds) -> None:
        self.kinds = kinds
        self._tables = weakref.proxy(tables)
        names = [feature.name for feature in tables.features]
        groups = zip(tables.groups, tables.group_inputs)
        self._describers = [GroupDescriber(group, inputs, names, kinds) for group, inputs in groups]
        self.layouts = [describer.layout for describer in self._describers]
        self._nothing = torch.empty(0, 0, dtype=torch.int64, device=tables.device)

    def describe(self, batch: BatchParts, learns: bool) -> list[Description]:
        """A batch for each group."""
        return [describer.describe(batch, learns) for describer in self._describers]

    def prepare(self, candidate: Candidate, learns: bool) -> tuple[BatchInputs, list[Description]]:
        size = candidate.ids[0].num_samples
        return BatchInputs(size, self._nothing, {}, {}, {}), candidate.ids  # pooled features need nothing else

    def lookups(self, g: int, batch: KnownBatch, row: BatchSlots) -> Lookups:
        named = batch.named
        return self._describers[g].lookups(batch.ids[g], row)._replace(renew=lambda: self._flatten(named)[g])

    def check(self, batch: KnownBatch | PreparedBatch) -> None:
        for lookups in self._flatten(batch.named if isinstance(batch, KnownBatch) else batch):
            lookups.check_ids()

    def _flatten(self, named: Ids | PreparedBatch) -> list[Lookups]:
        given = read_inputs(self._tables.features, named.ids, named.bags, self._tables.device)
        groups = zip(self._tables.groups, self._tables.group_inputs)
        return [flatten(group, inputs, given) for group, inputs in groups]


class MapEncoding:
    """Batches of dynamic ids that were read ahead; some groups may have preset keys."""

    is_described_early = False
    is_checked_late = True

    def __init__(self, tables: EmbeddingTables, kinds: Kinds, width: str) -> None:
        """`width`: of keys; temporary ones are wide."""
        self.kinds = (width, *kinds)
        self.names_rows = width == NARROW
        self._tables = weakref.proxy(tables)
        names = [feature.name for feature in tables.features]
        groups = zip(tables.groups, tables.group_inputs)
        self._describers = [GroupDescriber(group, inputs, names, kinds) for group, inputs in groups]
        self.layouts = [
            describer.layout if group.keyspace.ahead is None else _mapped(describer.layout, width)
            for group, describer in zip(tables.groups, self._describers)
        ]
        self._nothing = torch.empty(0, 0, dtype=torch.int64, device=tables.device)

    def describe(self, batch: BatchParts, learns: bool) -> list[Description]:
        """A batch for each group, without keys."""
        return [describer.describe(batch, learns) for describer in self._describers]

    def prepare(self, candidate: Candidate, learns: bool) -> tuple[BatchInputs, list[Description]]:
        tables, found = self._tables, []
        with tables.changes.changing("translating ids"):
            for group, described, ahead in zip(tables.groups, candidate.ids, candidate.named.ahead.groups):
                keys = group.keyspace.ahead
                found.append(described if keys is None else _with_map(described, ahead, keys.settle(ahead, learns)))
        return BatchInputs(candidate.ids[0].num_samples, self._nothing, {}, {}, {}), found

    def lookups(self, g: int, batch: KnownBatch, row: BatchSlots) -> Lookups:
        described, named = batch.ids[g], batch.named
        return (
            self._describers[g]
            .lookups(described, row)
            ._replace(
                origin=described.kept.meaning if isinstance(described.kept, MappedIds) else None,
                renew=lambda: self._flatten(g, named, described),
            )
        )

    def check(self, batch: KnownBatch | PreparedBatch) -> None:
        named = batch.named if isinstance(batch, KnownBatch) else batch
        for g, group in enumerate(self._tables.groups):
            if group.keyspace.ahead is None:
                lookups = self._flatten(g, named, None)
                lookups.check_ids()

    def _flatten(self, g: int, named: Ids | PreparedBatch, described: Description | None) -> Lookups:
        """Launch by launch; of dynamic ids with the keys that were settled."""
        tables = self._tables
        given = read_inputs(tables.features, named.ids, named.bags, tables.device)
        mapped = None if described is None else described.kept
        make = mapped.keys if isinstance(mapped, MappedIds) else None
        return flatten(tables.groups[g], tables.group_inputs[g], given, make=make)


class MappedIds(NamedTuple):
    """What a description of dynamic ids keeps."""

    kept: Any  # tensors of the batch
    ahead: IdsAhead
    meaning: KeyMeaning

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Origin]:
        """As TableGroup.keys, of the very ids that were read ahead."""
        keys = self.ahead.map[self.ahead.numbers.to(torch.int64)]
        if spans and spans[0].stride > 1:  # of a matrix: column after column
            keys = keys.view(len(spans), spans[0].length).t().reshape(-1)
        return keys, FirstBad(None), self.meaning


def _with_map(described: Description, ahead: IdsAhead, meaning: KeyMeaning) -> Description:
    """Numbers of ids in the place of ids."""
    words, (numbers, keys) = described.words, ahead.addresses
    words[MAP] = keys
    words[HEADER + VALUES :: SPAN] = numbers + 4 * ahead.starts
    words[HEADER + STEP :: SPAN] = 1
    return described._replace(kept=MappedIds(described.kept, ahead, meaning))


def _mapped(layout: InputLayout, width: str) -> InputLayout:
    """The same lookups with keys of a map: all but one of those that fit into 31 bits, or any."""
    count = layout.num_spans
    no = np.zeros(count, dtype=np.bool_)
    none = np.zeros(count, dtype=np.int64)
    rows = np.full(count, NARROW_KEYS if width == NARROW else 2**62, dtype=np.int64)
    return layout._replace(addresses=Addresses(none, rows, no, no, none), is_mapped=True)


class KeyEncoding:
    """Batches of any kind: their keys are made before."""

    is_described_early = is_checked_late = False
    kinds = KEYS

    def __init__(self, tables: EmbeddingTables) -> None:
        self._tables = weakref.proxy(tables)
        self.names_rows = not any(group.keyspace.is_dynamic for group in tables.groups)
        self.layouts = [InputLayout(_ANY_KEY, is_bags=False) for _ in tables.groups]

    def prepare(self, candidate: Candidate, learns: bool) -> tuple[BatchInputs, list[Description]]:
        tables, named = self._tables, candidate.named
        given = read_inputs(tables.features, named.ids, named.bags, tables.device)
        found = []
        with tables.changes.changing("translating ids"):
            for group, inputs in zip(tables.groups, tables.group_inputs):
                lookups = flatten(group, inputs, given, learns)
                keys = lookups.slots.to(torch.int64)
                lookups = lookups._replace(slots=keys, keys=keys)
                found.append(describe_ids(keys, learns)._replace(num_samples=1, kept=lookups))
        return given, found

    def lookups(self, g: int, batch: KnownBatch, row: BatchSlots) -> Lookups:
        flattened: Lookups = batch.ids[g].kept
        return flattened._replace(slots=row.slots, sorted=row.sorted)

    def check(self, batch: KnownBatch | PreparedBatch) -> None:
        found = [each.kept for each in batch.ids] if isinstance(batch, KnownBatch) else batch.lookups
        for lookups in found:
            lookups.check_ids()


def lookups_by_group(tables: EmbeddingTables, ids: Any, bags: Any) -> list[Capacity] | None:
    """How many lookups a batch has in each group, as far as shapes say it; None for a malformed one."""
    parts: dict[str, Any] = dict(bags or {})
    names = [feature.name for feature in tables.features]
    if is_keyed(ids):  # as many as all of its features have, at most
        return [Capacity(int(ids.values().shape[0]), 1)] * len(tables.groups)
    if isinstance(ids, Tensor):
        if ids.ndim != 2 or ids.is_nested or ids.layout != torch.strided:
            return None
        parts |= {name: ids[:, :1] for name in names if name not in parts}
    elif isinstance(ids, Mapping):
        parts |= ids
    if parts.keys() != set(names):
        return None
    counts = {name: _count(part) for name, part in parts.items()}
    if min(counts.values()) < 0:
        return None
    return [Capacity(sum(counts[feature.name] for feature in inputs.features), 1) for inputs in tables.group_inputs]


def _count(part: Any) -> int:
    values = part.values if isinstance(part, Jagged) else part
    return int(values.numel()) if isinstance(values, Tensor) and not values.is_nested else -1
