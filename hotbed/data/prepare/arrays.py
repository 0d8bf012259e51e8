"""Named arrays in one file: raw bytes back to back, then a description, so that any slice of any array is one read.

The file is renamed into place when it is complete. Reading uses private buffers and not a memory map: mapped pages would count
as memory of the process as long as the file is open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import DataError
from hotbed.host.atomic import place, rewriting

_END = b"hotbed-a"
_SMALL = 1 << 20


def write_whole(path: Path, text: str) -> None:
    """Write a small file atomically and durably."""
    with rewriting(path, place, unique=True) as temporary:
        temporary.write_text(text)


def write_arrays(path: Path, arrays: Mapping[str, Iterable[NDArray[Any]]]) -> None:
    """Every array is given in pieces of one type, in order."""
    places: dict[str, tuple[str, int, int]] = {}
    with rewriting(path, place, unique=True) as temporary, temporary.open("wb", buffering=_SMALL) as file:
        for name, pieces in arrays.items():
            begin, kind, count = file.tell(), np.dtype(np.uint8), 0
            for piece in pieces:
                file.write(np.ascontiguousarray(piece).data)
                kind, count = piece.dtype, count + len(piece)
            places[name] = (kind.str, begin, count)
        described = json.dumps({"places": places}).encode()
        file.write(described + len(described).to_bytes(8, "little") + _END)


class ArrayFile:
    """A file that `write_arrays` wrote; `read` returns arrays or slices of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        tail = os.pread(self._file.fileno(), 16, max(size - 16, 0))
        if tail[8:] != _END:
            self.close()
            raise DataError(f"{path} is damaged. Delete {path.parent.parent} and run the command again.")
        length = int.from_bytes(tail[:8], "little")
        described = json.loads(os.pread(self._file.fileno(), length, size - 16 - length))
        self._places: dict[str, tuple[str, int, int]] = described["places"]

    def read(self, name: str, begin: int = 0, end: int | None = None) -> NDArray[Any]:
        """Elements begin .. end - 1 of an array, as a new array."""
        kind, place, count = self._places[name]
        stop = count if end is None else end
        out = np.empty(max(stop - begin, 0), dtype=np.dtype(kind))
        view = memoryview(out.view(np.uint8))  # type: ignore[arg-type]
        place += begin * out.itemsize
        done = 0
        while done < len(view):
            read = os.preadv(self._file.fileno(), [view[done:]], place + done)
            if read == 0:
                raise DataError(
                    f"{self._path} is truncated. Delete {self._path.parent.parent} and run the command again."
                )
            done += read
        return out

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
