"""Bytes of a remote object: any range, through the cache of blocks, fetched ahead of need by a few background threads.

`RemoteFile` is a file object. Read in order, it has the next blocks fetched before they are asked for. `fetch_ahead` does so
for a range that a caller knows it will read. At most `_QUEUE` requests wait; more are dropped, because a reader fetches what is
missing itself.
"""

from __future__ import annotations

import io
import queue
import threading
from typing import TYPE_CHECKING, Any

from hotbed.errors import RemoteError
from hotbed.files.block_cache import BLOCK, Block, block_cache
from hotbed.files.store import FileStat, Store

if TYPE_CHECKING:
    from hotbed.files.path import RemotePath

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
