"""Keys in, rows out, within a memory budget: a cache over the files of a model, in versions that replace each other at once.

A `RowVersion` says which file has each row, two bits a row, and never changes. The next one is made from a `RowDraft`: its rows
go to unnamed scratch files, at the position of their row number. Every table has two of them, and a row that changes goes to
the one that the current version does not read it from. So readers of the current version see nothing of it until `publish`, an
update that fails leaves no trace, and an update costs what it changes and a copy of the marks. The files are sparse and take
disk space only where they were written. The model's own files are never written.

The budget covers cached rows with their keys, and the marks of two versions.

Processes that are forked from one that called `share` read its scratch files and never write them: each puts the rows that
change from then on into scratch files of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError
from hotbed.host.background import pause
from hotbed.host.pages import zeros
from hotbed.scorer import kernels
from hotbed.scorer.kernels import (
    EMPTY,
    IN_FIRST,
    IN_MODEL,
    IN_SECOND,
    IN_SHARED,
    NUM_COUNTS,
    WAYS,
    CurrentMarks,
    FetchBuffers,
    RowCache,
    RowFiles,
)
from hotbed.scorer.scratch import (
    MappedFile,
    differing,
    lengthen,
    map_file,
    read_rows,
    scratch_file,
    write_rows,
)
from hotbed.scorer.versions import RowDraft, RowVersion

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
_DYNAMIC_SPAN = 1 << 40  # keys that a table of dynamic ids may have
_SLOT_BYTES = 8 + 1 + 1  # key, uses, epoch
_SWEPT_AT_ONCE = 1 << 10  # sets; lookups wait for some 0.1 ms at a time


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

    @property
    def mark_bytes(self) -> int:
        """Bytes of the marks of a version whose rows are in scratch files; dynamic ids are not known yet."""
        return 0 if self.file is not None or self.rows is None else -(-self.rows // 4)


class RowCounts(NamedTuple):
    """Lookups since the start, by the place where the row was found."""

    cache: int
    files: int
    first_values: int


class FileRows:
    """Rows of T tables of one width."""

    def __init__(self, spaces: Sequence[RowSpace], dim: int, scratch: Path, *, mapped: bool = False) -> None:
        self.dim, self.spaces, self._scratch, self._mapped = dim, spaces, scratch, mapped
        self._maps: list[MappedFile] = []
        self.lock = threading.Lock()
        self._no_readers = threading.Condition(self.lock)
        self._readers: dict[int, int] = {}  # number of a version -> those who read it
        self._handles: list[int] = []
        self._scratch_files: dict[tuple[int, int], IO[bytes]] = {}  # (table, place)
        self._counts = np.zeros(NUM_COUNTS, dtype=np.int64)
        self.num_rows = None if any(one.rows is None for one in spaces) else sum(one.rows or 0 for one in spaces)
        self.files = self._open(spaces)
        none = np.zeros(len(spaces), dtype=np.int64)
        self.current = RowVersion(0, None, [np.empty(0, np.uint8) for _ in spaces], none, none)
        self._before: RowVersion | None = None  # until no cached row is of that version
        self.cache = _empty_cache(1, dim)

    def make_cache(self, memory: int, before: FileRows | None = None) -> None:
        """Make a cache of `memory` bytes at most.

        The cache of `before` is given up: its memory is reused if it has the same shape, else freed first.
        """
        num_sets = memory // self.set_bytes
        assert num_sets > 0, f"a budget was checked: {memory} bytes hold no set of {self.set_bytes}"
        if self.num_rows is not None:
            num_sets = min(num_sets, max(1, self.num_rows // 4))  # twice as many slots as rows: more are never used
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

    @property
    def set_bytes(self) -> int:
        """Bytes of one set of the cache."""
        return WAYS * (4 * self.dim + _SLOT_BYTES)

    def bytes_of_marks(self, draft: RowDraft) -> int:
        """What the marks of a draft take once all rows of preset tables have theirs."""
        return sum(max(space.mark_bytes, bits.nbytes) for space, bits in zip(self.spaces, draft.bits))

    def _give_cache(self) -> RowCache:
        """The cache, to be reused by another model; lookups that are under way get a minimal one."""
        with self.lock:
            cache, self.cache = self.cache, _empty_cache(1, self.dim)
        return cache

    def start_of(self, table: int) -> int:
        """The key of its first row."""
        return int(self.files.starts[table])

    @contextmanager
    def reading(self) -> Iterator[RowVersion]:
        """The current version; its rows stay where they are until this is left."""
        with self.lock:
            version = self.current
            self._readers[version.number] = self._readers.get(version.number, 0) + 1
        try:
            yield version
        finally:
            with self.lock:
                self._readers[version.number] -= 1
                if not self._readers[version.number]:
                    del self._readers[version.number]
                    self._no_readers.notify_all()

    def fetch(self, version: RowVersion, keys: Ints, out: Floats) -> Ints:
        """out[i] = the row of keys[i], zero for -1. Returns the positions whose rows are in no file, to be filled in."""
        work = _work_of(keys.shape[0], self.dim)
        with self.lock:
            found = kernels.find(keys, out, self.cache, self.files.starts, self._seen(), version is self.current, work)
            if not found[0]:
                self._count(work, found[1])
                return work.first[: found[1]]
        seen = np.full(1 << (2 * found[0] - 1).bit_length(), -1, np.int64)
        num_first = kernels.read_missing(keys, out, self.files, version.marks, work, found, seen)
        _raise_fault(work)
        with self.lock:
            if version is self.current:
                kernels.keep(keys, out, self.cache, np.uint8(version.number & 255), work, found[0])
            self._count(work, num_first)
        return work.first[:num_first]

    def share(self) -> None:
        """The scratch files are never written again, so that processes forked from now on can read them."""
        handles, maps = self.files.handles, self.files.maps
        with self.lock:
            self._no_readers.wait_for(lambda: not self._readers)
            assert (handles[:, IN_SECOND] < 0).all(), "files are shared before they are updated"
            for bits in self.current.bits:
                np.bitwise_or(bits, (bits & 0x55) << 1, out=bits)  # IN_FIRST -> IN_SHARED
            for of in (handles, maps):
                of[:, IN_SHARED] = of[:, IN_FIRST]
            handles[:, IN_FIRST], maps[:, IN_FIRST] = -1, 0
            self._scratch_files = {(table, IN_SHARED): one for (table, _), one in self._scratch_files.items()}

    def write(self, table: int, numbers: Ints, values: Floats, places: Ints) -> None:
        """Write rows to scratch files where no version has them."""
        for place in (IN_FIRST, IN_SECOND):
            if (places == place).any():
                self._make_scratch(table, place)
        error = write_rows(numbers, values, places, self.files.handles[table])
        if error:
            raise StoreError(
                f"changed rows cannot be written to {self._scratch}: {os.strerror(error)}. Free some space, or give "
                "another folder with scratch=."
            )

    def differs(self, table: int, numbers: Ints, values: Floats, places: Ints) -> NDArray[np.bool_]:
        """Whether rows differ, in any bit, from those in these scratch files; one that is in none does."""
        found: NDArray[np.bool_] = places == IN_MODEL
        if found.any():
            there = np.flatnonzero(~found)
            found[there] = self.differs(table, numbers[there], values[there], places[there]) if there.size else False
            return found
        held = np.empty_like(values)
        error = read_rows(numbers, held, places, self.files.handles[table])
        if error:
            raise StoreError(f"rows in {self._scratch} cannot be read back: {os.strerror(error)}.")
        differing(values.view(np.uint32), held.view(np.uint32), found)
        return found

    def publish(self, draft: RowDraft, state: Any) -> None:
        """From now on every reader gets this version. When this returns, nobody reads the one before."""
        self.settle()
        version = RowVersion(self.current.number + 1, state, draft.bits, draft.counts, draft.num_live)
        with self.lock:
            self._before, self.current = self.current, version
        self.settle()

    def settle(self) -> None:
        """Finish the last `publish`: its rows may be written again once nobody reads them and the cache has none."""
        before = self._before
        if before is None:
            return
        with self.lock:
            self._no_readers.wait_for(lambda: before.number not in self._readers)
        for start in range(0, len(self.cache.keys), _SWEPT_AT_ONCE):
            with self.lock:
                stop = min(start + _SWEPT_AT_ONCE, len(self.cache.keys))
                kernels.sweep(self.cache, self.files.starts, self._seen(), start, stop)
            pause()  # else this thread takes the lock again before those who wait for it wake up
        with self.lock:
            self._before = None

    def counts(self) -> RowCounts:
        """Since the start."""
        one = self._counts
        return RowCounts(*(int(one[n]) for n in (kernels.HITS, kernels.READ, kernels.FIRST)))

    @property
    def num_bytes(self) -> int:
        """Memory of the cache and the marks."""
        return sum(one.nbytes for one in self.cache) + self.mark_bytes

    @property
    def mark_bytes(self) -> int:
        """Bytes of the marks of the current version, and of the previous one while it is read."""
        versions = [self.current, *([self._before] if self._before is not None else [])]
        return sum(one.nbytes for one in {id(bits): bits for version in versions for bits in version.bits}.values())

    def close(self) -> None:
        """Close all files."""
        with self.lock:
            self._no_readers.wait_for(lambda: not self._readers)
            self.files.maps.fill(0)
            for one in self._maps:
                one.close()
            for handle in self._handles:
                os.close(handle)
            for file in self._scratch_files.values():
                file.close()
            self.files.handles.fill(-1)
            self._handles, self._scratch_files, self._maps = [], {}, []

    def _seen(self) -> CurrentMarks:
        before = self._before if self._before is not None else self.current
        return CurrentMarks(self.current.marks, before.marks, self.current.number & 255)

    def _count(self, work: FetchBuffers, num_first: int) -> None:
        self._counts += work.counts
        self._counts[kernels.FIRST] += num_first

    def _open(self, spaces: Sequence[RowSpace]) -> RowFiles:
        count = len(spaces)
        starts, models = np.zeros(count + 1, np.int64), np.zeros((count, 3), np.int64)
        handles, maps = np.full((count, 4), -1, np.int64), np.zeros((count, 4), np.int64)
        opened: dict[Path, int] = {}
        for t, (rows, file) in enumerate(spaces):
            starts[t + 1] = starts[t] + (_DYNAMIC_SPAN if rows is None else rows)
            if file is not None:
                if file.path not in opened:
                    opened[file.path] = self._open_file(file.path)
                models[t] = file.kind, file.offset, file.scale_offset
                handles[t, IN_MODEL] = opened[file.path]
                maps[t, IN_MODEL] = self._map(opened[file.path], file.end(self.dim))
        return RowFiles(starts, models, handles, maps)

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

    def _make_scratch(self, table: int, place: int) -> None:
        """Create a scratch file that is written for the first time."""
        if (table, place) not in self._scratch_files:
            file, rows = scratch_file(self._scratch, self), self.spaces[table].rows
            if self._mapped and rows is not None:  # the number of dynamic ids is not known
                self.files.maps[table, place] = self._map(lengthen(file, 4 * self.dim * rows), 4 * self.dim * rows)
            with self.lock:
                self._scratch_files[table, place] = file
                self.files.handles[table, place] = file.fileno()


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
