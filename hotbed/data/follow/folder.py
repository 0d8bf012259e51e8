"""A folder to which files are added, local or in a store, as a Source: new files in the order of their names, each once.

whole         its time is `settle` seconds ago, or its size and time have not changed for so long while they were looked at: a
              writer whose clock is ahead holds up nobody for longer. It counts as written no later than it is taken. Names that
              begin with `.` or `_`, or end with .tmp, .part, .partial, .crdownload or ._COPYING_, are being written and are
              never taken.
order         of the files that are whole, that of their paths below the folder; `day=2026-11-16/hour=05/a.parquet` sorts right.
late          a file whose path sorts before one that was taken is trained when it comes, or left out: follow.late.
duplicate     a path is taken once. A new path with the content of a file that was trained is listed and not trained.
changed       a file that was taken must not change: its digest is compared when it is read (again).

Digests are BLAKE2b of the whole file: it is read once more, at about 1 GB/s. An object of a store is fetched twice, past the
cache of blocks (two versions of one size may have the time of the same second), and its rows are read from a local copy whose
digest is right.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from hotbed.data.follow.source import DUPLICATE, LATE, SKIP, SKIPPED, Arrival, Journal
from hotbed.data.formats import Chunk
from hotbed.data.raw_reader import RawReader
from hotbed.errors import DataError, FormatError, RemoteError
from hotbed.files import RemotePath, ReplacedError, pieces_now, stat_now
from hotbed.files.settings import cache_root
from hotbed.host.atomic import make_folder

UNFINISHED = (".tmp", ".part", ".partial", ".crdownload", "._copying_")


class ListedFile(NamedTuple):
    """A file of a folder."""

    name: str  # its path below the folder, with /
    size: int
    changed: float  # seconds since 1970


def list_files(folder: Path) -> Iterator[ListedFile]:
    """Every file below a folder that may be taken; files that disappear meanwhile are left out."""
    if isinstance(folder, RemotePath):
        yield from _list_objects(folder)
        return
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder. --follow needs a folder to which files are added; make it before the first file comes."
        )
    for place, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if one[0] not in "._"]
        for name in filter(_is_finished, files):
            path = Path(place, name)
            try:
                found = path.stat()
            except OSError:
                continue
            yield ListedFile(path.relative_to(folder).as_posix(), found.st_size, found.st_mtime)


def _list_objects(folder: RemotePath) -> Iterator[ListedFile]:
    """The same of an object store, where a folder is there once there is something in it."""
    found = folder.entries(recursive=True)
    if not found:
        folder.exists()  # an error if there is no such bucket
    start = len(folder.key) + 1 if folder.key else 0
    for path, stat in found:
        name = path.key[start:]
        if stat is not None and all(part[0] not in "._" for part in name.split("/")) and _is_finished(name):
            yield ListedFile(name, stat.st_size, stat.st_mtime)


def _is_finished(name: str) -> bool:
    return name[0] not in "._" and not name.lower().endswith(UNFINISHED)


class FolderSource:
    """A folder of files; `clock` is seconds since 1970, `watch` is seconds of a clock that is never set.

    `scratch` is the local folder in which the object of a store that is being read has its copy.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settle: float = 5.0,
        train_late: bool = True,
        skip: Collection[str] = (),
        scratch: Path | None = None,
        clock: Callable[[], float] = time.time,
        watch: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = str(folder)
        self._folder, self._settle, self._clock, self._watch = folder, settle, clock, watch
        self._since: dict[ListedFile, float] = {}  # files that were not taken -> when they were first seen as they are
        self._train_late, self._skip = train_late, frozenset(skip)
        self._scratch = scratch or cache_root() / "remote" / "followed" / str(os.getpid())

    def arrived(self, taken: Journal) -> list[Arrival]:
        found: list[Arrival] = []
        marks: set[str] = set()
        new = [one for one in list_files(self._folder) if not taken.has_name(one.name)]
        now = self._watch()
        self._since = {file: self._since.get(file, now) for file in new}
        for file in sorted(new):
            if not self._is_whole(file):
                break  # those behind it wait, so that the order is that of names
            if not file.size:
                continue
            try:
                arrival = self._arrival(file, taken, marks)
            except FileNotFoundError:
                continue  # it was removed before it was taken
            if arrival is None:
                break  # it is still being written
            found.append(arrival)
            marks |= {arrival.mark} if arrival.is_trained else set()
        return found

    def _is_whole(self, file: ListedFile) -> bool:
        return self._clock() - file.changed >= self._settle or self._watch() - self._since[file] >= self._settle

    def chunks(self, arrival: Arrival, reader: RawReader) -> Iterator[Chunk]:
        path = self._folder / arrival.name
        if arrival.name in self._skip:
            return
        with _as_taken(path, arrival, self._scratch) as place:
            yield from reader.format_of(place).chunks(place)

    def close(self) -> None:
        """Nothing is open."""

    def _arrival(self, file: ListedFile, taken: Journal, marks: set[str]) -> Arrival | None:
        """The arrival of a file; None if it has changed since it was listed."""
        path = self._folder / file.name
        try:
            mark = digest(path)
            still = stat_now(path)
        except ReplacedError:
            return None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from error
        if (still.st_size, still.st_mtime) != (file.size, file.changed):
            return None
        is_late = file.name < taken.greatest_name
        status = Arrival._field_defaults["status"]
        if file.name in self._skip or (is_late and not self._train_late):
            status = SKIPPED
        elif mark in marks or taken.has_mark(mark):
            status = DUPLICATE
        elif is_late:
            status = LATE
        return Arrival(file.name, int(min(file.changed, self._clock())), mark, file.size, status)


