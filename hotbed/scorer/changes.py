"""A newer checkpoint in; its changed rows are visible at once and are moved into place later, while scoring continues.

    1  the changed rows are written to a file with an index: those of the incremental checkpoints since the current version, or
       the rows of a full checkpoint that differ from the current ones
    2  index, dense weights and version are published in one step: every batch sees all of the change or none of it
    3  the rows are copied into place one by one; then the index is dropped

The index takes 18 to 36 bytes a row and is part of the budget. If it would be larger, if ids are dynamic, or if rows were
lost, the caller builds the whole new model next to the old one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np
from numpy.typing import NDArray

from hotbed.checkpoint.chain import Entry
from hotbed.errors import StoreError
from hotbed.scorer import kernels
from hotbed.scorer.checkpoints import weights_of
from hotbed.scorer.kernels import EMPTY, Overlay
from hotbed.scorer.live import Budget, LiveModel, Version, build_dense
from hotbed.scorer.scratch import read_places, scratch_file, write_all
from hotbed.scorer.source import ModelSource
from hotbed.types import RowPart

_AT_ONCE = 1 << 14  # rows read back


class RowChanges:
    """Changed rows that are not in place yet: in a file, in order of arrival, with an index."""

    def __init__(self, most: int, dim: int, budget: Budget) -> None:
        self._most, self._dim = most, dim
        size = 1 << max(3, (3 * most // 2 - 1).bit_length())
        self._keys, self._places = np.full(size, EMPTY, dtype=np.int64), np.zeros(size, dtype=np.int32)
        self._file: IO[bytes] = scratch_file(budget.scratch, self)
        self._written = 0
        self.num_keys = 0

    def add(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Add rows; a later row of a key replaces an earlier one."""
        if not len(keys):
            return
        write_all(self._file, np.ascontiguousarray(rows, dtype=np.float32).data.cast("B"))
        self.num_keys += kernels.add_changes(keys, self._written, self._keys, self._places)
        self._written += len(keys)

    @property
    def overlay(self) -> Overlay:
        """The index that lookups use."""
        return Overlay(self._keys, self._places, self._file.fileno(), 0)

    def items(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """All (keys, rows), keys ascending, in pieces."""
        slots = np.flatnonzero(self._keys != EMPTY)
        slots = slots[np.argsort(self._keys[slots])]
        for start in range(0, len(slots), _AT_ONCE):
            some = slots[start : start + _AT_ONCE]
            rows = np.empty((len(some), self._dim), dtype=np.float32)
            fault = read_places(self._file.fileno(), self._places[some].astype(np.int64), rows)
            if fault:
                raise StoreError(f"changed rows cannot be read back: {os.strerror(max(fault, 0))}.")
            yield self._keys[some], rows

    def close(self) -> None:
        self._file.close()


def try_changes(live: LiveModel, source: ModelSource, budget: Budget) -> str | None:
    """Switch to a newer checkpoint by its changed rows: "same", "incremental" or "full"; None if that is impossible."""
    apply_changes(live)
    if not budget.change_bytes or not _same_tables(live.source, source):
        return None
    here = [one.manifest.crc32 for one in live.source.chain]
    there = [one.manifest.crc32 for one in source.chain]
    if here[-1] == there[-1]:
        return "same"
    if here[-1] in there:
        since = source.chain[there.index(here[-1]) + 1 :]
        changes = _since(live, since, budget)
        how = "incremental"
    else:
        changes = _differing(live, source, budget)
        how = "full"
    if changes is None:
        return None
    version = Version(source.version, build_dense(source, budget.device))
    live.pending = changes
    live.rows.publish(version, changes.overlay)
    live.source = source
    apply_changes(live)
    return how


def apply_changes(live: LiveModel) -> None:
    """Move published changes into place. If the disk refuses, they stay in their file, and the next call tries again."""
    changes = live.pending
    if changes is not None:
        for keys, rows in changes.items():
            live.rows.put(keys, rows)
        live.rows.retire_changes()
        live.pending = None
        changes.close()


def _same_tables(one: ModelSource, other: ModelSource) -> bool:
    """Whether both have the same tables, of the same dataset, written by one process, with row numbers and initial values.

    A run that was trained again on new data has equal tables too, but its ids and numbers are encoded differently.
    """
    static = all(table.rows is not None for table in one.tables.values())
    plain = not any(entry.manifest.linked or entry.manifest.gone for entry in (*one.chain, *other.chain))
    same = one.tables == other.tables and one.model == other.model and one.columns == other.columns
    return bool(one.chain) and bool(other.chain) and static and plain and same and _same_data(one, other)


def _same_data(*sources: ModelSource) -> bool:
    """Whether the checkpoints were trained on one dataset, by its fingerprint."""
    one, other = (source.chain[-1].manifest.document.get("progress", {}).get("data", "") for source in sources)
    return bool(one) and bool(one == other)


def _since(live: LiveModel, entries: Sequence[Entry], budget: Budget) -> RowChanges | None:
    """The rows of these checkpoints."""
    most = sum(entry.manifest.num_rows for entry in entries)
    if most > live.rows.most_changes:
        return None
    changes = RowChanges(most, live.rows.dim, budget)
    for part in (part for entry in entries for part in weights_of(entry)):
        _add(changes, live, part)
    return changes


def _differing(live: LiveModel, source: ModelSource, budget: Budget) -> RowChanges | None:
    """The rows of a chain that differ from the current ones; None if there are too many, or if a current row is missing."""
    full, *later = source.chain
    room = live.rows.most_changes - sum(entry.manifest.num_rows for entry in later)
    changes = RowChanges(live.rows.most_changes, live.rows.dim, budget)
    numbers = {name: number for number, name in enumerate(source.tables)}
    here = {name: live.rows.num_marked(numbers[name], one.rows or 0) for name, one in source.tables.items()}
    for part in weights_of(full):
        ids, rows = part.ids.numpy(), part.columns["weight"].float().numpy()
        keys = live.keys_of(part.table, ids)
        here[part.table] -= int(live.rows.is_marked(numbers[part.table], ids).sum())
        other = live.rows.differs(keys, rows)
        if changes.num_keys + int(other.sum()) > room:
            return None
        changes.add(keys[other], rows[other])
    if any(here.values()):
        return None
    for part in (part for entry in later for part in weights_of(entry)):
        _add(changes, live, part)
    return changes


def _add(changes: RowChanges, live: LiveModel, part: RowPart) -> None:
    ids = np.ascontiguousarray(part.ids.numpy())
    changes.add(live.keys_of(part.table, ids), part.columns["weight"].float().numpy())
