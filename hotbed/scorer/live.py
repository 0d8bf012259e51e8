"""A ModelSource in, a model that scores out: column encoder, tables over their files and dense model, all of one version.

A caller takes one LiveModel and uses it for a whole request, so values are encoded and looked up by the same version. Its
files are closed when the last reference is gone.

`FileTables`: a batch of ids in, vectors out, over rows that stay in files. The functions that turn ids into
keys and rows into vectors are those of EmbeddingTables (tables/inputs.py, ops/keys, ops/lookup), so vectors are bit-identical
to those of training. Dynamic ids without a row read the same values as in training.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotbed.data.raw_reader import read_vocabulary
from hotbed.data.schema import IdFeature, Task
from hotbed.data.vocabulary import Numbering
from hotbed.errors import ConfigError, HotbedError, IdError, RunError
from hotbed.host.memory import in_words
from hotbed.models import block_of, rebuild_model
from hotbed.ops.init_rows import parse_init, stream_of
from hotbed.ops.keys import Addresses, FirstBad, make_keys
from hotbed.ops.lookup import lookup
from hotbed.ops.lookups import LookupIds, Lookups, Origin, Span
from hotbed.ops.move import InitialRows, InitialTable, initial_records, initial_rows
from hotbed.ops.records import Precision
from hotbed.optim import SGD
from hotbed.scorer.budget import Budget, Needs
from hotbed.scorer.columns import ColumnEncoder
from hotbed.scorer.id_map import FileIds, IdMap, MemoryIds
from hotbed.scorer.intake import ReadAnewError, RowIntake, Shared
from hotbed.scorer.kernels import GUEST
from hotbed.scorer.owners import RowOwners
from hotbed.scorer.rows import FileRows, RowSpace
from hotbed.scorer.source import ModelSource, TableSource
from hotbed.scorer.versions import RowDraft
from hotbed.tables.inputs import Feature, GroupInputs, flatten, read_inputs
from hotbed.tables.outputs import split_of
from hotbed.types import Batch

_CPU = torch.device("cpu")
_TRIES = 5  # to open a model that is replaced meanwhile
_MOST_GONE = 1024  # ids


class Version(NamedTuple):
    """What belongs to a version besides its rows."""

    name: str
    model: nn.Module  # the dense part
    shared: dict[str, NDArray[np.float32]]  # by table: what ids without a row read


class ScoredBatch(NamedTuple):
    """Outputs of the model for one batch, and the version that computed them."""

    outputs: Tensor  # logits [B], or [B, T] of all tasks that the model learned, on the CPU
    version: str

    @property
    def logits(self) -> Tensor:
        """[B], of the label."""
        return self.outputs if self.outputs.dim() == 1 else self.outputs[:, 0]


class LiveModel:
    """A model in use. Updates replace rows and dense weights together (`FileRows.publish`)."""

    def __init__(self, source: ModelSource, budget: Budget, before: LiveModel | None = None) -> None:
        """`before`: the previous model, whose vocabularies and, later, cache are reused."""
        self.source, self._budget = source, budget
        self.schema = source.schema
        widths = sorted({one.dim for one in source.tables.values()})
        if len(widths) != 1:
            raise RunError(f"{source.place} has tables of several widths ({widths}); hotbed's models read one.")
        model = build_dense(source, budget.device)
        spaces = [RowSpace(one.rows, one.file) for one in source.tables.values()]
        self.rows = FileRows(spaces, widths[0], budget.scratch, mapped=budget.mapped)
        weakref.finalize(self, self.rows.close)
        self.owners: RowOwners | None = None  # who has which row of training; None: changes cannot be applied
        numberings = {name: _Numbers() for name, one in source.tables.items() if one.rows is None and one.ids is None}
        intake = self._read_all(numberings)
        given = {name: one.ids for name, one in source.tables.items() if one.ids is not None}
        dynamic = given | {name: one.ids for name, one in numberings.items()}
        self._needs = self._needs_of(dynamic, intake.draft)
        budget.check(self._needs)
        self.vocabularies: dict[str, IdMap] = (
            before.vocabularies
            if before is not None and before.source.columns_mark == source.columns_mark
            else self._vocabularies()
        )
        self.id_maps = {name: self._make(name, ids, self._needs.dynamic) for name, ids in dynamic.items()}
        tables = {name: replace(one, ids=None) for name, one in source.tables.items()}
        self.source = replace(source, tables=tables)  # its lists of ids are in the maps, or in files
        self._sequences: dict[str, int] = source.model.get("sequences") or {}
        self.encoder = ColumnEncoder(self.schema, self.vocabularies)
        self.tables = FileTables(tables, self.rows, self.id_maps)
        self.shared = intake.shared  # by table and rank
        self.rows.publish(intake.draft, self.version_of(source, model, self.shared))
        self._num_fixed = self._grown_bytes
        if before is None:
            self.make_cache()

    def make_cache(self, before: LiveModel | None = None) -> None:
        """A cache of what the budget leaves for rows, from the memory of the model before it."""
        self.rows.make_cache(self._budget.left_for_cache(self._needs), before.rows if before is not None else None)

    def version_of(self, source: ModelSource, model: nn.Module, shared: Shared) -> Version:
        """The version of a source, with what ids without a row read: every rank has a replica, the last one counts."""
        vectors = {name: one.shared for name, one in source.tables.items() if one.shared is not None}
        for table, rank in sorted(shared):
            vector = shared[table, rank]
            if vector is None:  # it begins as the row of id 0
                vector = self.tables.first_values(table, np.zeros(1, dtype=np.int64))[0]
            vectors[table] = vector
        return Version(source.version, model, vectors)

    def check_growth(self, draft: RowDraft) -> None:
        """A ReadAnewError if the ids of a draft do not fit into the memory that is reserved for new ones, or most are gone."""
        grown = self._grown_bytes - self.rows.mark_bytes + draft.num_bytes - self._num_fixed
        if grown > self._budget.growth and self.id_maps:
            raise ReadAnewError(
                f"new ids take {in_words(grown)}, and {in_words(self._budget.growth)} are reserved for them"
            )
        live = {name: int(draft.num_live[n]) for n, name in enumerate(self.source.tables) if name in self.id_maps}
        known = sum(one.num_ids for one in self.id_maps.values())
        if known > _MOST_GONE + 2 * sum(live.values()):
            raise ReadAnewError(f"{known - sum(live.values()):,} of {known:,} ids that had a row no longer have one")

    def share(self) -> None:
        """Before a fork: files that are there now are never written again."""
        self.rows.share()
        if self.owners is not None:
            self.owners.read_only()

    def close(self) -> None:
        """Close all files."""
        self.rows.close()
        for one in (*self.vocabularies.values(), *self.id_maps.values()):
            one.close()

    @property
    def _list_bytes(self) -> int:
        return sum(one.num_bytes for one in (*self.vocabularies.values(), *self.id_maps.values()))

    @property
    def _grown_bytes(self) -> int:
        """What grows with the number of ids."""
        return sum(one.num_bytes for one in self.id_maps.values()) + self.rows.mark_bytes

    @property
    def num_bytes(self) -> int:
        """Memory of rows and their indexes."""
        return self.rows.num_bytes + self._list_bytes

    def _read_all(self, numberings: Mapping[str, _Numbers]) -> RowIntake:
        """All rows that come in parts, at their place."""
        if self._budget.updated and numberings and self.source.chains:
            self.owners = RowOwners(self._budget.scratch, self.rows.files.starts)
        intake = RowIntake(self.source.tables, self.rows, RowDraft(self.rows, empty=True), numberings, self.owners)
        for part in self.source.parts() if self.source.parts is not None else ():
            intake.add(part)
        return intake

    @cached_property
    def labels(self) -> tuple[Task, ...]:
        """The labels that the model learned: all of the data, or the first alone: found with one sample of zeros."""
        model, device = self.rows.current.state.model, self._budget.device
        sizes = ((1, model.num_columns, self.rows.dim), (1, model.num_dense))
        inputs = [torch.zeros(*size, dtype=torch.float32, device=device) for size in sizes]
        if self._sequences:
            inputs.append(torch.ones(1, len(self._sequences), dtype=torch.int64, device=device))
        with torch.no_grad():
            outputs = model(*inputs)
        return self.schema.labels[: outputs.shape[1] if outputs.dim() > 1 else 1]

    @torch.no_grad()
    def logits(self, batch: Batch) -> ScoredBatch:
        """The outputs for every sample, all from one version of the model."""
        found, version = self.tables.vectors(batch)
        vectors, lengths = block_of(found, self._sequences, batch.bags)
        if not batch.size:
            return ScoredBatch(torch.empty(0, len(self.labels), dtype=torch.float32, device="cpu"), version.name)
        device = self._budget.device
        inputs = [vectors, batch.dense, *([] if lengths is None else [lengths])]
        found = (
            version.model(*inputs) if device.type == "cpu" else version.model(*(one.to(device) for one in inputs)).cpu()
        )
        return ScoredBatch(found, version.name)

    def _needs_of(self, dynamic: Mapping[str, NDArray[np.int64]], draft: RowDraft) -> Needs:
        vocabularies = {name: one.rows - 1 for name, one in self._vocabulary_features().items()}
        lists = {name: len(ids) for name, ids in dynamic.items()}
        grow = bool(dynamic and self.source.chains)
        return Needs(vocabularies, lists, grow, self.rows.bytes_of_marks(draft), self.rows.set_bytes)

    def _vocabulary_features(self) -> dict[str, IdFeature]:
        """A feature of every table with a vocabulary."""
        return {name: one for name, (one, *_) in self.schema.tables.items() if one.mode == "vocabulary"}

    def _vocabularies(self) -> dict[str, IdMap]:
        return {
            name: self._make(name, read_vocabulary(self.source.columns, one), self._needs.vocabularies)
            for name, one in self._vocabulary_features().items()
        }

    def _make(self, name: str, ids: NDArray[np.int64], lists: Mapping[str, int]) -> IdMap:
        memory = self._budget.file_cache(lists, name)
        return MemoryIds(ids) if memory is None else FileIds(ids, memory, self._budget.scratch)


class _Numbers:
    """The ids of a table while it is read."""

    def __init__(self) -> None:
        self._numbering = Numbering()

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._numbering.ids

    def add(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._numbering.add(ids, np.zeros(len(ids), dtype=np.bool_)).astype(np.int64)

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._numbering.find(ids).astype(np.int64)


def open_live(source: ModelSource, budget: Budget, before: LiveModel | None = None) -> LiveModel:
    """A model whose files are all of one version: a folder that is replaced while they are opened is opened again."""
    for _ in range(_TRIES):
        try:
            live = LiveModel(source, budget, before)
            if source.is_current():
                return live
            del live
        except (HotbedError, OSError):
            if source.is_current():
                raise
        source = source.reopen()
    raise RunError(
        f"{source.place} was replaced {_TRIES} times while it was opened, so that no version could be read whole. "
        "Load it when it is written less often."
    )


def build_dense(source: ModelSource, device: torch.device) -> nn.Module:
    """The dense model, in eval mode on its device."""
    try:
        model = rebuild_model(source.model)
        model.load_state_dict(source.dense)
    except (RuntimeError, TypeError, ConfigError) as error:
        raise RunError(f"the dense weights of {source.place} do not fit the model: {error}") from error
    found: Any = model.to(device).eval().requires_grad_(False)
    return found  # type: ignore[no-any-return]


class Vectors(NamedTuple):
    """Vectors of one batch."""

    vectors: Tensor | dict[str, Tensor]  # [B, F, D]; with sequences by feature, pooled [B, D] or in order [L, D]
    state: Version  # that was current


class FileTables:
    """The tables of a model, all of one width."""

    def __init__(self, tables: Mapping[str, TableSource], rows: FileRows, id_maps: Mapping[str, IdMap]) -> None:
        self.rows, self.id_maps = rows, dict(id_maps)
        self.members = dict(tables)
        self.records = torch.empty(0, dtype=torch.float32, device="cpu")  # gives the type of the weights of bags
        self._number_of = {name: number for number, name in enumerate(tables)}
        self.features = [Feature(one, name, how) for name, of in tables.items() for one, how in of.features.items()]
        self._table_of = {one.name: one.table for one in self.features}
        self._inputs = GroupInputs(cast(Any, self), self.features)
        self._ways: dict[tuple[str, ...], Addresses] = {}
        self._first = {name: _first_of(one) for name, one in tables.items()}

    def vectors(self, batch: Batch) -> Vectors:
        """Look up a batch on the CPU."""
        given = read_inputs(self.features, batch.ids, batch.bags or None, _CPU)
        with self.rows.reading() as version:  # before ids are found: one that comes later has no row in it
            lookups = flatten(cast(Any, self), self._inputs, given)
            found = torch.empty(lookups.slots.shape[0], self.rows.dim, dtype=torch.float32, device="cpu")
            first = self.rows.fetch(version, lookups.slots.numpy(), found.numpy())
        state: Version = version.state
        if first.shape[0]:
            self._fill(first, lookups, found, state.shared)
        if lookups.bags is not None:
            slots = torch.arange(found.shape[0], device="cpu")
            slots[lookups.slots < 0] = -1
            found = lookup(found, lookups._replace(slots=slots), self.rows.dim)
        if self._inputs.all_pooled:
            return Vectors(found.view(given.size, len(self.features), self.rows.dim), state)
        cut = split_of(self.features, given)
        parts = dict(zip(cut.names, cut.split(found)))
        return Vectors({one.name: parts[one.name] for one in self.features}, state)

    def keys(
        self, ids: Tensor, spans: tuple[Span, ...], tables: tuple[str, ...], learns: bool
    ) -> tuple[Tensor, FirstBad, Origin]:
        """Keys [L] of ids [L], one table name per span; the first position with a bad id; the ids, for initial values."""
        if not self.id_maps:
            return *make_keys(ids, spans, self._way_of(tables)), LookupIds(ids)
        numbers, strange = ids.clone(), torch.zeros(ids.shape[0], dtype=torch.bool, device="cpu")
        for span, table in zip(spans, tables):
            if table in self.id_maps:
                where = _positions(span)
                found = torch.from_numpy(self.id_maps[table].find(ids[where].contiguous().numpy()))
                numbers[where], strange[where] = found.clamp(min=0), found < 0
        keys, first_bad = make_keys(numbers, spans, self._way_of(tables))
        keys[strange] = GUEST
        return keys, first_bad, LookupIds(ids)

    def refuse(self, table: str, feature: str, sample: int, value: int) -> IdError:
        """The error for an id outside its table."""
        rows = self.members[table].rows or 0
        return IdError(
            f"id {value} of feature {feature!r} in sample {sample} is outside table {table!r}, which has {rows:,} rows "
            f"(ids 0 to {rows - 1:,})."
        )

    def first_values(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """The initial values [n, D] of ids."""
        usual, of_minus_one = self._first[table]
        numbers = torch.from_numpy(ids)
        values = usual.layout.weights(initial_records(numbers, usual)).float()
        minus_one = numbers == -1
        if bool(minus_one.any()):
            values[minus_one] = usual.layout.weights(initial_records(numbers[minus_one], of_minus_one)).float()
        return values.numpy()

    def _fill(
        self, first: NDArray[np.int64], lookups: Lookups, found: Tensor, shared: Mapping[str, NDArray[np.float32]]
    ) -> None:
        """Fill in initial values, or the shared vector, where no row was found."""
        assert isinstance(lookups.origin, LookupIds), "a scorer keeps the ids"
        names, ids, out = list(self.members), lookups.origin.ids.numpy(), found.numpy()
        tables = np.empty(ids.shape[0], dtype=np.int64)
        for span in lookups.spans:
            tables[_positions(span)] = self._number_of[self._table_of[span.feature]]
        for number in np.unique(tables[first]):
            mine = first[tables[first] == number]
            name, rows = names[number], self.members[names[number]].rows
            wanted = ids[mine] % rows if self.members[name].hashing and rows else ids[mine]
            out[mine] = shared[name] if name in shared else self.first_values(name, np.ascontiguousarray(wanted))

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
    """The positions of the lookups of a feature."""
    return slice(span.start, span.start + max(0, span.length - 1) * span.stride + bool(span.length), span.stride)


def _first_of(table: TableSource) -> Sequence[InitialRows]:
    """Two sets: for all ids but -1, which the kernels use for padding, and for -1."""
    stream, init = stream_of(table.seed, table.name), parse_init(table.init)
    precision = cast(Precision, table.precision)
    return [
        initial_rows(table.dim, SGD(lr=0.0), [InitialTable(0, stream, init, no_id)], precision) for no_id in (-1, -2)
    ]
