"""Unnamed temporary files for what a scorer cannot hold in memory, and files mapped into memory.

`MappedFile` gives the address of a file's bytes, so that rows are copied from memory instead of being read with one system
call each. Lookups that miss the cache get cheaper if the page cache has the file. The price: touched pages count as memory of
the process (the system can take them back), and if a disk fails or a file is truncated, the system kills the process instead
of reporting an error. Hence mapping is off by default.
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
