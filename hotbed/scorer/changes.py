"""A newer checkpoint in, its changed rows shown at once and put into place afterwards, while scoring goes on.

    1  the rows of incremental checkpoints since the one that scores are written to a file, and an index of them is made; of a
       full checkpoint, the rows that are others than those here
    2  in one moment the index, the new dense weights and the new name are shown: every batch is scored by all or by none
    3  row by row they are put in their place; then the index is dropped

The index takes 18 to 36 bytes a row and is part of the budget. Where it would be larger, where ids are dynamic, or where rows
were lost, the caller builds the whole model anew beside the old one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np
from numpy.typing import NDArray

from hotbed.checkpoint.chain import Entry
from hotbed.checkpoint.types import RowPart
from hotbed.errors import StoreError
from hotbed.scorer import kernels, write_kernels
from hotbed.scorer.checkpoints import weights_of
from hotbed.scorer.kernels import EMPTY, Overlay
from hotbed.scorer.live import Budget, Live, Version, model_of
from hotbed.scorer.scratch import scratch_file, write_all
from hotbed.scorer.source import Source

_AT_ONCE = 1 << 14  # rows read back


class Changes:
    """Changed rows on their way: in a file, in the order they came, under an index."""

    def __init__(self, most: int, dim: int, budget: Budget) -> None:
        self._most, self._dim = most, dim
        size = 1 << max(3, (3 * most // 2 - 1).bit_length())
        self._keys, self._places = np.full(size, EMPTY, dtype=np.int64), np.zeros(size, dtype=np.int32)
        self._file: IO[bytes] = scratch_file(budget.scratch, self)
        self._written = 0
        self.num_keys = 0

    def add(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Later rows take the place of earlier ones."""
        if not len(keys):
            return
        write_all(self._file, np.ascontiguousarray(rows, dtype=np.float32).data.cast("B"))
        self.num_keys += kernels.add_changes(keys, self._written, self._keys, self._places)
        self._written += len(keys)

    @property
    def overlay(self) -> Overlay:
        """What lookups read."""
        return Overlay(self._keys, self._places, self._file.fileno(), 0)

    def items(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """(keys ascending, rows) of all, some at a time."""
        slots = np.flatnonzero(self._keys != EMPTY)
        slots = slots[np.argsort(self._keys[slots])]
        for start in range(0, len(slots), _AT_ONCE):
            some = slots[start : start + _AT_ONCE]
            rows = np.empty((len(some), self._dim), dtype=np.float32)
            fault = write_kernels.read_places(self._file.fileno(), self._places[some].astype(np.int64), rows)
            if fault:
                raise StoreError(f"changed rows cannot be read back: {os.strerror(max(fault, 0))}.")
            yield self._keys[some], rows

    def close(self) -> None:
        self._file.close()


def try_changes(live: Live, source: Source, budget: Budget) -> str | None:
    """Take a newer checkpoint over as changes, and say of which kind; None where that cannot be."""
    settle(live)
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
    version = Version(source.version, model_of(source, budget.device))
    live.pending = changes
    live.rows.show(version, changes.overlay)
    live.source = source
    settle(live)
    return how


def settle(live: Live) -> None:
    """Put changes that are shown into their place. Where the disk refuses, they stay shown, and the next call tries again."""
    changes = live.pending
    if changes is not None:
        for keys, rows in changes.items():
            live.rows.put(keys, rows)
        live.rows.hide()
        live.pending = None
        changes.close()


def _same_tables(one: Source, other: Source) -> bool:
    """Whether rows of both are rows of one process, by number, over the same initial values."""
    static = all(table.rows is not None for table in one.tables.values())
    plain = not any(entry.manifest.linked or entry.manifest.gone for entry in (*one.chain, *other.chain))
    same = one.tables == other.tables and one.model == other.model and one.columns == other.columns
    return bool(one.chain) and bool(other.chain) and static and plain and same


def _since(live: Live, entries: Sequence[Entry], budget: Budget) -> Changes | None:
    """The rows of these checkpoints."""
    most = sum(entry.manifest.num_rows for entry in entries)
    if most > live.rows.most_changes:
        return None
    changes = Changes(most, live.rows.dim, budget)
    for part in (part for entry in entries for part in weights_of(entry)):
        _add(changes, live, part)
    return changes


def _differing(live: Live, source: Source, budget: Budget) -> Changes | None:
    """The rows of a chain that are others here; None where they are too many, or where it lacks a row that is here."""
    full, *later = source.chain
    room = live.rows.most_changes - sum(entry.manifest.num_rows for entry in later)
    changes = Changes(live.rows.most_changes, live.rows.dim, budget)
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


def _add(changes: Changes, live: Live, part: RowPart) -> None:
    ids = np.ascontiguousarray(part.ids.numpy())
    changes.add(live.keys_of(part.table, ids), part.columns["weight"].float().numpy())
