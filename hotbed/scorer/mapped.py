"""A file in, the address of its bytes out: rows that are copied from memory instead of being read by a system call each.

Where the page cache has the file, a look-up that misses the cache costs less. The price: pages that were touched count as
memory of the process, though the system takes them back when it needs them; and where a disk fails, or somebody cuts a file of
the model short, the system ends the process instead of reporting an error. Hence it is asked for.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from hotbed.errors import StoreError


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
