"""Keys in, rows out, within a memory budget: a cache over the files of a model and over changes to it.

The budget covers cached rows with their keys, one bit per row for whether it has changed, and the index of pending changes (at
most `change_bytes`). The model's own files are never written: changed rows go to unnamed scratch files, at the position of
their row number. These files are sparse and take disk space only where they were written.

Processes that are forked from one that called `share` read its scratch files and never write them: each puts the rows that
change from then on into scratch files of its own.
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
from hotbed.scorer import kernels
from hotbed.scorer.kernels import EMPTY, NUM_COUNTS, WAYS, FetchBuffers, Overlay, RowCache, RowFiles
from hotbed.scorer.scratch import MappedFile, compare, lengthen, map_file, mark_written, scratch_file, write_rows

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
_DYNAMIC_SPAN = 1 << 40  # keys that a table of dynamic ids may have
_NEVER = 1 << 62
_SLOT_BYTES = 8 + 1 + 1  # key, uses, epoch
_COMPARED_AT_ONCE = 1 << 12  # rows
_SETTLED_AT_ONCE = 1 << 10  # rows; lookups wait for some 0.1 ms at a time


NO_CHANGES = Overlay(np.empty(0, np.int64), np.empty(0, np.int32), -1, 0)


class ModelRowFile(NamedTuple):
    """Rows as a model folder or an export has them: row n at offset + n * its size."""

    path: Path
    kind: int  # of kernels: FP32_FILE, ...
    offset: int
    rows: int
    scale_offset: int = 0

    def end(self, dim: int) -> int:
        """The offset after its last row."""
        weight_bytes = {kernels.FP32_FILE: 4, kernels.INT8_FILE: 1}.get(self.kind, 2)
        scales = self.scale_offset + 4 * self.rows if self.kind == kernels.INT8_FILE else 0
        return max(scales, self.offset + self.rows * dim * weight_bytes)


class RowSpace(NamedTuple):
    """The rows of one table."""

    rows: int | None  # None: dynamic ids, numbered as they come
    file: ModelRowFile | None = None


class FetchedRows(NamedTuple):
    """The result of one lookup."""

    first: Ints  # positions whose rows are in no file, which the caller fills in
    state: Any  # the state that was current, see `publish`


class RowCounts(NamedTuple):
    """Lookups since the start, by the place where the row was found."""

    cache: int
    files: int
    changes: int  # of those in files: in a pending change
    first_values: int


class FileRows:
    """Rows of T tables of one width."""

    def __init__(
        self, spaces: Sequence[RowSpace], dim: int, scratch: Path, change_bytes: int = 0, *, mapped: bool = False
    ) -> None:
        self.dim, self._scratch, self._change_bytes = dim, scratch, change_bytes
        self._spaces, self._mapped = spaces, mapped
        self._maps: list[MappedFile] = []
        self.lock = threading.Lock()
        self._no_readers = threading.Condition(self.lock)
        self._generation = 0  # incremented when changes are published or retired
        self._readers: dict[
            int, int
        ] = {}  # generation -> lookups started in it that are reading files, without the lock
        self._handles: list[int] = []
        self._scratch_files: dict[int, IO[bytes]] = {}
        self._shared_files: list[IO[bytes]] = []
        self._counts = np.zeros(NUM_COUNTS, dtype=np.int64)
        self.num_rows = None if any(one.rows is None for one in spaces) else sum(one.rows or 0 for one in spaces)
        self.files = self._open(spaces)
        self._overlay = NO_CHANGES
        self._epoch = 0
        self.state: Any = None
        self.cache = _empty_cache(1, dim)

    def make_cache(self, memory: int, times: int = 1, before: FileRows | None = None) -> None:
        """Make a cache of the bytes that pending changes and marks (held `times` times) leave of `memory`.

        The cache of `before` is given up: its memory is reused if it has the same shape, else freed first.
        """
        num_sets = self._num_sets(memory, times)
        cache = None if before is None else before._give_cache()
        if cache is not None and (len(cache.keys), cache.rows.shape[1]) == (num_sets, self.dim):
            cache.keys.fill(EMPTY)
            cache.uses.fill(0)
            cache.epochs.fill(0)
        else:
            del cache
            cache = _empty_cache(num_sets, self.dim)
        with self.lock:
            self.cache = cache

    def _num_sets(self, memory: int, times: int) -> int:
        """Sets of a cache within `memory`; a BudgetError if there is no room for one."""
        marks = times * self.files.marks.nbytes
        left = memory - marks - self._change_bytes
        set_bytes = WAYS * (4 * self.dim + _SLOT_BYTES)
        if left < set_bytes:
            raise BudgetError(
                f"memory leaves {in_words(max(0, memory))} for rows, which is too little: marks of changed rows take "
                f"{in_words(marks)}, pending changes {in_words(self._change_bytes)}, and the smallest cache "
                f"{in_words(set_bytes)}. Give more memory=."
            )
        num_sets = left // set_bytes
        if self.num_rows is not None:
            num_sets = min(num_sets, max(1, self.num_rows // 4))  # twice as many slots as rows: more are never used
        return num_sets

    def _give_cache(self) -> RowCache:
        """The cache, to be reused by another model; lookups that are under way get a minimal one."""
        with self.lock:
            cache, self.cache = self.cache, _empty_cache(1, self.dim)
        return cache

    def start_of(self, table: int) -> int:
        """The key of its first row."""
        return int(self.files.starts[table])

    def fetch(self, keys: Ints, out: Floats) -> FetchedRows:
        """out[i] = the row of keys[i], zero for -1. All rows are of one version, even if another is published meanwhile."""
        work = _work_of(keys.shape[0], self.dim)
        with self.lock:
            found = kernels.find(keys, out, self.cache, self._overlay, work)
            state, overlay, generation = self.state, self._overlay, self._generation
            if not found[0]:
                self._count(work, found[1])
                return FetchedRows(work.first[: found[1]], state)
            self._readers[generation] = self._readers.get(generation, 0) + 1
        try:
            seen = np.full(1 << (2 * found[0] - 1).bit_length(), -1, np.int64)
            num_first = kernels.read_missing(keys, out, self.files, overlay, work, found, seen)
            _raise_fault(work)
            with self.lock:
                kernels.keep(keys, out, self.cache, overlay.epoch, work, found[0])
                self._count(work, num_first)
        finally:
            with self.lock:
                self._readers[generation] -= 1
                if not self._readers[generation]:
                    del self._readers[generation]
                    self._no_readers.notify_all()
        return FetchedRows(work.first[:num_first], state)

    def share(self) -> None:
        """The scratch files are never written again, so that processes forked from now on can read them."""
        files = self.files
        with self.lock:
            assert not self._overlay.keys.size, "changes are in place before files are shared"
            self._shared_files += self._scratch_files.values()
            self._scratch_files = {}
            files.shared[:], files.scratch[:] = files.scratch, -1
            files.maps[:, 2], files.maps[:, 1] = files.maps[:, 1], 0
            self.files = files._replace(own=np.zeros_like(files.marks))

    def put(self, keys: Ints, rows: Floats) -> None:
        """Write rows to their place. Concurrent lookups must already see them as published changes, or not use them.

        Lookups wait only while marks are set, not for the disk: a change is read from its own file until its row is marked.
        """
        self._make_scratch(keys)
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        for start in range(0, keys.shape[0], _SETTLED_AT_ONCE):
            some, new = keys[start : start + _SETTLED_AT_ONCE], rows[start : start + _SETTLED_AT_ONCE]
            error = write_rows(some, new, self.files)
            if error:
                raise StoreError(
                    f"changed rows cannot be written to {self._scratch}: {os.strerror(error)}. Free some space, or give "
                    "another folder with scratch=."
                )
            with self.lock:
                mark_written(some, new, self.cache, self.files, self._epoch)

    def publish(self, state: Any, overlay: Overlay | None = None) -> None:
        """From now on every lookup returns this state and sees these changes; earlier changes must be in place.

        When this returns, all earlier lookups have ended, and rows may be moved into place.
        """
        with self.lock:
            self.state = state
            if overlay is None:
                return
            assert not self._overlay.keys.size, "earlier changes are in place before others are published"
            self._epoch = self._epoch % 255 + 1
            if self._epoch == 1:
                self.cache.epochs.fill(0)
            self._overlay = overlay._replace(epoch=self._epoch)
            self._await_readers()

    def retire_changes(self) -> None:
        """All changes are in place; when this returns, no lookup reads their file."""
        with self.lock:
            self._overlay = NO_CHANGES._replace(epoch=self._epoch)
            self._await_readers()

    def is_marked(self, table: int, rows: Ints) -> NDArray[np.bool_]:
        """Whether rows of a table were changed; not for dynamic ids."""
        bits = self.files.mark_starts[table] + rows
        marked: NDArray[np.bool_] = (self.files.marks[bits >> 3] >> (bits & 7).astype(np.uint8)) & 1 == 1
        return marked

    def num_marked(self, table: int, rows: int) -> int:
        """The number of changed rows."""
        first = int(self.files.mark_starts[table]) >> 3
        return int(np.unpackbits(self.files.marks[first : first + -(-rows // 8)]).sum())

    def differs(self, keys: Ints, rows: Floats) -> NDArray[np.bool_]:
        """Whether rows differ from the changed rows here, or were not changed here."""
        out = np.empty(keys.shape[0], dtype=np.bool_)
        words = np.ascontiguousarray(rows).view(np.uint32)
        held = np.empty((min(len(words), _COMPARED_AT_ONCE) or 1, self.dim), dtype=np.uint32)
        fault = compare(keys, words, self.files, held, out)
        if fault:
            raise StoreError(f"rows in {self._scratch} cannot be read back: {os.strerror(max(fault, 0))}.")
        return out

    def counts(self) -> RowCounts:
        """Since the start."""
        one = self._counts
        return RowCounts(*(int(one[n]) for n in (kernels.HITS, kernels.READ, kernels.CHANGED, kernels.FIRST)))

    @property
    def num_bytes(self) -> int:
        """Memory of the cache, the marks and the index of changes."""
        files = self.files
        held: list[NDArray[Any]] = [*self.cache, files.marks, files.own, self._overlay.keys, self._overlay.places]
        return sum(one.nbytes for one in held)

    @property
    def most_changes(self) -> int:
        """How many changed rows can be pending at once."""
        slots = self._change_bytes // 12
        return (1 << max(0, slots.bit_length() - 1)) * 2 // 3 if slots else 0

    def close(self) -> None:
        """Close all files."""
        with self.lock:
            self._await_readers()
            self.files.maps.fill(0)
            for one in self._maps:
                one.close()
            for handle in self._handles:
                os.close(handle)
            for file in (*self._scratch_files.values(), *self._shared_files):
                file.close()
            self._handles, self._scratch_files, self._shared_files, self._maps = [], {}, [], []

    def _await_readers(self) -> None:
        """Wait until all lookups that have started are over; releases the lock while waiting."""
        self._generation += 1
        generation = self._generation
        self._no_readers.wait_for(lambda: all(one >= generation for one in self._readers))

    def _count(self, work: FetchBuffers, num_first: int) -> None:
        self._counts += work.counts
        self._counts[kernels.FIRST] += num_first

    def _open(self, spaces: Sequence[RowSpace]) -> RowFiles:
        count = len(spaces)
        starts, marks = np.zeros(count + 1, np.int64), np.zeros(count, np.int64)
        models, sure = np.zeros((count, 5), np.int64), np.full(count, _NEVER, np.int64)
        maps = np.zeros((count, 3), np.int64)
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
        scratch, shared = (np.full(count, -1, np.int64) for _ in range(2))
        return RowFiles(starts, models, scratch, marks, sure, maps, bits, shared, np.empty(0, np.uint8))

    def _map(self, handle: int, needed: int) -> int:
        """The address of a mapped file of `needed` bytes; 0 if it is not mapped."""
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
        """Create the scratch files of tables that are written for the first time."""
        for t in np.unique(np.searchsorted(self.files.starts, keys, side="right") - 1):
            if int(t) not in self._scratch_files:
                file, rows = scratch_file(self._scratch, self), self._spaces[t].rows
                if self._mapped and rows is not None:  # the number of dynamic ids is not known
                    self.files.maps[t, 1] = self._map(lengthen(file, 4 * self.dim * rows), 4 * self.dim * rows)
                with self.lock:
                    self._scratch_files[int(t)] = file
                    self.files.scratch[t] = file.fileno()


def _raise_fault(work: FetchBuffers) -> None:
    fault, key = (int(work.counts[n]) for n in (kernels.FAULT, kernels.FAULT_KEY))
    if fault:
        reason = "the file ends before it" if fault < 0 else os.strerror(fault - 1000)
        raise StoreError(
            f"the row of key {key} cannot be read: {reason}. The files of the model were changed or the disk failed; "
            "load the model again."
        )


def _work_of(size: int, dim: int) -> FetchBuffers:
    return FetchBuffers(
        np.empty(2, np.int64),
        np.empty(4 * dim + 8, np.uint8),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.uint8),
        np.zeros(NUM_COUNTS, np.int64),
    )


def _empty_cache(num_sets: int, dim: int) -> RowCache:
    return RowCache(
        np.full((num_sets, WAYS), EMPTY, dtype=np.int64),
        np.zeros((num_sets, WAYS), dtype=np.uint8),
        np.zeros((num_sets, WAYS), dtype=np.uint8),
        zeros((num_sets * WAYS, dim), np.float32),
    )
