"""Blocks of remote files on the local disk, within a budget of bytes that all processes of a machine share.

    ROOT/blocks/<digest>          4 MiB of one object, then its CRC32; named by URI, size, time and block number
    ROOT/copies/<digest>/         whole folders, and the lock of each that is in use (copies.py)
    ROOT/lock, ROOT/used          one process at a time makes room, and the bytes in use

A block is written to a temporary file and renamed, and its checksum is verified at every read. A killed process or a power loss
costs a fetch and never a wrong byte, so nothing is flushed. What was used least recently goes first. With a budget of 0, the
last few blocks are kept in memory only.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hotbed.errors import RemoteError, without_room
from hotbed.files.settings import CACHE_VARIABLE, READ_CACHE_VARIABLE, cache_root, read_cache_bytes
from hotbed.host.memory import in_words

BLOCK = 4 << 20
_TAIL = 4  # bytes of the checksum
_IN_MEMORY = 8  # blocks
_LEAST_ROOM = 0.05  # of the budget: making room frees at least this much


class Block(NamedTuple):
    """One block of an object, as it is now."""

    uri: str
    size: int  # of the object
    time: int
    number: int

    @property
    def begin(self) -> int:
        return self.number * BLOCK

    @property
    def end(self) -> int:
        return min(self.begin + BLOCK, self.size)

    @property
    def name(self) -> str:
        return hashlib.sha256(f"{self.uri}\n{self.size}\n{self.time}\n{self.number}".encode()).hexdigest()[:40]


class BlockCache:
    """Blocks by name; what is missing is fetched once, whoever asks."""

    def __init__(self, root: Path, budget: int) -> None:
        self.budget = budget
        self.folder = CacheFolder(root, budget)
        self._recent: OrderedDict[str, memoryview] = OrderedDict()
        self._fetching: dict[str, Future[memoryview]] = {}
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def get(self, block: Block, fetch: Callable[[], bytes]) -> memoryview:
        """The bytes of a block, from memory, from the disk, or by `fetch`. Threads that ask at once share one fetch."""
        name = block.name
        with self._lock:
            if (found := self._recent.get(name)) is not None:
                self._recent.move_to_end(name)
                self.hits += 1
                return found
            pending = self._fetching.get(name)
            if pending is None:
                mine = self._fetching[name] = Future()
        if pending is not None:
            return pending.result()
        try:
            content = self.folder.read(name, block.end - block.begin)
            if content is None:
                content = memoryview(fetch())
                self.folder.add(name, content)
                self.misses += 1
            else:
                self.hits += 1
        except BaseException as error:
            with self._lock:
                del self._fetching[name]
            mine.set_exception(error)
            raise
        with self._lock:
            self._recent[name] = content
            while len(self._recent) > _IN_MEMORY:
                self._recent.popitem(last=False)
            del self._fetching[name]
        mine.set_result(content)
        return content

    def has(self, block: Block) -> bool:
        """Whether a block is here or on its way."""
        name = block.name
        with self._lock:
            if name in self._recent or name in self._fetching:
                return True
        return self.folder.has(name)


class CacheFolder:
    """The files of the cache, and its budget."""

    def __init__(self, root: Path, budget: int) -> None:
        self.root, self._budget = root, budget
        self._counted = False

    def has(self, name: str) -> bool:
        return self._budget > 0 and (self.root / "blocks" / name).exists()

    def read(self, name: str, size: int) -> memoryview | None:
        """A block that is there and undamaged."""
        if not self._budget:
            return None
        path = self.root / "blocks" / name
        try:
            content = memoryview(path.read_bytes())
            body = content[:-_TAIL]
            if len(body) == size and zlib.crc32(body).to_bytes(_TAIL, "little") == content[-_TAIL:]:
                os.utime(path)  # it was used now
                return body
        except OSError:
            pass
        return None

    def add(self, name: str, content: bytes | memoryview) -> None:
        """Keep a block, if the budget has room for it; a disk that refuses only costs a fetch later."""
        size = len(content) + _TAIL
        if size > self._budget:
            return
        path = self.root / "blocks" / name
        temporary = path.with_name(f"{name}.{secrets.token_hex(4)}.tmp")
        with suppress(OSError):
            try:
                self.reserve(size, what="a block")
                with temporary.open("wb") as file:
                    file.write(content)
                    file.write(zlib.crc32(content).to_bytes(_TAIL, "little"))
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    def reserve(self, size: int, what: str) -> None:
        """Make room for that many bytes and count them as used."""
        if size > self._budget:
            raise RemoteError(
                f"{what} has {in_words(size)}; local copies of remote files may take {in_words(self._budget)} "
                f"(--read-cache, {READ_CACHE_VARIABLE}). Raise it, or copy the files yourself."
            )
        with self._locked():
            used = self._count() if not self._counted else self._noted()
            if used + size > self._budget:
                used = self._make_room(size)
            (self.root / "used").write_text(str(used + size))
            self._counted = True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        for folder in ("blocks", "copies"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _noted(self) -> int:
        try:
            return int((self.root / "used").read_text())
        except (OSError, ValueError):
            return self._count()

    def _count(self) -> int:
        return sum(size for _, size, _ in self._entries())

    def _entries(self) -> list[tuple[int, int, Path]]:
        """(time of the last use, bytes, path) of every block and every copy."""
        found = []
        for folder in ("blocks", "copies"):
            for path in (self.root / folder).iterdir():
                with suppress(OSError):  # removed meanwhile
                    if path.is_dir():
                        size = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
                    else:
                        size = path.stat().st_size
                    found.append((path.stat().st_mtime_ns, size, path))
        return found

    def _make_room(self, size: int) -> int:
        """Remove the oldest entries that nobody uses; the bytes that stay."""
        entries = sorted(self._entries())
        used = sum(one for _, one, _ in entries)
        goal = min(self._budget - size, int(self._budget * (1 - _LEAST_ROOM)))
        for _, one, path in entries:
            if used <= goal:
                break
            if path.is_dir():
                if not is_unused(path):
                    continue
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            used -= one
        if used + size > self._budget:
            raise without_room(
                RemoteError,
                f"{self.root} has no room for {in_words(size)} more: copies in use take {in_words(used)} of "
                f"{in_words(self._budget)}. Raise --read-cache ({READ_CACHE_VARIABLE}), or set {CACHE_VARIABLE}.",
            )
        return used


def is_unused(copy: Path) -> bool:
    """Whether no process holds the lock of a copied folder."""
    try:
        with (copy / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@functools.lru_cache(maxsize=8)
def _cache(root: Path, budget: int) -> BlockCache:
    return BlockCache(root, budget)


def block_cache() -> BlockCache:
    """The cache of this process, as the settings are now."""
    return _cache(cache_root() / "remote", read_cache_bytes())
