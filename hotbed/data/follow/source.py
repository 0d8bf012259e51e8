"""What a followed log must offer: pieces that have arrived whole, and their rows, as often as they are requested.

A source says which pieces are there (`arrived`) and reads one of them (`chunks`). It keeps no position: the journal lists the
pieces in the order in which they were taken, and a checkpoint holds a place in that list. So a source is right if it gives
the same rows for the same arrival every time, or refuses.

The journal is RUN/arrivals.jsonl, one line for each piece, on the disk before the first row of it is trained. A checkpoint says
how many lines were trained and how many batches of the next one. A follower that was killed reads the lines after its
checkpoint again and trains them in the same order, whatever has arrived since. A last line that was cut off by a power loss was
never used and is removed. The price is one flush to disk for every file, and some 150 bytes a file for ever.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from hotbed.data.formats import Chunk
from hotbed.data.raw_reader import RawReader
from hotbed.errors import RunError
from hotbed.host.atomic import flush_to_disk, writing

TRAIN, LATE, DUPLICATE, SKIPPED = "train", "late", "duplicate", "skipped"
TRAINED = (TRAIN, LATE)
FILE = "arrivals.jsonl"
SKIP = "follow.skip"  # the setting


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


class Source(Protocol):
    """A log that never ends."""

    name: str  # for messages

    def arrived(self, taken: Journal) -> list[Arrival]:
        """What has arrived whole and was not taken, in the order in which it is trained; returns at once."""

    def chunks(self, arrival: Arrival, reader: RawReader) -> Iterator[Chunk]:
        """Its rows, for this reader; the same at every call, or a DataError."""

    def close(self) -> None:
        """Give back connections."""


class Journal:
    """The list of arrivals; appended to, never changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Arrival] = []
        self._names: set[str] = set()
        self._marks: set[str] = set()
        self._greatest = ""
        self._ends: dict[str, int] = {}
        if path.exists():
            self._load()

    def __len__(self) -> int:
        return len(self.entries)

    def has_name(self, name: str) -> bool:
        return name in self._names

    def has_mark(self, mark: str) -> bool:
        return mark in self._marks

    def end_of(self, group: str) -> int:
        """Where the newest entry of a group ends; -1 before the first."""
        return self._ends.get(group, -1)

    @property
    def greatest_name(self) -> str:
        """The last name, in sorted order, among the files that were trained; empty before the first."""
        return self._greatest

    def append(self, arrivals: Iterable[Arrival]) -> None:
        """On the disk when this returns."""
        new = list(arrivals)
        if not new:
            return
        is_first = not self.path.exists()
        with writing(self.path):
            with self.path.open("ab") as file:
                file.write(b"".join(json.dumps(one._asdict()).encode() + b"\n" for one in new))
                file.flush()
                os.fsync(file.fileno())
            if is_first:
                flush_to_disk(self.path.parent)
        for one in new:
            self._add(one)

    def _add(self, arrival: Arrival) -> None:
        self.entries.append(arrival)
        self._names.add(arrival.name)
        if arrival.group:
            self._ends[arrival.group] = arrival.end
        if arrival.is_trained:
            self._marks.add(arrival.mark)
            self._greatest = max(self._greatest, arrival.name)

    def _load(self) -> None:
        with writing(self.path):
            whole = self.path.read_bytes()
            kept = whole.rfind(b"\n") + 1
            if kept < len(whole):
                os.truncate(self.path, kept)
        for number, line in enumerate(whole[:kept].splitlines(), 1):
            try:
                self._add(Arrival(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise RunError(
                    f"{self.path} is damaged in line {number} ({error}). Without it the order of the files that were trained "
                    "is not known: restore the file, or start a new run with --warm-start."
                ) from error
