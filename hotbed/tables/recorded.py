"""Keys of batches, recorded: where every row is on a CUDA device, the plain loop's own shortcut.

Making keys and sorting them takes a dozen launches, of bags several hundred, from Python longer than the kernels run. Batches
whose features come in the same kinds (one id, bags, bags with weights) are recorded as one CUDA graph when they have come a few
times, and replayed whatever their sizes are, up to a capacity that grows (ops/inputs). What it gives stays valid for seven
further batches; a backward that comes later works it out again.

An id outside its table, or wrong offsets of bags, stop all updates on the device from that batch on, and are reported by one of
the next calls.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hotbed.errors import HotbedError
from hotbed.ops.backend import backend_of
from hotbed.ops.inputs import Capacity, Description
from hotbed.ops.lookups import BatchSlots, IdCheck, Lookups, SortedKeys, Ticket
from hotbed.ops.recording import RecordedSizes, Recordings
from hotbed.ops.streams import mark
from hotbed.tables.descriptions import (
    MALFORMED,
    BatchParts,
    GroupDescriber,
    Kinds,
    capacity_for,
    parts_of,
    why_not_described,
)
from hotbed.tables.inputs import BatchInputs, flatten, read_inputs
from hotbed.tables.ownership import PreparedBatch

if TYPE_CHECKING:
    from hotbed.ops.inputs.triton import Descriptions

_OFTEN = 6  # times that batches of some kinds must have come
_KINDS = 4  # that are recorded
_ROWS = 8  # batches whose keys are kept
_VIEWS = 64


class RecordedLookups:
    """The recordings of one EmbeddingTables."""

    def __init__(self, tables: Any) -> None:
        self._tables = weakref.proxy(tables)  # which own this
        self._seen: dict[Kinds, int] = {}
        self._recordings: dict[Kinds, _KindsRecording] = {}
        dynamic = any(group.keyspace.is_dynamic for group in tables.groups)
        self._never = "ids are dynamic" if dynamic else why_not_described(tables.features)

    def find(self, ids: Any, bags: Any) -> PreparedBatch | None:
        """The lookups of a batch, or None for one that is not recorded."""
        tables = self._tables
        if backend_of(tables.groups[0].records) != "triton":
            return None
        if self._never is not None:
            tables.ownership.log_eager(self._never)
            return None
        if tables.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        parts = parts_of(tables.features, ids, bags, tables.device)
        if isinstance(parts, str):
            if parts != MALFORMED:
                tables.ownership.log_eager(parts)
            return None
        recording = self._recordings.get(parts.kinds)
        described = None if recording is None else recording.describe(parts)
        if recording is None or described is None:
            recording = self._new(parts, recording)
            if recording is None:
                return None
            described = recording.describe(parts)
        assert described is not None, "a recording holds the batch that it was made for"
        return recording.look(ids, bags, described)

    def check(self) -> None:
        """Raise for what is wrong in a batch, as far as the host knows of it."""
        for recording in self._recordings.values():
            recording.check()

    def forget(self) -> None:
        """The rows have moved."""
        self._recordings.clear()

    def _new(self, parts: BatchParts, too_small: _KindsRecording | None) -> _KindsRecording | None:
        """A recording for these batches, once they have come often; one for larger ones in the place of another."""
        kinds = parts.kinds
        self._seen[kinds] = self._seen.get(kinds, 0) + 1
        rare = self._seen[kinds] < _OFTEN or len(self._recordings) >= _KINDS
        if too_small is None and (rare or parts.size == 0):
            return None
        if too_small is not None:
            too_small.finish()
        recording = _KindsRecording(self._tables, parts, None if too_small is None else too_small.capacities)
        if not recording.fits:
            self._never = "rows are not float32"
            return None
        self._recordings[kinds] = recording
        return recording


class _GroupKeys(NamedTuple):
    """The keys of one group: how batches are described, and the last of them, laid out. C lookups and N bags at most."""

    describer: GroupDescriber
    inputs: Descriptions
    capacity: Capacity
    sizes: RecordedSizes
    kept: list[Tensor]  # keys, sorted keys and their order [8, >= C]
    starts: Tensor | None  # of bags: int64 [8, > N]
    out_row: Tensor | None  # of bags: int32 [8, >= C]
    scale: Tensor | None  # of bags with weights or means: float32 [8, >= C]
    views: dict[tuple[int, int, int], BatchSlots]  # by row, lookups and bags: those used lately

    def view(self, row: int, num_lookups: int, num_bags: int) -> BatchSlots:
        """What is kept of a batch, with its keys as slots: a view takes microseconds."""
        found = self.views.get((row, num_lookups, num_bags))
        if found is None:
            if len(self.views) >= _VIEWS:
                self.views.clear()
            keys, sorted_keys, order = (part[row] for part in self.kept)
            bags = (None if part is None else part[row] for part in (self.starts, self.out_row, self.scale))
            found = BatchSlots(keys, SortedKeys(sorted_keys, order), *bags).cut(num_lookups, num_bags)
            self.views[row, num_lookups, num_bags] = found
        return found


class _KindsRecording:
    """Batches of some kinds, up to a capacity."""

    def __init__(self, tables: Any, parts: BatchParts, at_least: Sequence[Capacity] | None) -> None:
        from hotbed.ops.keys.addresses import Flags

        self._tables, self._device = tables, tables.groups[0].records.device
        self._groups: list[_GroupKeys] = []
        self._flags = Flags(self._device)  # of all groups: a batch is good or bad as a whole
        names = [feature.name for feature in tables.features]
        before = at_least or [Capacity(0, 0)] * len(tables.groups)
        for group, inputs, capacity in zip(tables.groups, tables.group_inputs, before):
            self._groups.append(self._new_group(GroupDescriber(group, inputs, names, parts.kinds), parts, capacity))
        self.capacities = [group.capacity for group in self._groups]
        self.fits = all(group.records.dtype == torch.float32 for group in tables.groups) or not any(
            group.describer.layout.is_scaled for group in self._groups
        )
        self._state = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._tickets = [Ticket(True) for _ in range(_ROWS)]
        self._number = 0
        self._recent: deque[tuple[Any, Any, Any]] = deque()  # (ids, bags, mark) that the host does not know to be good
        self._nothing = torch.empty(0, 0, dtype=torch.int64, device=self._device)
        self._recordings = Recordings(self._device)

    def _new_group(self, describer: GroupDescriber, parts: BatchParts, before: Capacity) -> _GroupKeys:
        from hotbed.ops.inputs.triton import Descriptions

        layout, device = describer.layout, self._device
        capacity = capacity_for(describer.describe(parts, True).need, parts.varies, before)
        length = max(16, -(-capacity.num_lookups // 16) * 16)  # rows begin at 64 bytes, for kernels
        num_starts = -(-(capacity.num_samples * layout.num_spans + 1) // 16) * 16

        def zeros(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(_ROWS, width, dtype=dtype, device=device)

        return _GroupKeys(
            describer,
            Descriptions(layout, device, self._flags),
            capacity,
            RecordedSizes(capacity.num_lookups),
            [zeros(length, kind) for kind in (layout.key_type, layout.key_type, torch.int32)],
            zeros(num_starts, torch.int64) if layout.is_bags else None,
            zeros(length, torch.int32) if layout.is_bags else None,
            zeros(length, torch.float32) if layout.is_scaled else None,
            {},
        )

    def describe(self, parts: BatchParts) -> list[Description] | None:
        """A batch for each group; None for one that is too large."""
        found = [group.describer.describe(parts, True) for group in self._groups]
        return found if all(c.holds(each.need) for c, each in zip(self.capacities, found)) else None

    def look(self, ids: Any, bags: Mapping[str, Any] | None, batch: Sequence[Description]) -> PreparedBatch:
        """Keys, and their order, on the current stream."""
        self.check()
        number, self._number = self._number, self._number + 1
        self._tickets[number % _ROWS].valid = False
        ticket = self._tickets[number % _ROWS] = Ticket(True)
        for group, each in zip(self._groups, batch):
            group.inputs.note(number, each)
        sizes = tuple(group.sizes.size_for(each.num_lookups) for group, each in zip(self._groups, batch))
        self._recordings.run(sizes, lambda: self._make(sizes))
        self._recent.append((ids, bags, mark(self._device)))
        if len(self._recent) == _ROWS:
            point = self._recent.popleft()[2]
            if point is not None:
                point.synchronize()  # let the host be no farther ahead than what it can still check
        lookups = [self._lookups(g, each, number % _ROWS, ticket, (ids, bags)) for g, each in enumerate(batch)]
        given = BatchInputs(batch[0].num_samples, self._nothing, {}, {}, {})  # pooled features need nothing else
        return PreparedBatch(ids, bags, given, lookups)

    def check(self) -> None:
        """Raise for what is wrong in one of the last batches."""
        if self._groups[0].inputs.found_bad:
            recent, self._recent = list(self._recent), deque()
            self._wait()
            self._groups[0].inputs.clear()
            for ids, bags, _ in recent:
                for lookups in self._flatten(ids, bags):
                    lookups.check_ids()
            raise HotbedError("an id was outside its table, in a batch that was changed since")

    def finish(self) -> None:
        """No more batches will come: all that came are known to be good."""
        self._wait()
        self.check()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _lookups(self, g: int, batch: Description, row: int, ticket: Ticket, given: tuple[Any, Any]) -> Lookups:
        group = self._groups[g]
        num_bags = batch.num_samples * group.describer.layout.num_spans
        return group.describer.lookups(batch, group.view(row, batch.num_lookups, num_bags))._replace(
            check=IdCheck(group.inputs.flag),
            ticket=ticket,
            renew=lambda: self._flatten(*given)[g],
        )

    def _flatten(self, ids: Any, bags: Any) -> list[Lookups]:
        tables = self._tables
        given = read_inputs(tables.features, ids, bags, self._device)
        return [flatten(group, inputs, given) for group, inputs in zip(tables.groups, tables.group_inputs)]

    def _make(self, sizes: Sequence[int]) -> None:
        from hotbed.ops.inputs.triton import count_up, keep

        for group, size in zip(self._groups, sizes):
            inputs, state = group.inputs, self._state
            inputs.bring(state, 0, 1)
            keys = inputs.make_keys(state, 0, 0, size)
            if group.starts is not None and group.out_row is not None:
                bags = (group.starts, group.out_row, group.scale)
                inputs.lay_bags(keys, state, 0, 0, group.capacity.num_samples, *bags)
            sorted_keys, order = torch.sort(keys, stable=True)
            keep(keys, sorted_keys, order, group.kept, state)
        count_up(self._state)
