"""Keys of id matrices of one size, recorded: where every row is on a CUDA device, the plain loop's own shortcut.

Making keys and sorting them takes a dozen launches, from Python longer than the kernels run. A size that has come a few
times is recorded as one CUDA graph and replayed. What it gives stays valid for seven further batches; a backward that comes
later works it out again.

An id outside its table stops all updates on the device from that batch on, and is reported by one of the next calls.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from hotbed.errors import HotbedError
from hotbed.ops.backend import backend_of
from hotbed.ops.lookups import Lookups, Ticket
from hotbed.ops.recording import Recordings
from hotbed.ops.streams import mark
from hotbed.tables.inputs import BatchInputs, flatten, read_inputs
from hotbed.tables.ownership import PreparedBatch

_OFTEN = 6  # times a size must have come
_SIZES = 4  # sizes that are recorded
_ROWS = 8  # batches whose keys are kept


class RecordedLookups:
    """The recordings of one EmbeddingTables."""

    def __init__(self, tables: Any) -> None:
        self._tables = weakref.proxy(tables)  # which own this
        self._seen: dict[tuple[int, ...], int] = {}
        self._recordings_of_shape: dict[tuple[int, ...], _ShapeRecording] = {}
        features = tables.features
        self._fits = len(tables.groups) == 1 and all(feature.pooling != "none" for feature in features)

    def find(self, ids: Any, bags: Any) -> PreparedBatch | None:
        """The look-ups of an id matrix, or None for one that is not recorded."""
        if not self._fits or bags or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.int64:
            return None
        if ids.is_nested or ids.layout != torch.strided:
            return None
        shape = tuple(ids.shape)
        recording = self._recordings_of_shape.get(shape)
        if recording is None:
            recording = self._new(ids, shape)
            if recording is None:
                return None
        if not ids.is_contiguous() or ids.device != recording.device or torch.cuda.is_current_stream_capturing():
            return None
        return recording.look(ids)

    def check(self) -> None:
        """Raise for a bad id, as far as the host knows of it."""
        for recording in self._recordings_of_shape.values():
            recording.check()

    def forget(self) -> None:
        """The rows have moved."""
        self._recordings_of_shape.clear()

    def _new(self, ids: Tensor, shape: tuple[int, ...]) -> _ShapeRecording | None:
        tables = self._tables
        self._seen[shape] = self._seen.get(shape, 0) + 1
        rare = self._seen[shape] < _OFTEN or len(self._recordings_of_shape) >= _SIZES
        if rare or shape[0] == 0 or shape[1] != len(tables.features) or backend_of(ids) != "triton":
            return None
        self._recordings_of_shape[shape] = recording = _ShapeRecording(tables, shape)
        return recording


class _ShapeRecording:
    """Id matrices of one shape [B, F]."""

    def __init__(self, tables: Any, shape: tuple[int, ...]) -> None:
        from hotbed.ops.keys.triton import BATCHES, KeyMaker

        self._tables = tables
        self._group, inputs = tables.groups[0], tables.group_inputs[0]
        self.device = self._group.records.device
        self._spans = inputs.matrix_spans(shape[0])
        self._maker = KeyMaker(self._spans, self._group.addresses(inputs.tables), self.device)
        self._addresses = torch.zeros(BATCHES, dtype=torch.int64, pin_memory=self.device.type == "cuda", device="cpu")
        self._host_addresses = self._addresses.numpy()
        self._device_addresses = torch.zeros(BATCHES, dtype=torch.int64, device=self.device)
        self._state = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._num_lookups = shape[0] * shape[1]
        length = -(-self._num_lookups // 16) * 16
        kinds = (self._maker.type, self._maker.type, torch.int32)
        self._kept = [torch.zeros(_ROWS, length, dtype=kind, device=self.device) for kind in kinds]
        self._rows = list(zip(*(part[:, : self._num_lookups].unbind(0) for part in self._kept)))
        self._tickets = [Ticket(True) for _ in range(_ROWS)]
        self._number = 0
        self._recent: deque[tuple[Tensor, Any]] = deque()  # batches whose ids the host does not know to be good
        names = [feature.name for feature in tables.features]
        self._places = {name: column for column, name in enumerate(names)}
        self._size = shape[0]
        self._recordings = Recordings(self.device)

    def look(self, ids: Tensor) -> PreparedBatch:
        """Keys, and their order, on the current stream."""
        self.check()
        number, self._number = self._number, self._number + 1
        row = number % _ROWS
        self._tickets[row].valid = False
        ticket = self._tickets[row] = Ticket(True)
        self._host_addresses[number % self._host_addresses.shape[0]] = ids.data_ptr()
        self._recordings.run("keys", self._make)
        self._recent.append((ids, mark(self.device)))
        if len(self._recent) == _ROWS:
            self._recent.popleft()[1].synchronize()  # let the host be no farther ahead than what it can still check
        keys, sorted_keys, order = self._rows[row]
        lookups = Lookups(
            slots=keys,
            spans=self._spans,
            num_out=self._num_lookups,
            sorted_keys=sorted_keys,
            order=order,
            bad=self._maker.flag,
            ticket=ticket,
            renew=lambda: self._flatten(ids),
        )
        return PreparedBatch(ids, None, BatchInputs(self._size, ids, self._places, {}, {}), [lookups])

    def check(self) -> None:
        if self._maker.found_bad:
            recent, self._recent = [ids for ids, _ in self._recent], deque()
            torch.cuda.synchronize(self.device)
            self._maker.clear()
            for ids in recent:
                lookups = self._flatten(ids)
                if lookups.check is not None:
                    lookups.check()
            raise HotbedError("an id was outside its table, in a batch that was changed since")

    def _flatten(self, ids: Tensor) -> Lookups:
        tables = self._tables
        given = read_inputs(tables.features, ids, None, self.device)
        return flatten(self._group, tables.group_inputs[0], given)

    def _make(self) -> None:
        from hotbed.ops.keys.triton import keep

        self._device_addresses.copy_(self._addresses, non_blocking=True)
        keys = self._maker(self._device_addresses, self._state, 0, 0)
        sorted_keys, order = torch.sort(keys, stable=True)
        keep(keys, sorted_keys, order, self._kept, self._state)
