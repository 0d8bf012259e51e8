"""Unnamed temporary files for what a scorer cannot hold in memory, rows in them, and files mapped into memory.

`MappedFile` gives the address of a file's bytes, so that rows are copied from memory instead of being read with one system
call each. Lookups that miss the cache get cheaper if the page cache has the file. The price: touched pages count as memory of
the process (the system can take them back), and if a disk fails or a file is truncated, the system kills the process instead
of reporting an error. Hence mapping is off by default.

Rows are at the place of their number, in one of two files of their table. Compiled code writes the rows of a new version to the
file that the current one does not read them from (kernels.py), so that lookups continue meanwhile.
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
from hotbed.host.intrinsics import SHORT, read_fully, write_fully
from hotbed.host.jit import njit
from hotbed.scorer.kernels import IN_FIRST, IN_MODEL, IN_SECOND, file_of


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
def places_of(marks: Any, table: Any, numbers: Any, places: Any) -> None:
    """places[n] = the file that has row numbers[n] of a table."""
    for n in range(numbers.shape[0]):
        places[n] = file_of(marks, table, numbers[n])


@njit(nogil=True, cache=True)
def other_places(places: Any) -> None:
    """For rows in these files, the scratch files that no reader of them looks at."""
    for n in range(places.shape[0]):
        places[n] = IN_SECOND if places[n] == IN_FIRST else IN_FIRST


@njit(nogil=True, cache=True)
def set_places(bits: Any, numbers: Any, places: Any) -> Any:
    """Mark where rows are; returns how many more are in scratch files than before."""
    more: Any = 0
    for n in range(numbers.shape[0]):
        at, shift = numbers[n] >> 2, np.uint8(2 * (numbers[n] & 3))
        had = (bits[at] >> shift) & np.uint8(3)
        bits[at] = (bits[at] & ~(np.uint8(3) << shift)) | (np.uint8(places[n]) << shift)
        more += np.int64(places[n] != IN_MODEL) - np.int64(had != IN_MODEL)
    return more


@njit(nogil=True, cache=True)
def _run(numbers: Any, places: Any, n: Any, most: Any) -> Any:
    """Where the run of neighbouring rows in one file ends that begins at n."""
    stop = n + 1
    while stop < min(numbers.shape[0], n + most):
        if numbers[stop] != numbers[stop - 1] + 1 or places[stop] != places[n]:
            break
        stop += 1
    return stop


@njit(nogil=True, cache=True)
def write_rows(numbers: Any, rows: Any, places: Any, handles: Any) -> Any:
    """Write rows of one table to the files `places`, neighbours together; returns 0 or an errno."""
    size, n = rows.itemsize * rows.shape[1], 0
    while n < numbers.shape[0]:  # ends: n passes one row at least
        stop = _run(numbers, places, n, numbers.shape[0])
        address = rows.ctypes.data + n * size
        error = write_fully(handles[places[n]], address, (stop - n) * size, numbers[n] * size)
        if error != 0:
            return error
        n = stop
    return 0


@njit(nogil=True, cache=True)
def read_rows(numbers: Any, rows: Any, places: Any, handles: Any) -> Any:
    """rows[n] = row numbers[n] of one table, from the files `places`; zeros past the end. Returns 0 or an errno."""
    size, n = rows.itemsize * rows.shape[1], 0
    while n < numbers.shape[0]:  # ends: n passes one row at least
        stop = _run(numbers, places, n, numbers.shape[0])
        error = read_fully(handles[places[n]], rows.ctypes.data + n * size, (stop - n) * size, numbers[n] * size)
        if error == SHORT and stop > n + 1:  # one by one: the file ends within the run
            for m in range(n, stop):
                rows[m, :] = 0
                error = read_fully(handles[places[n]], rows.ctypes.data + m * size, size, numbers[m] * size)
                if error == SHORT:
                    rows[m, :] = 0
                elif error != 0:
                    return error
        elif error == SHORT:
            rows[n, :] = 0
        elif error != 0:
            return error
        n = stop
    return 0


@njit(nogil=True, cache=True)
def differing(rows: Any, others: Any, found: Any) -> None:
    """found[n] = whether two rows differ in any bit."""
    for n in range(rows.shape[0]):
        differs = False
        for d in range(rows.shape[1]):
            differs = differs or rows[n, d] != others[n, d]
        found[n] = differs
