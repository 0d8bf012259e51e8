"""Rows of one moment, read in another thread while training continues: a writer copies a row before it overwrites it.

Two threads share two bytes for each held row and no lock; each byte is written by one of them. The writer copies a row that is
still to be read, marks it as kept, then overwrites it. The reader copies a chunk of rows, then looks at the marks: a row
without a mark was not being overwritten while it was copied; of the others there are kept copies. The reader notes in bytes of
its own which rows it has given out. So training never waits.

The price: memory for one chunk, two bytes per row in pages where a row is held, and copies of the rows that are overwritten
during a save before they were saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import StoreError
from hotbed.host.pages import zeros
from hotbed.ops.move import gather_rows
from hotbed.ops.move.states import HELD, KEPT, marked

Keys = NDArray[np.int64]
_CHUNK = 1 << 16


class FrozenFiles(Protocol):
    """Files that hold rows of one moment and never change again."""

    def link_into(self, folder: Path) -> None:
        """Put them into a folder, on the disk."""


class Holder(Protocol):
    """Rows of one moment, for a checkpoint. `give_back` undoes it, wherever it stopped."""

    @property
    def files(self) -> Sequence[FrozenFiles]:
        """Files that have the records; none: `items` gives them."""

    @property
    def keys(self) -> Keys:
        """Keys of the rows that `items` gives, ascending."""

    def take(self, touched: bool) -> None:
        """Hold all rows ever written, or those touched since the last commit; they count as saved from now on."""

    def items(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of the rows that no file has, each once; in any thread."""

    def in_files(self, live: Callable[[], Keys]) -> Keys:
        """The keys whose records the files have, ascending, of those that `live` names."""

    def commit(self) -> None:
        """They are saved."""

    def give_back(self) -> None:
        """Release the rows; those that were not saved count as touched again."""


class HoldableStore(Protocol):
    """What this needs of a store."""

    def begin_hold(self, held: HeldRows, touched: bool) -> int:
        """Mark the rows to be held in `held.marks`, all before `held.end`, and count them as saved; their number."""

    def release(self, held: HeldRows, *, saved: bool) -> None:
        """The rows are released; if they were not saved they count as written again."""


class HeldRows:
    """The records that `take` finds, of those [R, W] of a store. `give_back` undoes it, wherever it stopped."""

    def __init__(self, store: HoldableStore, records: Tensor) -> None:
        self._store = store
        self._records = records
        self.marks: NDArray[np.uint8] = zeros((records.shape[0],), np.uint8, huge=False)
        self.end = records.shape[0]  # of the keys that may be marked; `take` lowers it where few are in use
        self._is_given = zeros((records.shape[0],), np.uint8, huge=False)
        self._kept: deque[tuple[Keys, Tensor]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def files(self) -> Sequence[FrozenFiles]:
        """No files: `items` gives the records."""
        return ()

    def in_files(self, live: Callable[[], Keys]) -> Keys:
        """No keys."""
        return np.empty(0, dtype=np.int64)

    def take(self, touched: bool) -> None:
        """Hold the rows as they are now."""
        self._count = self._store.begin_hold(self, touched)

    @property
    def keys(self) -> Keys:
        """Keys of all held rows, ascending; 8 bytes per row."""
        return np.concatenate([np.empty(0, dtype=np.int64), *marked(self.marks[: self.end], _CHUNK)])

    def keep(self, keys: Keys) -> None:
        """These rows are about to be overwritten."""
        held = keys[(self.marks[keys] == HELD) & (self._is_given[keys] == 0)]
        if held.size:
            records = torch.empty(held.size, self._records.shape[1], dtype=torch.float32, device="cpu")
            gather_rows(self._records, torch.from_numpy(held), records)
            self._kept.append((held, records))
            self.marks[held] = KEPT

    def items(self, chunk: int = _CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of all held rows, each once; in any thread, once."""
        yield from self._drain()
        for keys in marked(self.marks[: self.end], chunk):
            records = torch.empty(keys.size, self._records.shape[1], dtype=torch.float32, device="cpu")
            gather_rows(self._records, torch.from_numpy(keys), records)
            clean = self.marks[keys] == HELD
            yield from self._given(keys, records, torch.from_numpy(np.flatnonzero(clean)))
            yield from self._drain()
        yield from self._drain()

    def commit(self) -> None:
        """They are saved."""
        self._store.release(self, saved=True)

    def give_back(self) -> None:
        """They were not saved; after `commit`, nothing."""
        self._store.release(self, saved=False)

    def _drain(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The kept copies, without rows that were given out before."""
        while self._kept:
            keys, records = self._kept.popleft()
            yield from self._given(keys, records, torch.from_numpy(np.flatnonzero(self._is_given[keys] == 0)))

    def _given(self, keys: Keys, records: Tensor, which: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        numbers = torch.from_numpy(keys)[which]
        self._is_given[numbers.numpy()] = 1
        if which.shape[0]:
            yield numbers, records if which.shape[0] == keys.size else records[which]


def refuse_second() -> StoreError:
    """The error for a snapshot while another is open."""
    return StoreError(
        "a snapshot of these rows is open, and there can be one at a time. Leave it first: tables.snapshot() is a "
        "context, and a checkpoint in the background is done when Saver.settle() returns."
    )
