"""Host memory under a preset vocabulary: an array of records, one per key, untouched until it is used.

Opening it costs nothing, whatever its size: pages are allocated when rows are written. A row that was never written reads as
its initial value, which `first` computes from (seed, table, id). A caller that can compute it elsewhere uses `fetch`, which
reads written rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.host.pages import make_pages, zeros
from hotbed.ops.move import gather_rows, scatter_rows
from hotbed.ops.move.states import ABSENT, EXPECTED, SAVED, WRITTEN, hold, join, mark, marked, sort_out, words_of
from hotbed.store.counts import TierContents, Tiers
from hotbed.store.held import HeldRows, refuse_second
from hotbed.store.ssd import frozen_items

_CHUNK = 1 << 16


class MemoryStore:
    """Records [R, W] of all keys 0..R-1 on the host."""

    def __init__(self, num_rows: int, width: int, first: Callable[[Tensor], Tensor], *, grows: bool = False) -> None:
        self._records = torch.from_numpy(zeros((num_rows, width), np.float32))
        self._state = zeros((num_rows,), np.uint8, huge=False)  # see ops/move/states.py
        self._first = first
        self._grows = grows  # keys are used from 0 on, and few of them
        self._end = 0 if grows else num_rows  # of the keys that may be in use
        self._held: HeldRows | None = None
        self._unsaved: NDArray[np.uint8] | None = None  # marks of rows that were held and not saved

    def read(self, keys: Tensor, out: Tensor) -> None:
        """The records of `keys` [U] into `out` [U, W], on the host."""
        gather_rows(self._records, keys, out)
        absent = torch.from_numpy(self._state[keys.numpy()] == ABSENT)
        if bool(absent.any()):
            out[absent] = self._first(keys[absent])

    def expect(self, keys: Tensor) -> None:
        """These rows are on their way here: a reader that wants one before it is written must wait."""
        self._reach(keys)
        mark(self._state, keys.numpy(), EXPECTED)

    def fetch(self, keys: Tensor, out: Tensor, source: Tensor) -> tuple[int, Tensor]:
        """Pack the rows that were ever written into `out` [>= U, W]: (their number, positions of late ones).

        source int32 [U]: the place of each key's row in `out`, or -1 for a row that still has its initial value. Late rows
        are those that are expected; they have no place yet.
        """
        found, late = np.empty(keys.shape[0], dtype=np.int64), np.empty(keys.shape[0], dtype=np.int64)
        num_found, num_late = sort_out(self._state, keys.numpy(), source.numpy(), found, late)
        gather_rows(self._records, torch.from_numpy(found[:num_found]), out[:num_found])
        return num_found, torch.from_numpy(late[:num_late])

    def write(self, keys: Tensor, records: Tensor) -> None:
        """Keep the records [U, W] of `keys` [U], distinct, on the host."""
        self.keep(keys)
        self._reach(keys)
        scatter_rows(self._records, keys, records)
        mark(self._state, keys.numpy(), WRITTEN)

    def make_pages(self) -> None:
        """Have the memory of all rows now, which rows on the device have from the start."""
        make_pages(self._records.numpy())

    @property
    def is_held(self) -> bool:
        """Whether a snapshot is open."""
        return self._held is not None

    def keep(self, keys: Tensor) -> None:
        """These rows are about to be overwritten, here or by a caller that moves rows itself (`parts`)."""
        held = self._held  # once: another thread may let it go
        if held is not None:
            held.keep(keys.numpy())

    def forget(self, keys: Tensor) -> None:
        """These rows are gone: they read as their initial values again. Their records stay until others are written."""
        mark(self._state, keys.numpy(), ABSENT)

    def holder(self) -> HeldRows:
        """Holds rows once its `take` is called. It is made first, so that `give_back` can be called whatever happens."""
        return HeldRows(self, self._records)

    def adopt(self, folder: Path) -> None:
        """Write the rows of a checkpoint's folder; a key that is outside has no id here."""
        for keys, records in frozen_items(folder):
            inside = keys < self._records.shape[0]
            self.write(keys[inside], records[inside])

    def tiers(self, num_keys: int) -> Tiers | None:
        """No ssd."""
        return None

    def contents(self) -> TierContents | None:
        """No tier."""
        return None

    def restore_contents(self, held: TierContents) -> bool | None:
        """No tier."""
        return None

    def hold(self, *, touched: bool, at_once: bool = False) -> HeldRows:
        """The rows as they are now, all or those written since the last time, while writing continues: see HeldRows.

        They count as saved from now on, until `HeldRows.give_back`. Nothing may be expected. A caller that moves rows itself
        calls `keep` first. `at_once` asked for a copy of all rows in 0.1, and has no effect.
        """
        held = self.holder()
        try:
            held.take(touched)
        except BaseException:
            held.give_back()
            raise
        return held

    def begin_hold(self, held: HeldRows, touched: bool) -> int:
        """For HeldRows."""
        if self._held is not None:
            raise refuse_second()
        self._held, held.end = held, self._end
        state = self._state[: self._end]
        unsaved = np.empty(0, np.uint8) if self._unsaved is None else self._unsaved
        count = hold(state, words_of(state), touched, unsaved, held.marks)
        assert count >= 0, "rows are on their way"
        self._unsaved = None
        return int(count)

    def release(self, held: HeldRows, *, saved: bool) -> None:
        """The rows are released; if they were not saved they count as written again. In any thread."""
        if self._held is held:
            if not saved:
                if self._unsaved is not None:  # it stopped before these marks were merged
                    unsaved = self._unsaved[: self._end]
                    join(unsaved, words_of(unsaved), held.marks)
                self._unsaved = held.marks
            self._held = None

    def clear(self) -> None:
        """Every row reads as its initial value."""
        for used in marked(self._state[: self._end], _CHUNK):
            mark(self._state, used, ABSENT)

    def count_as_saved(self) -> None:
        """All rows are as a checkpoint has them; none is changed since."""
        for used in marked(self._state[: self._end], _CHUNK):
            mark(self._state, used, SAVED)
        self._unsaved = None

    def flush(self) -> None:
        """There is nothing below."""

    def close(self) -> None:
        """Memory is freed with the store."""

    @property
    def array(self) -> MemoryStore:
        """Every row has its place."""
        return self

    @property
    def tiered(self) -> None:
        """No tier."""

    def parts(self) -> tuple[Tensor, NDArray[np.uint8]]:
        """(records [R, W], state [R]) for a caller that moves rows itself."""
        return self._records, self._state

    def keys(self) -> Iterator[NDArray[np.int64]]:
        """The keys of every row ever written, ascending."""
        return marked(self._state[: self._end], _CHUNK)

    def items(self, chunk: int = _CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of every row ever written, in key order."""
        for written in marked(self._state[: self._end], chunk):
            keys = torch.from_numpy(written)
            yield keys, self._records[keys]

    @property
    def num_written(self) -> int:
        return int(np.count_nonzero(self._state[: self._end]))

    @property
    def num_bytes(self) -> int:
        """Address space; pages become memory when they are written."""
        return self._records.nbytes + self._state.nbytes

    def reach(self, end: int) -> None:
        """Who moves rows without asking may write keys below `end` from now on."""
        if self._grows:
            self._end = max(self._end, end)

    def _reach(self, keys: Tensor) -> None:
        if self._grows and keys.shape[0]:
            self.reach(int(keys.max()) + 1)
