"""RUN/arrivals.jsonl: what a follower took, in order, one line each, on the disk before the first row of it is trained.

A checkpoint says how many lines were trained and how many batches of the next one. A follower that was killed reads the lines
behind its checkpoint again and trains them in the same order, whatever has arrived since. A last line that was cut off by a
power loss was never used and is removed. The price is one flush to disk for every file, and some 150 bytes a file for ever.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from hotbed.data.follow.source import Arrival
from hotbed.errors import RunError
from hotbed.host.atomic import flush_to_disk, writing

FILE = "arrivals.jsonl"


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
        return self._ends.get(group, -1)

    @property
    def greatest_name(self) -> str:
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
