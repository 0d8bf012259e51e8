"""Rows of one moment, read in another thread while training goes on: whoever is about to overwrite one keeps a copy first.

Two threads share two bytes for each row that is held, each of them written by one thread, and no lock. The one that writes
copies a row that is still to be read, then says so, then overwrites it. The one that reads copies a chunk of rows, then looks
at the bytes: a row whose byte says nothing was not being overwritten when it was copied; the others have been kept. What it
has given it notes in bytes of its own. So training waits for nobody, and memory grows by the rows that are overwritten during
a save and were not saved yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.ops.move import gather_rows
from hotbed.pages import zeros

Keys = NDArray[np.int64]
_CHUNK = 1 << 16
_HELD, _KEPT = 1, 2


class Holding(Protocol):
    """A store, as far as this needs it."""

    def let_go(self, unsaved: Keys) -> None:
        """What was held is no longer, and these rows are not saved."""


class HeldRows:
    """Of the records [R, W] those of `keys`; copied `at_once`, or as they are read."""

    def __init__(self, store: Holding, records: Tensor, keys: Keys, at_once: bool = False) -> None:
        self._store: Holding | None = store
        self._records = records
        self._keys = keys
        self._byte = zeros((records.shape[0],), np.uint8, huge=False)
        self._byte[keys] = _HELD
        self._is_given = zeros((records.shape[0],), np.uint8, huge=False)
        self._kept: deque[tuple[Keys, Tensor]] = deque()
        if at_once:
            self.keep(keys)

    def __len__(self) -> int:
        return int(self._keys.size)

    @property
    def keys(self) -> Keys:
        """Of all held rows, ascending."""
        return self._keys

    def keep(self, keys: Keys) -> None:
        """These rows are about to be overwritten."""
        held = keys[(self._byte[keys] == _HELD) & (self._is_given[keys] == 0)]
        if held.size:
            records = torch.empty(held.size, self._records.shape[1], dtype=torch.float32, device="cpu")
            gather_rows(self._records, torch.from_numpy(held), records)
            self._kept.append((held, records))
            self._byte[held] = _KEPT

    def items(self, chunk: int = _CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
        """(keys, records) of all held rows, each once; in any thread, once."""
        yield from self._drain()
        for start in range(0, self._keys.size, chunk):
            keys = self._keys[start : start + chunk]
            records = torch.empty(keys.size, self._records.shape[1], dtype=torch.float32, device="cpu")
            gather_rows(self._records, torch.from_numpy(keys), records)
            clean = self._byte[keys] == _HELD
            yield from self._given(keys, records, torch.from_numpy(np.flatnonzero(clean)))
            yield from self._drain()
        yield from self._drain()

    def commit(self) -> None:
        """They are saved."""
        self._end(self._keys[:0])

    def give_back(self) -> None:
        """They were not saved."""
        self._end(self._keys)

    def _end(self, unsaved: Keys) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.let_go(unsaved)

    def _drain(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What was kept, but for rows that were copied in time all the same."""
        while self._kept:
            keys, records = self._kept.popleft()
            yield from self._given(keys, records, torch.from_numpy(np.flatnonzero(self._is_given[keys] == 0)))

    def _given(self, keys: Keys, records: Tensor, which: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        numbers = torch.from_numpy(keys)[which]
        self._is_given[numbers.numpy()] = 1
        if which.shape[0]:
            yield numbers, records if which.shape[0] == keys.size else records[which]
