"""A path of an object store that answers as pathlib.Path does: `/`, name, stat, iterdir, glob, open, read_text, unlink.

It is a Path, so what only reads files need not know where they are. A store has no rename, no lock, no mapping into memory and
nothing to flush: what needs these gets an error from `os.fspath` that names the path, never a local file of a similar name.
Folders exist while objects are below them; `mkdir` does nothing.
"""

from __future__ import annotations

import fnmatch
import io
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import IO, Any

from hotbed.errors import RemoteError
from hotbed.files.read import RemoteFile, RemoteObject, open_object
from hotbed.files.store import FileStat, Store, store_of
from hotbed.files.uri import Uri, hide, local_part, read_uri

_BUFFER = 1 << 20
_FRESH = 5.0  # seconds for which the size and time of an object are believed
_stats: dict[str, tuple[float, FileStat]] = {}


class RemotePath(PosixPath):
    """A URI without its secrets."""

    __slots__ = ()

    def __str__(self) -> str:
        """scheme://bucket/key; pathlib keeps one slash."""
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest.lstrip('/')}"

    def __fspath__(self) -> str:
        """Nothing of the kernel works on a store."""
        raise RemoteError(f"{self} is in an object store, and this needs a local path. Copy it to a local disk first.")

    @property
    def uri(self) -> Uri:
        found = read_uri(str(self))
        assert found is not None, f"{super().__str__()} is not a URI"
        return found

    @property
    def store(self) -> Store:
        uri = self.uri
        return store_of(uri.scheme, uri.authority)

    @property
    def key(self) -> str:
        return self.uri.key

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        """Size and time, believed for a few seconds."""
        name, now = str(self), time.monotonic()
        known = _stats.get(name)
        if known is not None and now - known[0] < _FRESH:
            return known[1]
        found = self.store.stat(self.key)
        if found is None:
            raise FileNotFoundError(2, "it does not exist", name)
        if len(_stats) > 100_000:
            _stats.clear()
        _stats[name] = (now, found)
        return found

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.store.is_folder(self.key)

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]
        """What lies in a folder, by name."""
        yield from (path for path, _ in self.entries())

    def entries(self, *, recursive: bool = False) -> list[tuple[RemotePath, FileStat | None]]:
        """The same with the size and time of files; None for folders."""
        root, now, found = self.uri, time.monotonic(), []
        for entry in self.store.listed(root.key, recursive=recursive):
            path = RemotePath(str(root._replace(key=entry.key)))
            if entry.stat is not None:
                _stats[str(path)] = (now, entry.stat)
            found.append((path, entry.stat))
        return found

    def glob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        """Files and folders below this one that match, by name; ** stands for any number of folders."""
        deep = "/" in pattern or "**" in pattern
        start = len(self.key) + 1 if self.key else 0
        for path, _stat in self.entries(recursive=deep):
            if matches(path.key[start:], pattern):
                yield path

    def rglob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        return self.glob(f"**/{pattern}")

    def open(self, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> IO[Any]:  # type: ignore[override]
        """For reading; a small file is written with write_text or write_bytes."""
        if set(mode) - set("rbt"):
            raise RemoteError(f"{self} cannot be opened with mode {mode!r}: an object is written as a whole.")
        raw = RemoteFile(open_object(self))
        buffered = io.BufferedReader(raw, _BUFFER)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *arguments, **options)

    def content(self) -> RemoteObject:
        """The object as it is now, for reading ranges."""
        return open_object(self)

    def read_bytes(self) -> bytes:
        """The whole object, unbuffered and past the cache; for small files, which may be replaced at any time."""
        _stats.pop(str(self), None)
        return self.store.read(self.key, 0, self.stat().st_size)

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def write_bytes(self, data: Any) -> int:
        self.put(bytes(data))
        return len(data)

    def write_text(
        self, data: str, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> int:
        return self.write_bytes(data.encode(encoding or "utf-8", errors or "strict"))

    def put(self, content: bytes | Path) -> None:
        """Replace the object, in one step, by bytes or a local file."""
        _stats.pop(str(self), None)
        self.store.write(self.key, content)
        _stats.pop(str(self), None)

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok:
            self.stat()
        self.store.delete(self.key)
        _stats.pop(str(self), None)

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Folders need not be made."""

    def absolute(self) -> RemotePath:
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        return self

    def is_absolute(self) -> bool:
        return True

    def expanduser(self) -> RemotePath:
        return self


def path_of(place: str | Path) -> Path:
    """A local Path, or the RemotePath of a URI."""
    if isinstance(place, RemotePath):
        return place
    text = str(place)
    uri = read_uri(text)
    if uri is not None:
        return RemotePath(str(uri))
    local = local_part(text)
    return Path(local) if local != text or isinstance(place, str) else place


def is_remote(place: str | Path) -> bool:
    """Whether a text or a path names a place in a store."""
    return isinstance(place, RemotePath) or read_uri(str(place)) is not None


def shown_path(place: str | Path) -> str:
    """A path or URI as it may be written down: without secrets; local paths as they were given."""
    return str(path_of(place)) if is_remote(place) else hide(str(place))


def readable(path: Path) -> Any:
    """What pyarrow can open: a local path itself, a file object for a remote one."""
    return path.open("rb") if isinstance(path, RemotePath) else path


def copy_file(path: Path, local: Path) -> None:
    """Copy a file, local or remote, to a local path."""
    if not isinstance(path, RemotePath):
        shutil.copyfile(path, local)
        return
    with path.open("rb") as source, local.open("wb") as target:
        shutil.copyfileobj(source, target, _BUFFER)


def matches(name: str, pattern: str) -> bool:
    """Whether a name with slashes matches a pattern; * and ? stay within a folder, ** is any number of folders."""
    names, patterns = name.split("/"), pattern.split("/")

    def match(i: int, j: int) -> bool:
        if j == len(patterns):
            return i == len(names)
        if patterns[j] == "**":
            return any(match(k, j + 1) for k in range(i, len(names) + 1))
        return i < len(names) and fnmatch.fnmatchcase(names[i], patterns[j]) and match(i + 1, j + 1)

    return match(0, 0)


def size_of(file: IO[bytes]) -> int:
    """The bytes of an open binary file, local or remote."""
    at = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(at)
    return end
