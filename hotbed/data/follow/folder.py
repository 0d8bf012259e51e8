"""A folder to which files are added, as a Source: new files in the order of their names, each once.

whole         its time is `settle` seconds ago, or its size and time have not changed for so long while they were looked at: a
              writer whose clock is ahead holds up nobody for longer. It counts as written no later than it is taken. Names that
              begin with `.` or `_`, or end with .tmp, .part, .partial, .crdownload or ._COPYING_, are being written and are
              never taken.
order         of the files that are whole, that of their paths below the folder; `day=2026-11-16/hour=05/a.parquet` sorts right.
late          a file whose path sorts before one that was taken is trained when it comes, or left out: follow.late.
duplicate     a path is taken once. A new path with the content of a file that was trained is listed and not trained.
changed       a file that was taken must not change: its digest is compared when it is read (again).

Digests are BLAKE2b of the whole file: it is read once more, at about 1 GB/s. `list_files` is all that knows of directories.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from hotbed.data.follow.source import DUPLICATE, LATE, SKIPPED, Arrival, Journal
from hotbed.data.formats import Chunk
from hotbed.data.prepare.inputs import FileStamp, file_stamp
from hotbed.data.raw_reader import RawReader
from hotbed.errors import DataError, FormatError

UNFINISHED = (".tmp", ".part", ".partial", ".crdownload", "._copying_")
_BLOCK = 1 << 20


class ListedFile(NamedTuple):
    """A file of a folder."""

    name: str  # its path below the folder, with /
    size: int
    changed: float  # seconds since 1970


def list_files(folder: Path) -> Iterator[ListedFile]:
    """Every file below a folder that may be taken; files that disappear meanwhile are left out."""
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder. --follow needs a folder to which files are added; make it before the first file comes."
        )
    for place, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if one[0] not in "._"]
        for name in files:
            if name[0] in "._" or name.lower().endswith(UNFINISHED):
                continue
            path = Path(place, name)
            try:
                found = path.stat()
            except OSError:
                continue
            yield ListedFile(path.relative_to(folder).as_posix(), found.st_size, found.st_mtime)


class FolderSource:
    """A folder of files; `clock` is seconds since 1970, `watch` is seconds of a clock that is never set."""

    def __init__(
        self,
        folder: Path,
        *,
        settle: float = 5.0,
        train_late: bool = True,
        skip: Collection[str] = (),
        clock: Callable[[], float] = time.time,
        watch: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = str(folder)
        self._folder, self._settle, self._clock, self._watch = folder, settle, clock, watch
        self._since: dict[ListedFile, float] = {}  # files that were not taken -> when they were first seen as they are
        self._train_late, self._skip = train_late, frozenset(skip)

    def arrived(self, taken: Journal) -> list[Arrival]:
        found: list[Arrival] = []
        marks: set[str] = set()
        new = [one for one in list_files(self._folder) if one.size and not taken.has_name(one.name)]
        now = self._watch()
        self._since = {file: self._since.get(file, now) for file in new}
        for file in sorted(new):
            if not self._is_whole(file):
                break  # those behind it wait, so that the order is that of names
            arrival = self._arrival(file, taken, marks)
            if arrival is not None:
                found.append(arrival)
                marks |= {arrival.mark} if arrival.is_trained else set()
        return found

    def _is_whole(self, file: ListedFile) -> bool:
        return self._clock() - file.changed >= self._settle or self._watch() - self._since[file] >= self._settle

    def chunks(self, arrival: Arrival, reader: RawReader) -> Iterator[Chunk]:
        path = self._folder / arrival.name
        if arrival.name in self._skip:
            return
        before = self._checked(path, arrival)
        yield from reader.format_of(path).chunks(path)
        if file_stamp(path) != before:
            raise _changed(path, arrival)

    def close(self) -> None:
        """Nothing is open."""

    def _arrival(self, file: ListedFile, taken: Journal, marks: set[str]) -> Arrival | None:
        try:
            mark = digest(self._folder / file.name)
            still = (self._folder / file.name).stat()
        except FileNotFoundError:
            return None  # removed before it was taken
        except OSError as error:
            raise FormatError(f"{self._folder / file.name} cannot be read: {error.strerror or error}.") from error
        if (still.st_size, still.st_mtime) != (file.size, file.changed):
            return None  # it is still being written
        is_late = file.name < taken.greatest_name
        status = Arrival._field_defaults["status"]
        if file.name in self._skip or (is_late and not self._train_late):
            status = SKIPPED
        elif mark in marks or taken.has_mark(mark):
            status = DUPLICATE
        elif is_late:
            status = LATE
        return Arrival(file.name, int(min(file.changed, self._clock())), mark, file.size, status)

    def _checked(self, path: Path, arrival: Arrival) -> FileStamp:
        """The stamp from before the file was found to have the content that was taken; else a FormatError."""
        try:
            found = path.stat()
            is_same = found.st_size == arrival.size and digest(path) == arrival.mark
        except OSError as error:
            reason = error.strerror or error
            raise FormatError(
                f"{path} was taken for training and cannot be read now ({reason}). {_way_out(arrival)}"
            ) from error
        if not is_same:
            raise _changed(path, arrival)
        return FileStamp(found.st_size, found.st_mtime_ns)


def _changed(path: Path, arrival: Arrival) -> FormatError:
    return FormatError(
        f"{path} was taken for training with {arrival.size:,} bytes and has changed since. {_way_out(arrival)} A writer that "
        "pauses for longer than follow.settle_seconds needs a larger one, or should rename whole files into place."
    )


def _way_out(arrival: Arrival) -> str:
    return (
        "Bring back the file as it was, or give up what is left of it: "
        f"`hotbed train --resume RUN --set follow.skip={arrival.name}`."
    )


def digest(path: Path) -> str:
    """Of the content of a file."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()