@contextmanager
def _as_taken(path: Path, arrival: Arrival, scratch: Path) -> Iterator[Path]:
    """Where the content can be read that was taken; a FormatError if it has changed or cannot be read."""
    if isinstance(path, RemotePath):
        shutil.rmtree(scratch, ignore_errors=True)  # what a killed follower left
        make_folder(scratch)
        with _reading(path, arrival), (scratch / path.name).open("wb") as copy:
            mark = digest(path, copy)
        if mark != arrival.mark:
            raise _changed(path, arrival)
        yield scratch / path.name
        shutil.rmtree(scratch)
        return
    with _reading(path, arrival):
        before, mark = _stamp(path), digest(path)
    if before[0] != arrival.size or mark != arrival.mark:
        raise _changed(path, arrival)
    yield path
    with _reading(path, arrival):
        if _stamp(path) != before:
            raise _changed(path, arrival)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@contextmanager
def _reading(path: Path, arrival: Arrival) -> Iterator[None]:
    try:
        yield
    except ReplacedError as error:
        raise _changed(path, arrival) from error
    except RemoteError:
        raise  # a store that does not answer; the file may be as it was
    except OSError as error:
        reason = error.strerror or error
        raise FormatError(
            f"{path} was taken for training and cannot be read now ({reason}). {_way_out(arrival)}"
        ) from error


def _changed(path: Path, arrival: Arrival) -> FormatError:
    return FormatError(
        f"{path} was taken for training with {arrival.size:,} bytes and has changed since. {_way_out(arrival)} A writer that "
        "pauses for longer than follow.settle_seconds needs a larger one, or should rename whole files into place."
    )


def _way_out(arrival: Arrival) -> str:
    return (
        "Bring back the file as it was, or give up what is left of it: "
        f"`hotbed train --resume RUN --set {shlex.quote(f'{SKIP}={arrival.name}')}`."
    )


def digest(path: Path, copy: IO[bytes] | None = None) -> str:
    """The digest of a file's content; `copy` gets the content too."""
    found = hashlib.blake2b(digest_size=16)
    for piece in pieces_now(path):
        found.update(piece)
        if copy is not None:
            copy.write(piece)
    return found.hexdigest()
