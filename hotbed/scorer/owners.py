"""Which dynamic id has which row of training, so that a checkpoint that names rows says which ids have lost theirs.

An incremental checkpoint lists the rows that were trained, with their owners, and the rows that are free by now. It does not
list an id whose row another one has got since the parent: that follows from who had the row before. Here a key is that of the
scorer, and a place is a rank and its row number. Both directions are in scratch files, 16 bytes a row, and take no memory. They
are read and written by updates alone. After an update that stopped in the middle they are of no use any more: the caller reads
the next checkpoint anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError
from hotbed.scorer.checkpoints import RANK_BITS
from hotbed.scorer.scratch import read_rows, scratch_file, write_all, write_rows

Ints = NDArray[np.int64]
_NONE = 0  # what a file has where nothing was written
_COPIED = 1 << 20  # bytes


class RowOwners:
    """The owners of the rows of all groups of dynamic ids."""

    def __init__(self, scratch: Path, starts: Ints) -> None:
        """Keys of table t begin at starts[t]."""
        self._scratch, self._starts = scratch, starts
        self._files: dict[tuple[str, int], _Numbers] = {}
        self._shared = False

    def set(self, group: str, places: Ints, keys: Ints) -> None:
        """These keys have these places, and had none before."""
        self._write_keys(group, places, keys + 1)
        self._write_places(keys, places + 1)

    def share(self, group: str, places: Ints, table: int) -> None:
        """The row of these places is what ids of a table without a row of their own read."""
        self._write_keys(group, places, np.full(places.shape[0], -1 - table, dtype=np.int64))

    def move(self, group: str, places: Ints, keys: Ints) -> tuple[NDArray[np.bool_], Ints]:
        """These keys have these places from now on: which of them did not before, and the keys that had the places."""
        had = self._read_keys(group, places)
        new = had != keys + 1
        if not new.any():
            return new, np.empty(0, dtype=np.int64)
        places, keys = places[new], keys[new]
        self._clear(group, keys)
        self.set(group, places, keys)
        return new, had[new & (had > _NONE)] - 1

    def free(self, group: str, places: Ints) -> Ints:
        """Release these places; returns the keys that had them."""
        had = self._read_keys(group, places)
        self._write_keys(group, places[had > _NONE], np.zeros(int((had > _NONE).sum()), dtype=np.int64))
        return had[had > _NONE] - 1

    def owners(self, group: str, places: Ints) -> Ints:
        """The key of each place; -1: none; -2 - table: it is the shared row of a table."""
        return self._read_keys(group, places) - 1

    def has_place(self, group: str, keys: Ints) -> NDArray[np.bool_]:
        """Whether each key has a place."""
        places = self._read_places(keys) - 1
        found = places >= 0
        found[found] = self._read_keys(group, places[found]) == keys[found] + 1
        return found

    def read_only(self) -> None:
        """Other processes will read these files: the next change goes to copies."""
        self._shared = True

    def _clear(self, group: str, keys: Ints) -> None:
        keys = keys[self.has_place(group, keys)]
        places = self._read_places(keys) - 1
        self._write_keys(group, places, np.zeros_like(keys))

    def _read_keys(self, group: str, places: Ints) -> Ints:
        found = np.empty(places.shape[0], dtype=np.int64)
        for rank in np.unique(places >> RANK_BITS):
            mine = np.flatnonzero(places >> RANK_BITS == rank)
            found[mine] = self._file(group, int(rank)).read(places[mine] & ((1 << RANK_BITS) - 1))
        return found

    def _write_keys(self, group: str, places: Ints, values: Ints) -> None:
        for rank in np.unique(places >> RANK_BITS):
            mine = np.flatnonzero(places >> RANK_BITS == rank)
            self._file(group, int(rank)).write(places[mine] & ((1 << RANK_BITS) - 1), values[mine])

    def _read_places(self, keys: Ints) -> Ints:
        found = np.empty(keys.shape[0], dtype=np.int64)
        tables = np.searchsorted(self._starts, keys, side="right") - 1
        for table in np.unique(tables):
            mine = np.flatnonzero(tables == table)
            found[mine] = self._file("", int(table)).read(keys[mine] - self._starts[table])
        return found

    def _write_places(self, keys: Ints, values: Ints) -> None:
        tables = np.searchsorted(self._starts, keys, side="right") - 1
        for table in np.unique(tables):
            mine = np.flatnonzero(tables == table)
            self._file("", int(table)).write(keys[mine] - self._starts[table], values[mine])

    def _file(self, group: str, number: int) -> _Numbers:
        if self._shared:
            self._files = {name: one.copy() for name, one in self._files.items()}
            self._shared = False
        if (group, number) not in self._files:
            self._files[group, number] = _Numbers(self._scratch)
        return self._files[group, number]


class _Numbers:
    """A file of int64 numbers, zero where none was written."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._file = scratch, scratch_file(scratch, self)
        self._handles = np.array([self._file.fileno()], dtype=np.int64)

    def read(self, at: Ints) -> Ints:
        found = np.empty((at.shape[0], 1), dtype=np.int64)
        self._check(read_rows(at, found, np.zeros_like(at), self._handles))
        return found[:, 0]

    def write(self, at: Ints, values: Ints) -> None:
        content = np.ascontiguousarray(values).reshape(-1, 1)
        self._check(write_rows(at, content, np.zeros_like(at), self._handles))

    def copy(self) -> _Numbers:
        """The same numbers in another file."""
        made, handle, size = _Numbers(self._scratch), self._file.fileno(), os.fstat(self._file.fileno()).st_size
        for start in range(0, size, _COPIED):
            write_all(made._file, os.pread(handle, _COPIED, start))
        return made

    def _check(self, error: int) -> None:
        if error:
            raise StoreError(
                f"the owners of rows cannot be read or written in {self._scratch}: {os.strerror(error)}. Free some space, "
                "or give another folder with scratch=."
            )
