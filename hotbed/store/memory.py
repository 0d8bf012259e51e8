"""Host memory under a preset vocabulary: an array of records, one per key, untouched until it is used.

Opening it costs nothing, whatever its size: pages come when rows are written. A row that was never written reads as its
first value, which `first` computes from (seed, table, id); who can compute it elsewhere asks `fetch` for the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import StoreError
from hotbed.ops.move import gather_rows, scatter_rows
from hotbed.ops.move.states import ABSENT, EXPECTED, SAVED, WRITTEN, mark, sort_out
from hotbed.ops.records import Layout
from hotbed.pages import zeros
from hotbed.store.held import HeldRows

_CHUNK = 1 << 16


class MemoryStore:
    """Records [R, W] of all keys 0..R-1 on the host."""

    def __init__(
        self, num_rows: int, layout: Layout, first: Callable[[Tensor], Tensor], *, grows: bool = False
    ) -> None:
        self._records = torch.from_numpy(zeros((num_rows, layout.width), np.float32))
        self._state = zeros((num_rows,), np.uint8, huge=False)  # see ops/move/states.py
        self._first = first
        self._grows = grows  # keys are used from 0 on, and few of them
        self._end = 0 if grows else num_rows  # of the keys that may be in use
        self._held: HeldRows | None = None
        self._unsaved: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # rows that were held in vain

    def read(self, keys: Tensor, out: Tensor) -> None:
        """The records of `keys` [U] into `out` [U, W], on the host."""
        gather_rows(self._records, keys, out)
        absent = torch.from_numpy(self._state[keys.numpy()] == ABSENT)
        if bool(absent.any()):
            out[absent] = self._first(keys[absent])

    def expect(self, keys: Tensor) -> None:
        """These rows are on their way here: who wants one before it was written must wait."""
        self._reach(keys)
        mark(self._state, keys.numpy(), EXPECTED)

    def fetch(self, keys: Tensor, out: Tensor, source: Tensor) -> tuple[int, Tensor]:
        """The rows that were ever written, close together, into `out` [>= U, W]: (their number, positions of late ones).

        source int32 [U]: the place of each key's row in `out`, or -1 for one that still has its first value. Late rows are
        those that are expected; they have no place yet.
        """
        found, late = np.empty(keys.shape[0], dtype=np.int64), np.empty(keys.shape[0], dtype=np.int64)
        num_found, num_late = sort_out(self._state, keys.numpy(), source.numpy(), found, late)
        gather_rows(self._records, torch.from_numpy(found[:num_found]), out[:num_found])
        return num_found, torch.from_numpy(late[:num_late])

    def write(self, keys: Tensor, records: Tensor) -> None:
        """Keep the records [U, W] of `keys` [U], distinct, on the host."""
        held = self._held  # once: another thread may let it go
        if held is not None:
            held.keep(keys.numpy())
        self._reach(keys)
        scatter_rows(self._records, keys, records)
        mark(self._state, keys.numpy(), WRITTEN)

    def forget(self, keys: Tensor) -> None:
        """These rows are gone: they read as their first values again."""
        held = self._held
        if held is not None:
            held.keep(keys.numpy())
        mark(self._state, keys.numpy(), ABSENT)

    def hold(self, *, touched: bool, at_once: bool = False) -> HeldRows:
        """The rows as they are now, all or those written since the last time, while writing goes on: see HeldRows.

        They count as saved from now on; `HeldRows.give_back` takes that back. Nothing may be expected. `at_once` copies them
        now, for those who move rows without asking (`parts`).
        """
        if self._held is not None:
            raise StoreError(
                "a snapshot of these rows is open, and there can be one at a time. Leave it first: tables.snapshot() is a "
                "context, and a checkpoint in the background is done when Saver.settle() returns."
            )
        state, unsaved = self._state[: self._end], self._unsaved
        keys = np.flatnonzero(state == WRITTEN if touched else state != ABSENT)
        assert not np.any(state[keys] == EXPECTED), "rows are on their way"
        if touched and unsaved.size:
            keys = np.union1d(keys, unsaved[(state[unsaved] & 1) != 0])
        held = HeldRows(self, self._records, keys, at_once)  # may find no memory: nothing counts as saved before
        self._unsaved = unsaved[:0]
        mark(state, keys, SAVED)
        self._held = None if at_once else held
        return held

    def let_go(self, unsaved: NDArray[np.int64]) -> None:
        """What was held is no longer; these rows count as written after all. In any thread."""
        self._held, self._unsaved = None, np.union1d(self._unsaved, unsaved)

    def clear(self) -> None:
        """Every row reads as its first value."""
        used = torch.from_numpy(np.flatnonzero(self._state[: self._end]))
        self.forget(used)

    def count_as_saved(self) -> None:
        """All rows are as a checkpoint has them."""
        mark(self._state, np.flatnonzero(self._state[: self._end] == WRITTEN), SAVED)
        self._unsaved = self._unsaved[:0]

    def flush(self) -> None:
        """There is nothing below."""

    def close(self) -> None:
        """Memory goes when nobody has the store any more."""

    def parts(self) -> tuple[Tensor, NDArray[np.uint8]]:
        """(records [R, W], state [R]) for who moves rows without asking."""
        return self._records, self._state

    def write_first_values(self) -> None:
        """Write every row that was never written: what a run that has seen all its ids looks like."""
        for start in range(0, self._records.shape[0], _CHUNK):
            keys = torch.from_numpy(np.flatnonzero(self._state[start : start + _CHUNK] == ABSENT) + start)
            self.write(keys, self._first(keys))

    def items(self, chunk: int = _CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of every row ever written, in key order."""
        written = torch.from_numpy(np.flatnonzero(self._state[: self._end] != ABSENT))
        for start in range(0, written.shape[0], chunk):
            keys = written[start : start + chunk]
            yield keys, self._records[keys]

    @property
    def num_written(self) -> int:
        return int(np.count_nonzero(self._state[: self._end]))

    @property
    def num_bytes(self) -> int:
        """Address space; pages become memory when they are written."""
        return self._records.nbytes + self._state.nbytes

    def _reach(self, keys: Tensor) -> None:
        if self._grows and keys.shape[0]:
            self._end = max(self._end, int(keys.max()) + 1)
