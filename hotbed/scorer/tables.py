"""A batch of ids in, pooled vectors [B, F, D] out, over rows that stay in files.

Ids become keys and rows become vectors by the same functions as in EmbeddingTables (inputs.py, ops/keys, ops/lookup), so
vectors are those of training to the bit. Ids of dynamic tables that have no row read what they would have read there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import IdError
from hotbed.ops.init_rows import parse_init, stream_of
from hotbed.ops.keys import Addresses, FirstBad, make_keys
from hotbed.ops.lookup import lookup
from hotbed.ops.lookups import Lookups, Span
from hotbed.ops.move import FirstRows, FirstTable, first_records, first_rows
from hotbed.ops.records import Precision
from hotbed.optim import SGD
from hotbed.scorer.id_map import IdMap
from hotbed.scorer.kernels import GUEST
from hotbed.scorer.rows import Rows
from hotbed.scorer.source import TableSource
from hotbed.tables.inputs import Feature, GroupInputs, as_given, flatten
from hotbed.types import Batch

_CPU = torch.device("cpu")


class Vectors(NamedTuple):
    """Of one batch."""

    vectors: Tensor  # [B, F, D]
    state: Any  # what was said of the rows at that moment


class FileTables:
    """The tables of a model, all of one width."""

    def __init__(self, tables: Mapping[str, TableSource], rows: Rows, id_maps: Mapping[str, IdMap]) -> None:
        self.rows, self.id_maps = rows, dict(id_maps)
        self.members = dict(tables)
        self.records = torch.empty(0, dtype=torch.float32, device="cpu")  # says of what type weights of bags are
        self._number_of = {name: number for number, name in enumerate(tables)}
        self.features = [Feature(name, name, one.pooling) for name, one in tables.items()]
        self._inputs = GroupInputs(cast(Any, self), self.features)
        self._ways: dict[tuple[str, ...], Addresses] = {}
        self._first = {name: _first_of(one) for name, one in tables.items()}

    def vectors(self, batch: Batch) -> Vectors:
        """Look up a batch on the CPU."""
        given = as_given(self.features, batch.ids, batch.bags or None, _CPU)
        lookups = flatten(cast(Any, self), self._inputs, given)
        found = torch.empty(lookups.slots.shape[0], self.rows.dim, dtype=torch.float32, device="cpu")
        first, state = self.rows.fetch(lookups.slots.numpy(), found.numpy())
        if first.shape[0]:
            self._fill(first, lookups, found)
        if lookups.starts is not None:
            slots = torch.arange(found.shape[0], device="cpu")
            slots[lookups.slots < 0] = -1
            found = lookup(found, lookups._replace(slots=slots), self.rows.dim)
        return Vectors(found.view(given.size, len(self.features), self.rows.dim), state)

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Any]:
        """Keys [L] of ids [L], one table name per span; the first position with a bad id; the ids, for first values."""
        if not self.id_maps:
            return *make_keys(ids, spans, self._way_of(tables)), ids
        numbers, strange = ids.clone(), torch.zeros(ids.shape[0], dtype=torch.bool, device="cpu")
        for span, table in zip(spans, tables):
            if table in self.id_maps:
                where = _positions(span)
                found = torch.from_numpy(self.id_maps[table].find(ids[where].contiguous().numpy()))
                numbers[where], strange[where] = found.clamp(min=0), found < 0
        keys, first_bad = make_keys(numbers, spans, self._way_of(tables))
        keys[strange] = GUEST
        return keys, first_bad, ids

    def refuse(self, table: str, feature: str, sample: int, value: int) -> IdError:
        """The error for an id outside its table."""
        rows = self.members[table].rows or 0
        return IdError(
            f"id {value} of feature {feature!r} in sample {sample} is outside table {table!r}, which has {rows:,} rows "
            f"(ids 0 to {rows - 1:,})."
        )

    def first_values(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """What rows of these ids [n] read that no file has, [n, D]."""
        shared = self.members[table].shared
        if shared is not None:
            return np.broadcast_to(shared, (ids.shape[0], shared.shape[0]))
        usual, of_minus_one = self._first[table]
        numbers = torch.from_numpy(ids)
        values = usual.layout.weights(first_records(numbers, usual)).float()
        minus_one = numbers == -1
        if bool(minus_one.any()):
            values[minus_one] = usual.layout.weights(first_records(numbers[minus_one], of_minus_one)).float()
        return values.numpy()

    def _fill(self, first: NDArray[np.int64], lookups: Lookups, found: Tensor) -> None:
        """Put first values, or those that ids share, in their place."""
        ids, out = cast(Tensor, lookups.sense).numpy(), found.numpy()
        tables = np.empty(ids.shape[0], dtype=np.int64)
        for span in lookups.spans:
            tables[_positions(span)] = self._number_of[span.feature]
        for number in np.unique(tables[first]):
            mine = first[tables[first] == number]
            name, rows = self.features[number].name, self.members[self.features[number].name].rows
            wanted = ids[mine] % rows if self.members[name].hashing and rows else ids[mine]
            out[mine] = self.first_values(name, np.ascontiguousarray(wanted))

    def _way_of(self, tables: tuple[str, ...]) -> Addresses:
        if tables not in self._ways:
            members, starts = [self.members[name] for name in tables], self.rows.files.starts
            numbers = [self._number_of[name] for name in tables]
            none = np.zeros(len(tables), dtype=np.int64)
            self._ways[tables] = Addresses(
                starts[numbers],
                starts[np.array(numbers) + 1] - starts[numbers],
                np.array([one.hashing for one in members]),
                none.astype(np.bool_),
                none,
            )
        return self._ways[tables]


def _positions(span: Span) -> slice:
    """Of the look-ups of a feature."""
    return slice(span.start, span.start + max(0, span.length - 1) * span.stride + bool(span.length), span.stride)


def _first_of(table: TableSource) -> Sequence[FirstRows]:
    """For all ids but -1, which the kernels take for that of padding, and for that one."""
    stream, init = stream_of(table.seed, table.name), parse_init(table.init)
    precision = cast(Precision, table.precision)
    return [first_rows(table.dim, SGD(lr=0.0), [FirstTable(0, stream, init, no_id)], precision) for no_id in (-1, -2)]
