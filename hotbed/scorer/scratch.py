"""Files without a name: what a scorer cannot hold in memory and did not find in place on the disk."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import IO

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
