"""Compaction: copies the live records of mostly stale segments together and deletes these segments.

A segment is rewritten when more than half of its records are stale, or when freezing has left many short ones. The copy is
appended to a segment of its own, piece by piece. The index follows a record only if its entry is still what it was when the
record was copied. Readers, writers and freezing continue meanwhile: locks are held for one piece at most.

With a limit of one half, a byte of rows takes at most two on disk, and copying writes at most one more byte per byte written.

A full disk refuses the copy in the background. That loses nothing, and rows may still fit although stale ones stay. It is
reported once, tried again when the files have grown or shrunk by a segment, and an error when a write has no room.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

import numpy as np

from hotbed.errors import DISK_FULL, StoreError
from hotbed.store.ssd.append import Appender, NoRoomError
from hotbed.store.ssd.kernels import relocate
from hotbed.store.ssd.places import Places
from hotbed.store.ssd.scan import SegmentFile, scan
from hotbed.store.ssd.segments import Segment, Segments

_SPARE_SEGMENTS = 16
_LOG = logging.getLogger("hotbed.store")


class StaleSegment(NamedTuple):
    """A segment worth rewriting."""

    segment: Segment
    num_live: int


class Compaction:
    """Copies segments, one at a time. `lock` is held by the thread that compacts: the background, or a writer without room."""

    def __init__(self, segments: Segments, places: Places) -> None:
        self.lock = threading.Lock()
        self.appender = Appender(segments)
        self.num_done = 0
        self._segments, self._places = segments, places
        self._stopped = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._full_at: int | None = None  # bytes in use when the disk had no room for a copy
        self._has_said = False
        self._idle_at = (-1, -1)  # what `_standing` was when there was nothing to do

    def start_behind(self) -> None:
        """Compact in the background, if there is anything to do and no thread does it."""
        standing = self._standing()
        if standing == self._idle_at:
            return
        segment = self.candidate()
        if segment is None:
            self._idle_at = standing
        if segment is None or (self._segments.num_live[segment.slot] and self._is_still_full()):
            return
        with self._starting:
            if not self._stopped and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._behind, name="hotbed-compaction", daemon=True)
                self._thread.start()

    def _standing(self) -> tuple[int, int]:
        """Changes when a full segment has become a candidate; to ask all segments took 0.2 ms after every write."""
        segments = self._segments
        return int(np.count_nonzero(2 * segments.num_live < segments.capacity)), segments.num_changes

    def wait(self) -> None:
        """Wait until the background has nothing to do."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def stop(self) -> None:
        """Stop at the next piece, for good."""
        with self._starting:
            self._stopped = True
        self.wait()

    def raise_error(self) -> None:
        """Raise the error of the background, once."""
        error, self._error = self._error, None
        if error is not None:
            raise StoreError(f"compaction in the background failed: {error}") from error

    def make_room(self, num_bytes: int, limit: int, writer: Appender) -> bool:
        """Compact now until `num_bytes` fit under the limit; whether they do. The caller holds the writer's lock."""
        segments = self._segments
        if int(segments.num_live.sum()) * segments.stride + num_bytes > limit:
            return False
        with self.lock:
            sealed = False
            while True:
                segments.wait_for_readers()
                if segments.used_bytes + num_bytes <= limit:
                    return True
                segment = self.most_stale()
                if segment is None and not sealed:
                    with self.appender.lock, segments.lock:
                        writer.seal()
                        self.appender.seal()
                    sealed = True
                elif segment is None or not self.rewrite(segment):
                    return False

    def _behind(self) -> None:
        try:
            while not self._stopped:
                with self.lock:
                    segment = self.candidate()
                    if segment is None or not self.rewrite(segment):
                        return
        except BaseException as error:
            if _is_full(error):
                self._note_full(error)
            else:
                self._error = error  # for the next call

    def _note_full(self, error: BaseException) -> None:
        self._full_at = self._segments.used_bytes
        if not self._has_said:
            self._has_said = True
            _LOG.warning(
                "compaction waits, stale rows stay on the disk, and training continues while rows fit: %s", error
            )

    def _is_still_full(self) -> bool:
        """Whether trying again would almost certainly fail, at the cost of a copy."""
        if self._full_at is None:
            return False
        segments = self._segments
        if abs(segments.used_bytes - self._full_at) < segments.capacity * segments.stride:
            return True
        self._full_at = None
        return False

    def candidate(self) -> Segment | None:
        """A segment that is more than half stale, or a short one where there are too many files."""
        capacity = self._segments.capacity
        with self._segments.lock:
            stale = self._sealed()
            total = int(self._segments.num_live.sum())
            for segment, num_live in sorted(stale, key=lambda one: one.num_live):  # first those that need no copy
                if 2 * num_live < segment.num_records or segment.num_records == 0:
                    return segment
            if stale and len(stale) > _SPARE_SEGMENTS + 2 * -(-total // capacity):
                segment, num_live = min(stale, key=lambda one: one.num_live)
                return segment if 2 * num_live <= capacity else None
        return None

    def most_stale(self) -> Segment | None:
        """The segment whose rewriting frees most bytes, if any does."""
        with self._segments.lock:
            found = max(self._sealed(), key=lambda one: one.segment.num_records - one.num_live, default=None)
            return None if found is None or found.segment.num_records == found.num_live else found.segment

    def rewrite(self, segment: Segment) -> bool:
        """Copy live records and retire the segment; False if there is no room for the copy or the store is closing."""
        segments = self._segments
        with segments.lock:
            live = segment.live.copy()
        file = SegmentFile(segment.path, segment.handle, segment.header)
        old = segment.slot << 32
        try:
            for found in scan(file, segment.num_records, live):
                if self._stopped:
                    return False
                with self.appender.lock:
                    pieces = self.appender.append(found.keys, found.records, segments.max_bytes)
                    with segments.lock:
                        for piece in pieces:
                            part = slice(piece.start, piece.stop)
                            relocate(
                                self._places.words,
                                found.keys[part],
                                old,
                                found.numbers[part],
                                piece.place,
                                segments.live_of_slot,
                                segments.num_live,
                            )
                        self.appender.settle(pieces)
        except NoRoomError:
            return False
        except BaseException as error:
            segment.damaged = not _is_full(error)
            raise
        left = int(segments.num_live[segment.slot])
        assert left == 0, f"{segment.path}: {left} of {segment.num_records} records are live and were not copied"
        segments.retire(segment)
        self.num_done += 1
        return True

    def _sealed(self) -> list[StaleSegment]:
        return [
            StaleSegment(segment, int(self._segments.num_live[segment.slot]))
            for segment in self._segments
            if segment.sealed
            and segment.settled
            and not (segment.num_holds or segment.damaged or self._segments.is_dead(segment))
        ]


def _is_full(error: BaseException) -> bool:
    """Whether the disk had no room; reading never fails this way."""
    return isinstance(error, StoreError) and isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL
