"""Unnamed temporary files for what a scorer cannot hold in memory, rows in them, and files mapped into memory.

`MappedFile` gives the address of a file's bytes, so that rows are copied from memory instead of being read with one system
call each. Lookups that miss the cache get cheaper if the page cache has the file. The price: touched pages count as memory of
the process (the system can take them back), and if a disk fails or a file is truncated, the system kills the process instead
of reporting an error. Hence mapping is off by default.

Changed rows are written at their place in the scratch file of their table, and marked; compiled code does so and reads them
back. Lookups continue meanwhile (kernels.py): a row that is written here is visible as a change until it is marked.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import IO, Any

import numpy as np

from hotbed.errors import StoreError
from hotbed.host.intrinsics import read_fully, write_fully
from hotbed.host.jit import njit
from hotbed.scorer.kernels import WAYS, is_marked, scratch_of, set_of, table_of


def scratch_file(folder: Path, owner: object) -> IO[bytes]:
    """A file that disappears when it is closed, when its owner is collected, or when the process ends."""
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  the owner closes it
    except OSError as error:
        raise StoreError(
            f"a scratch file cannot be created in {folder}: {error.strerror or error}. Name a folder on a local disk "
            "with scratch= (--scratch)."
        ) from error
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    weakref.finalize(owner, file.close)
    return file


def lengthen(file: IO[bytes], size: int) -> int:
    """Make the file `size` bytes long, without using disk space yet; returns its handle."""
    try:
        os.ftruncate(file.fileno(), size)
    except OSError as error:
        raise StoreError(
            f"a scratch file of {size} bytes cannot be created: {error.strerror or error}. Name another folder with scratch= "
            "(--scratch)."
        ) from error
    return file.fileno()


def write_all(file: IO[bytes], content: bytes | memoryview) -> None:
    """Append `content`."""
    left = memoryview(content)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        raise StoreError(
            f"a scratch file cannot be written: {error.strerror or error}. Free some space, or name another folder with "
            "scratch= (--scratch)."
        ) from error


class MappedFile:
    """The first `size` bytes of an open file; later writes to the file are visible."""

    def __init__(self, handle: int, size: int) -> None:
        self._map = mmap.mmap(handle, size, prot=mmap.PROT_READ)
        self._map.madvise(mmap.MADV_RANDOM)
        self.address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)

    def close(self) -> None:
        self._map.close()


def map_file(handle: int, needed: int) -> MappedFile | None:
    """Map a file of at least `needed` bytes. A shorter one is not mapped: reading it reports what is wrong."""
    try:
        size = os.fstat(handle).st_size
        return MappedFile(handle, size) if size >= needed > 0 else None
    except (OSError, ValueError) as error:
        raise StoreError(
            f"a file of rows cannot be mapped into memory: {error}. Leave out mapped= (--map), or use another disk."
        ) from error


@njit(nogil=True, cache=True)
def _mark(row: Any, table: Any, files: Any) -> None:
    """Mark a row as changed."""
    if row < files.sure[table]:
        bit = files.mark_starts[table] + row
        if files.own.shape[0] > 0:
            files.own[bit >> 3] |= np.uint8(1) << np.uint8(bit & 7)
        files.marks[bit >> 3] |= np.uint8(1) << np.uint8(bit & 7)


@njit(nogil=True, cache=True)
def _refresh(key: Any, rows: Any, m: Any, cache: Any, epoch: Any) -> None:
    """Replace the row in the cache, if it is there."""
    s = set_of(key, cache.keys.shape[0])
    for way in range(WAYS):
        if cache.keys[s, way] == key:
            cache.epochs[s, way] = epoch
            for d in range(rows.shape[1]):
                cache.rows[WAYS * s + way, d] = rows[m, d]


@njit(nogil=True, cache=True)
def write_rows(keys: Any, rows: Any, files: Any) -> Any:
    """Write rows to the scratch files of their tables, adjacent rows together; returns 0 or an errno."""
    size, n = 4 * rows.shape[1], 0
    while n < keys.shape[0]:  # ends: n passes one key at least
        table = table_of(keys[n], files.starts)
        row, stop = keys[n] - files.starts[table], n + 1
        while stop < keys.shape[0] and keys[stop] == keys[stop - 1] + 1 and keys[stop] < files.starts[table + 1]:
            stop += 1
        error = write_fully(files.scratch[table], rows.ctypes.data + n * size, (stop - n) * size, row * size)
        if error != 0:
            return error
        n = stop
    return 0


@njit(nogil=True, cache=True)
def mark_written(keys: Any, rows: Any, cache: Any, files: Any, epoch: Any) -> None:
    """Mark written rows as changed, and refresh them in the cache."""
    for n in range(keys.shape[0]):
        table = table_of(keys[n], files.starts)
        _mark(keys[n] - files.starts[table], table, files)
        _refresh(keys[n], rows, n, cache, epoch)


@njit(nogil=True, cache=True)
def read_places(handle: Any, places: Any, rows: Any) -> Any:
    """rows[n] = the row at places[n] of a file of rows; returns 0 or a fault."""
    size = 4 * rows.shape[1]
    for n in range(places.shape[0]):
        fault = read_fully(handle, rows.ctypes.data + n * size, size, places[n] * size)
        if fault != 0:
            return fault
    return 0


@njit(nogil=True, cache=True)
def compare(keys: Any, rows: Any, files: Any, held: Any, differs: Any) -> Any:
    """differs[n]: whether rows[n] differs from the row in its scratch file, or none is there. Returns 0 or a fault.

    Rows are compared as 32-bit words. Rows of consecutive keys are read together, into `held`.
    """
    size, n = 4 * rows.shape[1], 0
    while n < keys.shape[0]:  # ends: n passes one key at least
        table = table_of(keys[n], files.starts)
        first = keys[n] - files.starts[table]
        if not is_marked(files, table, first):
            differs[n] = True
            n += 1
            continue
        handle, _ = scratch_of(files, table, first)
        stop = n + 1
        while stop < min(keys.shape[0], n + held.shape[0]) and keys[stop] == keys[stop - 1] + 1:
            row = keys[stop] - files.starts[table]
            if keys[stop] >= files.starts[table + 1] or not is_marked(files, table, row):
                break
            if scratch_of(files, table, row)[0] != handle:
                break
            stop += 1
        fault = read_fully(handle, held.ctypes.data, (stop - n) * size, first * size)
        if fault != 0:
            return fault
        for m in range(n, stop):
            other = False
            for d in range(rows.shape[1]):
                other |= rows[m, d] != held[m - n, d]
            differs[m] = other
        n = stop
    return 0
