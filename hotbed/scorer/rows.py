"""Keys in, rows out, within a number of bytes: a cache over the files of a model, and over changes to it.

The budget counts what is held here for rows: cached rows with their keys, one bit a row that says whether it has changed,
and the index of changes on their way (`change_bytes`, at most). The model's own files are never written: changed rows go to
scratch files without a name, in which a row's place is its number; they take disk only where they were written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import BudgetError, StoreError
from hotbed.host.memory import in_words
from hotbed.host.pages import zeros
from hotbed.scorer import kernels, write_kernels
from hotbed.scorer.kernels import EMPTY, NUM_COUNTS, WAYS, Cache, Files, Overlay, Work
from hotbed.scorer.scratch import MappedFile, lengthen, map_file, scratch_file

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
_DYNAMIC_SPAN = 1 << 40  # keys that a table of dynamic ids may have
_NEVER = 1 << 62
_SLOT_BYTES = 8 + 1 + 1  # key, uses, epoch
_COMPARED_AT_ONCE = 1 << 12  # rows
_SETTLED_AT_ONCE = 1 << 10  # rows; lookups wait for some 0.1 ms at a time


NO_CHANGES = Overlay(np.empty(0, np.int64), np.empty(0, np.int32), -1, 0)


class RowFile(NamedTuple):
    """Rows as a model folder or an export has them: row n at offset + n * its size."""

    path: Path
    kind: int  # of kernels: FP32_FILE, ...
    offset: int
    rows: int
    scale_offset: int = 0

    def end(self, dim: int) -> int:
        """The byte behind its last row."""
        weight_bytes = {kernels.FP32_FILE: 4, kernels.INT8_FILE: 1}.get(self.kind, 2)
        scales = self.scale_offset + 4 * self.rows if self.kind == kernels.INT8_FILE else 0
        return max(scales, self.offset + self.rows * dim * weight_bytes)


class RowSpace(NamedTuple):
    """The rows of one table."""

    rows: int | None  # None: dynamic ids, numbered as they come
    file: RowFile | None = None


class FetchedRows(NamedTuple):
    """Of one lookup."""

    first: Ints  # positions whose rows are in no file, which the caller fills in
    state: Any  # what was said of the rows at that moment, see `show`


class RowCounts(NamedTuple):
    """Lookups since the start, by where the row was found."""

    cache: int
    files: int
    changes: int  # of those in files: in a change that was on its way
    first_values: int


class Rows:
    """Rows of T tables of one width."""

    def __init__(
        self, spaces: Sequence[RowSpace], dim: int, scratch: Path, change_bytes: int = 0, *, mapped: bool = False
    ) -> None:
        self.dim, self._scratch, self._change_bytes = dim, scratch, change_bytes
        self._spaces, self._mapped = spaces, mapped
        self._maps: list[MappedFile] = []
        self.lock = threading.Lock()
        self._no_readers = threading.Condition(self.lock)
        self._turn = 0  # goes up when changes are shown or hidden
        self._readers: dict[int, int] = {}  # turn -> lookups begun in it that read files now, without the lock
        self._handles: list[int] = []
        self._scratch_files: dict[int, IO[bytes]] = {}
        self._counts = np.zeros(NUM_COUNTS, dtype=np.int64)
        self.num_rows = None if any(one.rows is None for one in spaces) else sum(one.rows or 0 for one in spaces)
        self.files = self._open(spaces)
        self._overlay = NO_CHANGES
        self._epoch = 0
        self.state: Any = None
        self.cache = _empty_cache(1, dim)

    def make_cache(self, memory: int, times: int = 1) -> None:
        """Cache rows in what changes and marks (held so many times) leave of these bytes."""
        marks = times * self.files.marks.nbytes
        left = memory - marks - self._change_bytes
        set_bytes = WAYS * (4 * self.dim + _SLOT_BYTES)
        if left < set_bytes:
            raise BudgetError(
                f"memory leaves {in_words(max(0, memory))} for rows, and that is too little: "
                f"{in_words(marks)} say which rows have changed, {in_words(self._change_bytes)} are kept "
                f"for changes, and the smallest cache takes {in_words(set_bytes)}. Give more memory=."
            )
        num_sets = left // set_bytes
        if self.num_rows is not None:
            num_sets = min(num_sets, max(1, self.num_rows // 4))  # twice as many slots as rows: more are never used
        self.cache = _empty_cache(num_sets, self.dim)

    def start_of(self, table: int) -> int:
        """The key of its first row."""
        return int(self.files.starts[table])

    def fetch(self, keys: Ints, out: Floats) -> FetchedRows:
        """out[i] = the row of keys[i], zero for -1: all as of one moment, whatever is shown while files are read."""
        work = _work_of(keys.shape[0], self.dim)
        with self.lock:
            found = kernels.find(keys, out, self.cache, self._overlay, work)
            state, overlay, turn = self.state, self._overlay, self._turn
            if not found[0]:
                self._count(work, found[1])
                return FetchedRows(work.first[: found[1]], state)
            self._readers[turn] = self._readers.get(turn, 0) + 1
        try:
            seen = np.full(1 << (2 * found[0] - 1).bit_length(), -1, np.int64)
            num_first = kernels.read_missing(keys, out, self.files, overlay, work, found, seen)
            _raise_fault(work)
            with self.lock:
                kernels.keep(keys, out, self.cache, overlay.epoch, work, found[0])
                self._count(work, num_first)
        finally:
            with self.lock:
                self._readers[turn] -= 1
                if not self._readers[turn]:
                    del self._readers[turn]
                    self._no_readers.notify_all()
        return FetchedRows(work.first[:num_first], state)

    def put(self, keys: Ints, rows: Floats) -> None:
        """Write rows to their place; whoever looks meanwhile must see them as changes already, or not care.

        Lookups wait for marks alone, not for the disk: a change that is shown is read from its own file until it is marked.
        """
        self._make_scratch(keys)
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        for start in range(0, keys.shape[0], _SETTLED_AT_ONCE):
            some, new = keys[start : start + _SETTLED_AT_ONCE], rows[start : start + _SETTLED_AT_ONCE]
            error = write_kernels.write_rows(some, new, self.files)
            if error:
                raise StoreError(
                    f"changed rows cannot be written to {self._scratch}: {os.strerror(error)}. Free some space, or give "
                    "another folder with scratch=."
                )
            with self.lock:
                write_kernels.settle(some, new, self.cache, self.files, self._epoch)

    def show(self, state: Any, overlay: Overlay | None = None) -> None:
        """From now on every lookup has this state, and sees these changes; those of before must be in their place.

        Lookups of before are over when this returns: rows may be put in their place.
        """
        with self.lock:
            self.state = state
            if overlay is None:
                return
            assert not self._overlay.keys.size, "changes come before others are in their place"
            self._epoch = self._epoch % 255 + 1
            if self._epoch == 1:
                self.cache.epochs.fill(0)
            self._overlay = overlay._replace(epoch=self._epoch)
            self._await_readers()

    def hide(self) -> None:
        """The changes are all in their place, and nobody reads the file they came in when this returns."""
        with self.lock:
            self._overlay = NO_CHANGES._replace(epoch=self._epoch)
            self._await_readers()

    def is_marked(self, table: int, rows: Ints) -> NDArray[np.bool_]:
        """Whether rows of a table with row numbers were changed."""
        bits = self.files.mark_starts[table] + rows
        marked: NDArray[np.bool_] = (self.files.marks[bits >> 3] >> (bits & 7).astype(np.uint8)) & 1 == 1
        return marked

    def num_marked(self, table: int, rows: int) -> int:
        """How many of them."""
        first = int(self.files.mark_starts[table]) >> 3
        return int(np.unpackbits(self.files.marks[first : first + -(-rows // 8)]).sum())

    def differs(self, keys: Ints, rows: Floats) -> NDArray[np.bool_]:
        """Whether rows are others than the changed ones here, or were not changed here."""
        out = np.empty(keys.shape[0], dtype=np.bool_)
        words = np.ascontiguousarray(rows).view(np.uint32)
        held = np.empty((min(len(words), _COMPARED_AT_ONCE) or 1, self.dim), dtype=np.uint32)
        fault = write_kernels.compare(keys, words, self.files, held, out)
        if fault:
            raise StoreError(f"rows in {self._scratch} cannot be read back: {os.strerror(max(fault, 0))}.")
        return out

    def counts(self) -> RowCounts:
        """Since the start."""
        one = self._counts
        return RowCounts(*(int(one[n]) for n in (kernels.HITS, kernels.READ, kernels.CHANGED, kernels.FIRST)))

    @property
    def num_bytes(self) -> int:
        """What is held for rows now."""
        held: list[NDArray[Any]] = [*self.cache, self.files.marks, self._overlay.keys, self._overlay.places]
        return sum(one.nbytes for one in held)

    @property
    def most_changes(self) -> int:
        """How many changed rows can be on their way at once."""
        slots = self._change_bytes // 12
        return (1 << max(0, slots.bit_length() - 1)) * 2 // 3 if slots else 0

    def take_cache(self, other: Rows) -> None:
        """Have the memory of another's cache, empty; the other one goes on with hardly any."""
        with other.lock:
            cache, other.cache = other.cache, _empty_cache(1, self.dim)
        cache.keys.fill(EMPTY)
        cache.uses.fill(0)
        cache.epochs.fill(0)
        with self.lock:
            self.cache = cache

    def close(self) -> None:
        """Give the files back."""
        with self.lock:
            self._await_readers()
            self.files.maps.fill(0)
            for one in self._maps:
                one.close()
            for handle in self._handles:
                os.close(handle)
            for file in self._scratch_files.values():
                file.close()
            self._handles, self._scratch_files, self._maps = [], {}, []

    def _await_readers(self) -> None:
        """Until the lookups that have begun are over; the lock is held, but for the waiting."""
        self._turn += 1
        turn = self._turn
        self._no_readers.wait_for(lambda: all(one >= turn for one in self._readers))

    def _count(self, work: Work, num_first: int) -> None:
        self._counts += work.counts
        self._counts[kernels.FIRST] += num_first

    def _open(self, spaces: Sequence[RowSpace]) -> Files:
        count = len(spaces)
        starts, marks = np.zeros(count + 1, np.int64), np.zeros(count, np.int64)
        models, sure = np.zeros((count, 5), np.int64), np.full(count, _NEVER, np.int64)
        maps = np.zeros((count, 2), np.int64)
        num_marks = 0
        opened: dict[Path, int] = {}
        for t, (rows, file) in enumerate(spaces):
            starts[t + 1] = starts[t] + (_DYNAMIC_SPAN if rows is None else rows)
            marks[t] = num_marks
            in_file = file.rows if file else 0
            num_marks += -(-(in_file if rows is None else rows) // 8) * 8  # whole bytes: `num_marked` counts them
            if rows is None:
                sure[t] = in_file
            if file is not None:
                if file.path not in opened:
                    opened[file.path] = self._open_file(file.path)
                models[t] = opened[file.path], file.kind, file.offset, file.scale_offset, in_file
                maps[t, 0] = self._map(opened[file.path], file.end(self.dim))
        bits = np.zeros(num_marks // 8 + 1, np.uint8)
        return Files(starts, models, np.full(count, -1, np.int64), marks, sure, maps, bits)

    def _map(self, handle: int, needed: int) -> int:
        """The address of a file that has so many bytes; 0 where it is to be read."""
        made = map_file(handle, needed) if self._mapped else None
        if made is None:
            return 0
        self._maps.append(made)
        return made.address

    def _open_file(self, path: Path) -> int:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror or error}.") from error
        self._handles.append(handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        return handle

    def _make_scratch(self, keys: Ints) -> None:
        """A file for every table that has none yet and is to be written."""
        for t in np.unique(np.searchsorted(self.files.starts, keys, side="right") - 1):
            if int(t) not in self._scratch_files:
                file, rows = scratch_file(self._scratch, self), self._spaces[t].rows
                if self._mapped and rows is not None:  # of dynamic ids nobody knows how many will come
                    self.files.maps[t, 1] = self._map(lengthen(file, 4 * self.dim * rows), 4 * self.dim * rows)
                with self.lock:
                    self._scratch_files[int(t)] = file
                    self.files.scratch[t] = file.fileno()


def _raise_fault(work: Work) -> None:
    fault, key = (int(work.counts[n]) for n in (kernels.FAULT, kernels.FAULT_KEY))
    if fault:
        reason = "the file ends before it" if fault < 0 else os.strerror(fault - 1000)
        raise StoreError(
            f"the row of key {key} cannot be read: {reason}. The files of the model were changed or the disk failed; "
            "load the model again."
        )


def _work_of(size: int, dim: int) -> Work:
    return Work(
        np.empty(2, np.int64),
        np.empty(4 * dim + 8, np.uint8),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.uint8),
        np.zeros(NUM_COUNTS, np.int64),
    )


def _empty_cache(num_sets: int, dim: int) -> Cache:
    return Cache(
        np.full((num_sets, WAYS), EMPTY, dtype=np.int64),
        np.zeros((num_sets, WAYS), dtype=np.uint8),
        np.zeros((num_sets, WAYS), dtype=np.uint8),
        zeros((num_sets * WAYS, dim), np.float32),
    )
