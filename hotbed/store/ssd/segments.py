"""The segment files of one store: how many bytes may be written, which files are open, and when a file may be deleted.

A segment has a slot, a small number that is part of its records' places. Slot, file and descriptor stay while a reader is
active (`reading`) or a checkpoint in progress holds the segment. Then the file is deleted and its bytes are free again. Bytes
are reserved before they are written, so the files never exceed the cap, not even for a moment.

The folder is locked for one store. Segments that are in it when it is opened were left by a process that died. They are
deleted: rows outlive a process in checkpoints only.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError
from hotbed.store.ssd.format import HEADER_BYTES, Bits, Header, no_bits, pack_header, record_bytes

_LOCK_NAME = "lock"
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class Segment:
    """One file. `num_records` were written and indexed; the rest of `live` is room to grow."""

    def __init__(self, slot: int, path: Path, handle: int, header: Header, live: Bits) -> None:
        self.slot, self.path, self.handle, self.header, self.live = slot, path, handle, header, live
        self.num_records = 0
        self.num_holds = 0  # checkpoints in progress that need the file
        self.sealed = False  # nothing more is appended
        self.settled = True  # the index has all its records; before that, live ones look stale
        self.synced = False
        self.sync_error: OSError | None = None
        self.damaged = False  # compaction met a record that it cannot read, and skips the segment

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + self.num_records * record_bytes(self.header.width)


class Segments:
    """All segments of a store. `lock` guards everything here and the index of the store."""

    def __init__(self, folder: Path, width: int, capacity: int, max_bytes: int) -> None:
        self.folder, self.width, self.capacity, self.max_bytes = folder, width, capacity, max_bytes
        self.stride = record_bytes(width)
        self.lock = threading.RLock()
        self.all: list[Segment | None] = []  # by slot
        self.live_of_slot = np.zeros(64, dtype=np.int64)  # addresses of the bitmaps
        self.num_live = np.zeros(64, dtype=np.int64)
        self.used_bytes = 0
        self._freed = threading.Condition(self.lock)
        self._numbers = count()
        self._uuid = uuid.uuid4().bytes
        self._tickets, self._active = count(1), dict[int, int]()  # ticket of a reader -> its thread
        self._dead: list[tuple[int, Segment]] = []  # (last ticket that may read it, segment)
        self._process = os.getpid()
        self._files: NDArray[np.int64] | None = None  # descriptors and seeds by slot; made again when there are others
        self.num_changes = 0  # segments that came and went
        self._lock_handle = _lock(folder)
        with cannot_write(folder):
            for path in folder.glob("segment-*.rows"):
                path.unlink()

    def __iter__(self) -> Iterator[Segment]:
        """Segments that are in use."""
        return (segment for segment in list(self.all) if segment is not None)

    def reserve(self, num_bytes: int, limit: int) -> bool:
        """Reserve bytes of the cap, if no more than `limit` are used then."""
        with self.lock:
            if self.used_bytes + num_bytes > min(limit, self.max_bytes):
                return False
            self.used_bytes += num_bytes
            return True

    def unreserve(self, num_bytes: int) -> None:
        with self.lock:
            self.used_bytes -= num_bytes

    def create(self) -> Segment:
        """A new, empty segment with its header, whose bytes were reserved. OSError where the disk refuses."""
        header = Header(self.width, secrets.randbits(64), next(self._numbers), self._uuid)
        path = self.folder / header.name
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            write_fully(handle, memoryview(pack_header(header)), 0)
        except OSError:
            os.close(handle)
            with suppress(OSError):
                path.unlink()
            raise
        return self.register(path, handle, header, no_bits(self.capacity))

    def register(self, path: Path, handle: int, header: Header, live: Bits) -> Segment:
        """Give an open file a slot."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a hint: records are read at random, so reading ahead would only cost
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        with self.lock:
            if None not in self.all:
                self.all.append(None)
            slot = self.all.index(None)
            if slot >= self.num_live.size:
                self.num_live = np.concatenate([self.num_live, np.zeros_like(self.num_live)])
                self.live_of_slot = np.concatenate([self.live_of_slot, np.zeros_like(self.live_of_slot)])
            segment = Segment(slot, path, handle, header, live)
            self.all[slot] = segment
            self.num_live[slot], self.live_of_slot[slot] = 0, live.ctypes.data
            self._note_change()
        return segment

    def _note_change(self) -> None:
        """There is a segment more, or one less."""
        self._files = None
        self.num_changes += 1

    def skip_numbers(self, past: int) -> None:
        """New segments get numbers above this one."""
        with self.lock:
            self._numbers = count(max(next(self._numbers), past + 1))

    @contextmanager
    def reading(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Files stay while this is open: (descriptors, seeds) by slot. Enter it with `lock` held, at the time of the places."""
        with self.lock:
            files = self._files
            if files is None:
                files = np.full((2, len(self.all)), -1, dtype=np.int64)
                for segment in self:
                    files[0, segment.slot] = segment.handle
                    files[1, segment.slot] = np.uint64(segment.header.seed).view(np.int64)
                self._files = files
            ticket = next(self._tickets)
            self._active[ticket] = threading.get_ident()
        try:
            yield files[0], files[1]
        finally:
            with self.lock:
                self._active.pop(ticket, None)  # closing has dismissed all readers
                self.reap()

    def retire(self, segment: Segment) -> None:
        """Nothing in it is live: its file is deleted once it is no longer needed."""
        with self.lock:
            self._dead.append((next(self._tickets), segment))
            self.reap()

    def reap(self) -> None:
        """Delete dead segments that are no longer needed."""
        with self.lock:
            oldest = min(self._active, default=None)
            for ticket, segment in list(self._dead):
                if not segment.num_holds and (oldest is None or oldest >= ticket):
                    self._dead = [one for one in self._dead if one[1] is not segment]  # first: it is deleted once
                    self._delete(segment)
                    self._freed.notify_all()

    def wait_for_readers(self) -> None:
        """Return when every dead segment that no checkpoint holds is deleted; readers finish in a moment."""
        with self._freed:
            for ticket in [ticket for ticket, thread in self._active.items() if thread == threading.get_ident()]:
                del self._active[ticket]  # left by an interrupted read: this thread reads nothing now
            self.reap()
            self._freed.wait_for(lambda: all(segment.num_holds for _, segment in self._dead))

    def is_dead(self, segment: Segment) -> bool:
        return any(segment is dead for _, dead in self._dead)

    def drop(self, segment: Segment) -> None:
        """Delete a segment that was created by a write that failed."""
        with self.lock:
            self._delete(segment)

    def close(self) -> None:
        """Delete all files except held ones, and unlock the folder."""
        if self._process != os.getpid():  # a forked child: the files are its parent's
            return
        with self.lock:
            self._active.clear()
            for segment in self:
                if not self.is_dead(segment):
                    self._dead.append((0, segment))
            self.reap()
            if self._lock_handle >= 0:
                os.close(self._lock_handle)
                self._lock_handle = -1

    def _delete(self, segment: Segment) -> None:
        self.all[segment.slot] = None
        self.num_live[segment.slot] = 0
        self._note_change()
        with suppress(FileNotFoundError):
            segment.path.unlink()
        handle, segment.handle = segment.handle, -1
        if handle >= 0:  # an interrupt may have closed it before
            self.used_bytes -= segment.num_bytes
            os.close(handle)


def write_fully(handle: int, data: memoryview, offset: int) -> None:
    """All of the bytes, at this offset."""
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def start_writing_out(handle: int, offset: int, num_bytes: int) -> None:
    """Start writing these bytes to the disk now, before many are waiting: 1.9 instead of 1.3 GB/s until an fsync returns.

    A hint to the system. A caller that needs the bytes on the disk calls fsync, which reports errors.
    """
    if _sync_file_range is not None:
        _sync_file_range(handle, offset, num_bytes, 2)  # SYNC_FILE_RANGE_WRITE: start, do not wait


@contextmanager
def cannot_write(path: Path) -> Iterator[None]:
    """Turn an OSError of a write into a StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}. The rows written before are unharmed. Free some space there, "
            f"or give ssd= another folder."
        ) from error


def _lock(folder: Path) -> int:
    """A descriptor that keeps every other store out of the folder."""
    with cannot_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise StoreError(
            f"{folder} is in use by another store, of this or another process. Give every run an ssd= folder of its own, "
            f"or wait until the other one has ended."
        ) from error
    except OSError as error:
        os.close(handle)
        raise StoreError(f"{folder} cannot be locked ({error.strerror}). Use a folder on a local disk.") from error
    return handle
