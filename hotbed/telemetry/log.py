"""metrics.jsonl: one JSON object a line, appended and flushed as it happens."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from hotbed.errors import RunError
from hotbed.host.atomic import flush_to_disk, writing

Record = dict[str, Any]


class MetricsLog:
    """The open file. `position` is its length in bytes; a resumed run truncates it there and continues."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        self._is_named = False  # whether its folder entry is on the disk
        with writing(path):
            size = path.stat().st_size if path.exists() else 0
            if size < position:
                raise RunError(f"{path} has {size} bytes, but the checkpoint was taken at {position}.")
            self._file = path.open("ab")
            self._file.truncate(position)
            self._file.seek(position)

    @property
    def position(self) -> int:
        return self._file.tell()

    def write(self, record: Record) -> None:
        """Append one line; nan becomes null, which every JSON reader accepts."""
        with writing(self.path):
            self._file.write(json.dumps(_plain(record), allow_nan=False).encode() + b"\n")
            self._file.flush()

    def flush_to_disk(self) -> None:
        """Before a checkpoint that relies on these bytes."""
        with writing(self.path):
            os.fsync(self._file.fileno())
            if not self._is_named:
                flush_to_disk(self.path.parent)
                self._is_named = True

    def close(self) -> None:
        self._file.close()


class NoLog:
    """Instead of the file, on ranks that write none."""

    position = 0

    def write(self, record: Record) -> None:
        """Rank 0 writes it."""

    def flush_to_disk(self) -> None:
        """Nothing to flush."""

    def close(self) -> None:
        """Nothing was opened."""


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
