"""Files without a name: what a scorer cannot hold in memory and did not find in place on the disk.

`MappedFile`: a file in, the address of its bytes out: rows that are copied from memory instead of being read by a system call
each.

Where the page cache has the file, a lookup that misses the cache costs less. The price: pages that were touched count as
memory of the process, though the system takes them back when it needs them; and where a disk fails, or somebody cuts a file of
the model short, the system ends the process instead of reporting an error. Hence it is asked for.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import IO

import numpy as np

from hotbed.errors import StoreError


def scratch_file(folder: Path, owner: object) -> IO[bytes]:
    """A file that is gone when it is closed, when its owner is, or when the process ends, however it ends."""
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  the owner closes it
    except OSError as error:
        raise StoreError(
            f"a scratch file is needed, and {folder} refuses one: {error.strerror or error}. Name a folder on a local disk "
            "with scratch= (--scratch)."
        ) from error
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    weakref.finalize(owner, file.close)
    return file


def lengthen(file: IO[bytes], size: int) -> int:
    """Let it have so many bytes, which take no disk until they are written; its handle."""
    try:
        os.ftruncate(file.fileno(), size)
    except OSError as error:
        raise StoreError(
            f"a scratch file of {size} bytes cannot be made: {error.strerror or error}. Name another folder with scratch= "
            "(--scratch)."
        ) from error
    return file.fileno()


def write_all(file: IO[bytes], content: bytes | memoryview) -> None:
    """Append it."""
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
    """The first `size` bytes of an open file; what is written to the file is seen here."""

    def __init__(self, handle: int, size: int) -> None:
        self._map = mmap.mmap(handle, size, prot=mmap.PROT_READ)
        self._map.madvise(mmap.MADV_RANDOM)
        self.address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)

    def close(self) -> None:
        self._map.close()


def map_file(handle: int, needed: int) -> MappedFile | None:
    """A file that has these bytes at least; one that is shorter is read, which finds words for what is wrong."""
    try:
        size = os.fstat(handle).st_size
        return MappedFile(handle, size) if size >= needed > 0 else None
    except (OSError, ValueError) as error:
        raise StoreError(
            f"a file of rows cannot be mapped into memory: {error}. Leave out mapped= (--map), or use another disk."
        ) from error
