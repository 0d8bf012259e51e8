"""What a followed log must offer: pieces that have arrived whole, and their rows, as often as they are asked for.

A source says which pieces are there (`arrived`) and reads one of them (`chunks`). It keeps no position: the journal lists the
pieces in the order in which they were taken, and a checkpoint holds a place in that list. So a source is right if it gives
the same rows for the same arrival every time, or refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from hotbed.data.formats import Chunk
from hotbed.data.raw_reader import RawReader

TRAIN, LATE, DUPLICATE, SKIPPED = "train", "late", "duplicate", "skipped"
TRAINED = (TRAIN, LATE)


class Arrival(NamedTuple):
    """A piece of a log that is whole: a file, or some messages."""

    name: str  # the path of a file below its folder, or offsets; no two arrivals that are trained have the same
    time: int  # seconds since 1970: when it was written
    mark: str  # of its content: a digest, or offsets
    size: int  # bytes of a file, or messages
    status: str = TRAIN  # TRAIN, LATE (trained, out of order), DUPLICATE or SKIPPED
    group: str = ""  # the partition of messages
    end: int = -1  # the offset after the last of them

    @property
    def is_trained(self) -> bool:
        return self.status in TRAINED


class Taken(Protocol):
    """What was taken before, as far as a source needs it."""

    def has_name(self, name: str) -> bool: ...

    def has_mark(self, mark: str) -> bool: ...

    def end_of(self, group: str) -> int:
        """Where the newest entry of a group ends; -1 before the first."""

    @property
    def greatest_name(self) -> str:
        """Of what was trained, in the order of names; empty before the first."""


class Source(Protocol):
    """A log that never ends."""

    name: str  # for messages

    def arrived(self, taken: Taken) -> list[Arrival]:
        """What has arrived whole and was not taken, in the order in which it is trained; returns at once."""

    def chunks(self, arrival: Arrival, reader: RawReader) -> Iterator[Chunk]:
        """Its rows, for this reader; the same at every call, or a DataError."""

    def close(self) -> None:
        """Give back connections."""
