"""A path of an object store that answers as pathlib.Path does: `/`, name, stat, iterdir, glob, open, read_text, unlink.

It is a Path, so what only reads files need not know where they are. A store has no rename, no lock, no mapping into memory and
nothing to flush: what needs these gets an error from `os.fspath` that names the path, never a local file of a similar name.
Folders exist while objects are below them; `mkdir` does nothing.

`RemoteFile` is the file object that `open` gives: any range of an object, through the cache of blocks. Read in order, it has
the next blocks fetched before they are asked for. `fetch_ahead` does so for a range that a caller knows it will read. At most
`_QUEUE` requests wait; more are dropped, because a reader fetches what is missing itself.
"""

from __future__ import annotations

import fnmatch
import io
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import IO, Any

from hotbed.errors import RemoteError
from hotbed.files.block_cache import BLOCK, Block, block_cache
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


def stat_now(path: Path) -> Any:
    """Size and time of a file, local or remote, as they are at this moment."""
    if isinstance(path, RemotePath):
        _stats.pop(str(path), None)
    return path.stat()


def pieces_now(path: Path) -> Iterator[bytes]:
    """The content of a file, local or remote, past the cache of blocks."""
    if isinstance(path, RemotePath):
        size = stat_now(path).st_size
        for begin in range(0, size, BLOCK):
            yield path.store.read(path.key, begin, min(begin + BLOCK, size), size)
        return
    with path.open("rb") as file:
        while piece := file.read(_BUFFER):
            yield piece


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


_AHEAD = 3  # blocks behind the one that is read in order
_THREADS = 8
_QUEUE = 64


class RemoteObject:
    """One object as it was when it was opened."""

    def __init__(self, uri: str, store: Store, key: str, stat: FileStat) -> None:
        self.uri, self.size = uri, stat.st_size
        self._store, self._key, self._time = store, key, stat.st_mtime_ns

    def read_into(self, out: Any, begin: int) -> int:
        """Fill `out`, a buffer of bytes, from a position on; the bytes that there were."""
        view = memoryview(out).cast("B")
        end = min(begin + len(view), self.size)
        at = begin
        while at < end:
            number = at // BLOCK
            content = self._get(number)
            start = at - number * BLOCK
            count = min(len(content) - start, end - at)
            view[at - begin : at - begin + count] = content[start : start + count]
            at += count
        return max(end - begin, 0)

    def fetch_ahead(self, begin: int, end: int) -> None:
        """Have a range fetched in the background; nothing waits for it."""
        cache = block_cache()
        for number in range(begin // BLOCK, (min(end, self.size) + BLOCK - 1) // BLOCK):
            if not cache.has(self._block(number)):
                _ahead.put(self, number)

    def _block(self, number: int) -> Block:
        return Block(self.uri, self.size, self._time, number)

    def _get(self, number: int) -> memoryview:
        block = self._block(number)
        return block_cache().get(block, lambda: self._store.read(self._key, block.begin, block.end, self.size))

    def prefetch(self, number: int) -> None:
        self._get(number)


class RemoteFile(io.RawIOBase):
    """A remote object as a binary file; give it a buffer for small reads."""

    def __init__(self, content: RemoteObject) -> None:
        super().__init__()
        self._object = content
        self._at = 0
        self._last = -1  # the block read last

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._object.size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = self._object.read_into(memoryview(buffer).cast("B"), self._at)
        self._at += count
        block = self._at // BLOCK
        if block == self._last + 1:
            self._object.fetch_ahead(block * BLOCK, (block + _AHEAD) * BLOCK)
        self._last = block
        return count


def open_object(path: RemotePath) -> RemoteObject:
    """The object of a path; a FileNotFoundError if there is none."""
    return RemoteObject(str(path), path.store, path.key, path.stat())


class _Ahead:
    """Daemon threads that fetch blocks; a process may end while they wait for a store that does not answer."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[tuple[RemoteObject, int]] = queue.Queue(_QUEUE)
        self._started = False
        self._lock = threading.Lock()

    def put(self, content: RemoteObject, number: int) -> None:
        with self._lock:
            if not self._started:
                self._started = True
                for _ in range(_THREADS):
                    threading.Thread(target=self._work, name="hotbed-ahead", daemon=True).start()
        try:
            self._tasks.put_nowait((content, number))
        except queue.Full:
            return

    def _work(self) -> None:
        while True:
            content, number = self._tasks.get()
            try:
                content.prefetch(number)
            except (RemoteError, OSError):
                continue  # who needs the block asks for it and gets the error


_ahead = _Ahead()
