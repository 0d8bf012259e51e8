"""Rows for checkpoints where all of them are on the device: which have changed since the last one, copied at once.

What training changes is marked (`ResidentRows.touched`). Rows that others can change without a word are compared instead: those
of tables whose views were handed out (`tables.weight`, `states`, `rows`, `state_dict`), because a view may be written to at any
later time, and all of them where an optimizer visits whole tables (decay_scope="table"). Compared with 64 bits of every record
as it was saved last: 8 bytes a row and one pass over the table at every checkpoint. The first incremental checkpoint after a
view was handed out has nothing to compare with and holds the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hotbed.ops.move import initial_records
from hotbed.store.held import FrozenFiles, Keys, refuse_second

if TYPE_CHECKING:
    from hotbed.tables.group.resident import ResidentRows

Records = tuple[Tensor, Tensor]  # keys int64 [N], records [N, W], on the host
_CHUNK = 1 << 16
_STEP, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB  # odd, below 2^63


class CopiedRows:
    """A Holder (store/held.py) of rows that are all on the device."""

    files: Sequence[FrozenFiles] = ()  # none: `items` gives the records

    def __init__(self, group: ResidentRows) -> None:
        self._group = group
        self._before: Tensor | None = None
        self._digests: dict[tuple[int, int], Tensor] = {}
        self._keys: Tensor | None = None  # None: all, of which those that are as they began are left out
        self._records = torch.empty(0, dtype=torch.float32, device="cpu")

    def take(self, touched: bool) -> None:
        """Copy what changed since the last commit, or all; from now on it counts as saved."""
        group = self._group
        if group.held_by is not None:
            raise refuse_second()
        self._before, device = group.touched, group.records.device
        self._digests = {span: digests_of(group.records[slice(*span)]) for span in group.compared}
        if touched:
            keys = self._changed().nonzero().squeeze(1)
            self._records, self._keys = group.records.detach()[keys].cpu(), keys.cpu()
        else:
            self._records = group.records.detach().to("cpu", copy=True)
        marks = torch.zeros(group.keyspace.num_rows, dtype=torch.uint8, device=device)
        group.held_by = self
        group.touched = marks

    @property
    def keys(self) -> Keys:
        """Keys of the rows that `items` gives."""
        return np.concatenate([np.empty(0, dtype=np.int64), *(keys.numpy() for keys, _ in self.items())])

    def in_files(self, live: Callable[[], Keys]) -> Keys:
        """None."""
        return np.empty(0, dtype=np.int64)

    def items(self) -> Iterator[Records]:
        """(keys, records), on the host."""
        return _not_first(self._group, self._records) if self._keys is None else iter([(self._keys, self._records)])

    def commit(self) -> None:
        """They are saved."""
        if self._group.held_by is self:
            self._group.digests = self._digests
            self._group.held_by = None

    def give_back(self) -> None:
        """They were not saved; after `commit`, nothing."""
        group, before = self._group, self._before
        if group.held_by is not self:
            return
        if before is None:
            group.touched = None  # what changed is not known
        elif group.touched is not None and group.touched is not before:
            # training may mark rows meanwhile: write ones, and nothing else
            group.touched.index_fill_(0, before.nonzero().squeeze(1).to(group.touched.device), 1)
        group.held_by = None

    def _changed(self) -> Tensor:
        """uint8 [R]: marked, or not as it was saved last."""
        group = self._group
        if self._before is None:
            return torch.ones(group.keyspace.num_rows, dtype=torch.uint8, device="cpu")
        changed = self._before.clone()
        for span, now in self._digests.items():
            saved = group.digests.get(span)
            changed[slice(*span)] |= torch.ones_like(now, dtype=torch.bool) if saved is None else now != saved
        return changed


def digests_of(records: Tensor) -> Tensor:
    """int64 [R]: a sum of the words of every record, each mixed with its place; equal records have equal ones."""
    digests = torch.empty(records.shape[0], dtype=torch.int64, device=records.device)
    bits = torch.int64 if records.dtype == torch.float64 else torch.int32
    places = torch.arange(records.shape[1], device=records.device) * _STEP
    for start in range(0, records.shape[0], _CHUNK):
        some = records.detach()[start : start + _CHUNK]
        words = some.view(bits).to(torch.int64) + places
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            words ^= (words >> shift) & ((1 << (64 - shift)) - 1)
            words *= factor
        words ^= (words >> 31) & ((1 << 33) - 1)
        digests[start : start + some.shape[0]] = words.sum(1)
    return digests


def _not_first(group: ResidentRows, records: Tensor) -> Iterator[Records]:
    """Rows that are not as they began."""
    first = group.keyspace.initial
    for start in range(0, records.shape[0], _CHUNK):
        rows = records[start : start + _CHUNK]
        keys = torch.arange(start, start + rows.shape[0], device="cpu")
        began = initial_records(keys, first).to(rows.dtype)
        bits = torch.int64 if rows.dtype == torch.float64 else torch.int32
        differs = rows.view(bits) != began.view(bits)
        which = differs[:, : group.layout.used].any(1).nonzero().squeeze(1)
        yield keys[which], rows[which]
