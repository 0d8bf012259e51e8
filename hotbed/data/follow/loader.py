"""A followed log in, batches out: the counterpart of data/loader for data that has no end.

Batches are cut from one arrival at a time, in its order; the last of an arrival may be short. So they depend on the arrivals in
the order of the journal and on nothing else: not on when something came, nor on where a run was stopped. `epoch` yields what is
there and ends; the caller waits and asks again. `next` is the place of the first batch that was not trained.

Every batch has a `BatchFacts`: its place, its event time, and for every hour of its rows what is known before it is trained:
rows, unknown ids, and ids by bucket. The time of a row is that of the time column, but at most a day after its arrival was
written; without a time column it is the time of the arrival.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hotbed.data.dataset import Dataset
from hotbed.data.encode import EncodedRows
from hotbed.data.follow.source import SKIP, Arrival, Journal, Source
from hotbed.data.formats.chunk import offsets_of
from hotbed.data.loader.loader import RankHistory
from hotbed.data.prepare.quarantine import Quarantine
from hotbed.data.raw_reader import RawReader, batch_of
from hotbed.data.times import SECOND
from hotbed.data.values import Bags
from hotbed.errors import FormatError, RunError
from hotbed.host.splitmix import GOLDEN
from hotbed.types import Batch

HOUR = 3600
BUCKETS = 256  # of ids, for drift
_MOST_AHEAD = 86_400  # seconds: a wrong clock of one writer must not make the rows of all others old
_EARLIEST, _LATEST = 1, 2**32 - 1  # seconds that dynamic ids take


class Place(NamedTuple):
    """Where a run stands in its log."""

    arrival: int = 0  # in the journal
    batch: int = 0  # of that arrival
    watermark: int = 0  # greatest event time so far, in seconds

    @classmethod
    def read(cls, saved: dict[str, Any]) -> Place:
        return cls(**{name: int(saved[name]) for name in cls._fields})


class HourPart(NamedTuple):
    """The rows of one hour in a batch."""

    hour: int  # since 1970
    rows: np.ndarray | None  # bool [B]; None: all
    unknown: np.ndarray  # int64 [F]: lookups of row 0 of a vocabulary
    buckets: np.ndarray  # int64 [F, BUCKETS]: lookups


class BatchFacts(NamedTuple):
    """What is known of a batch before it is trained."""

    after: Place
    size: int
    parts: tuple[HourPart, ...]
    bad_rows: int  # of the lines since the previous batch


class FollowLoader:
    """Batches of a source, for one process."""

    num_rows = 0  # not known

    def __init__(self, dataset: Dataset, source: Source, journal: Journal, reader: RawReader, batch_size: int) -> None:
        self.dataset, self.source, self.journal = dataset, source, journal
        self.batch_size = batch_size
        self.next = Place()
        self._reader = reader
        self._ahead: deque[BatchFacts] = deque()  # of batches that were handed out and not trained
        self._seconds: dict[int, int] = {}  # number of a training batch, from 1 -> event time
        self._trained = 0
        self._end: Place | None = None  # behind the last batch that was handed out, once all were
        self._vocabularies = np.array([one.mode == "vocabulary" for one in dataset.schema.features])

    def __len__(self) -> int:
        """No number of batches makes an epoch."""
        return 0

    @property
    def described(self) -> str:
        """For the first line of a run."""
        return f"following {self.source.name}"

    def size_of(self, batch: int) -> int:
        """Samples of the batch that is trained next."""
        return self._ahead[0].size

    def second_of(self, number: int) -> float:
        """The event time of a training batch, for rows that expire; batches are numbered from 1."""
        return float(self._seconds[number])

    def look(self) -> bool:
        """Write down what has arrived; whether there is something to train."""
        if self._end is not None and not self._ahead:
            self.next = self._end  # arrivals without a row leave no batch
        self.journal.append(self.source.arrived(self.journal))
        return any(one.is_trained for one in self.journal.entries[self.next.arrival :])

    def epoch(self, epoch: int, start_batch: int = 0, history: RankHistory = ()) -> Generator[Batch, None, None]:
        """The batches that are there, from `next` on; `start_batch` is how many were trained."""
        self._ahead.clear()
        self._seconds.clear()
        self._trained, self._end = start_batch, None
        return self._read(self.next, start_batch)

    def trained(self) -> BatchFacts:
        """The oldest batch that was handed out is trained."""
        facts = self._ahead.popleft()
        self.next = facts.after
        self._trained += 1
        self._seconds.pop(self._trained - 1, None)
        return facts

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the place, and what was read there."""
        last = self.journal.entries[self.next.arrival - 1] if self.next.arrival else None
        return {**self.next._asdict(), "last": last and last._asdict()}

    def load_state(self, saved: dict[str, Any]) -> None:
        """Go to a place; a RunError unless the journal is the one of the checkpoint."""
        place, last = Place.read(saved), saved.get("last")
        entries = self.journal.entries
        fits = place.arrival <= len(entries) and (not last or entries[place.arrival - 1]._asdict() == last)
        if not fits:
            raise RunError(
                f"{self.journal.path} is not the list of arrivals of this checkpoint, which had read {place.arrival:,} of "
                "them. Bring the file back, or start a new run with --warm-start."
            )
        self.next = place

    def _read(self, place: Place, number: int) -> Generator[Batch, None, None]:
        while place.arrival < len(self.journal):
            current = place.arrival
            arrival = self.journal.entries[current]
            for batch, facts in self._with_way_out(arrival, place) if arrival.is_trained else ():
                number += 1
                self._seconds[number] = min(max(facts.after.watermark, _EARLIEST), _LATEST)
                self._ahead.append(facts)
                place = facts.after
                yield batch
                del batch
            if place.arrival == current:  # nothing was left of it
                place = Place(current + 1, 0, place.watermark)
        self._end = place

    def _with_way_out(self, arrival: Arrival, place: Place) -> Iterator[tuple[Batch, BatchFacts]]:
        """`_batches`, whose errors say how the run can continue without the arrival."""
        try:
            yield from self._batches(arrival, place)
        except FormatError as error:
            if SKIP in str(error):
                raise
            raise FormatError(
                f"{error} To continue without what is left of it: `hotbed train --resume RUN --set "
                f"{shlex.quote(f'{SKIP}={arrival.name}')}`; a corrected copy under another name is trained as it arrives. "
                "More bad rows are accepted with --set follow.max_bad=N%."
            ) from error

    def _batches(self, arrival: Arrival, place: Place) -> Iterator[tuple[Batch, BatchFacts]]:
        """The batches of one arrival, from a place in it on; the place after the last is the beginning of the next arrival."""
        quarantine = self._reader.new_quarantine()
        watermark, held = place.watermark, None
        for number, rows in enumerate(self._cut(arrival, quarantine)):
            if number < place.batch:
                continue
            if held is not None:
                yield held
            times = np.full(len(rows.labels), arrival.time) if rows.times is None else rows.times // SECOND
            times = np.minimum(times, arrival.time + _MOST_AHEAD)
            watermark = max(watermark, int(times.max()))
            batch = batch_of(rows, self.dataset.schema, self._reader.rows_of, 0, len(rows.labels))
            after = Place(place.arrival, number + 1, watermark)
            held = batch, BatchFacts(after, batch.size, self._parts(batch, times // HOUR), 0)
        quarantine.check()
        if held is not None:
            batch, facts = held
            last = facts._replace(after=Place(place.arrival + 1, 0, watermark), bad_rows=quarantine.bad_rows)
            yield batch, last

    def _cut(self, arrival: Arrival, quarantine: Quarantine) -> Iterator[EncodedRows]:
        """The good rows of an arrival, batch by batch."""
        rest: EncodedRows | None = None
        for chunk in self.source.chunks(arrival, self._reader):
            encoded = self._reader.encode(chunk, Path(arrival.name))
            quarantine.add(encoded.bad, len(encoded.lines))
            rows = encoded if rest is None else _joined(rest, encoded)
            whole = len(rows.labels) - len(rows.labels) % self.batch_size
            for start in range(0, whole, self.batch_size):
                yield _some(rows, start, start + self.batch_size)
            rest = _some(rows, whole, len(rows.labels))
        if rest is not None and len(rest.labels):
            yield rest

    def _parts(self, batch: Batch, hours: np.ndarray) -> tuple[HourPart, ...]:
        """What is known of the rows of every hour in a batch."""
        present = np.unique(hours)
        features = _lookups(batch, [one.name for one in self.dataset.schema.features])
        parts = []
        for hour in present:
            rows = None if len(present) == 1 else hours == hour
            unknown, buckets = np.zeros(len(features), np.int64), np.zeros((len(features), BUCKETS), np.int64)
            for number, (ids, samples) in enumerate(features):
                chosen = ids if rows is None else ids[rows[samples]]
                unknown[number] = np.count_nonzero(chosen == 0) if self._vocabularies[number] else 0
                spread = (chosen.view(np.uint64) * GOLDEN) >> np.uint64(56)
                buckets[number] = np.bincount(spread.astype(np.int64), minlength=BUCKETS)
            parts.append(HourPart(int(hour), rows, unknown, buckets))
        return tuple(parts)


def _lookups(batch: Batch, names: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, their samples) of every feature, in schema order."""
    samples = np.arange(batch.size)
    single = iter(np.ascontiguousarray(batch.ids.numpy().T))
    found = []
    for name in names:
        if name in batch.bags:
            values, offsets = batch.bags[name].values.numpy(), batch.bags[name].offsets.numpy()
            found.append((values, np.repeat(samples, np.diff(offsets))))
        else:
            found.append((next(single), samples))
    return found


def _joined(one: EncodedRows, other: EncodedRows) -> EncodedRows:
    """The rows of both."""
    times = None if one.times is None or other.times is None else np.concatenate([one.times, other.times])
    return EncodedRows(
        np.concatenate([one.labels, other.labels]),
        [np.concatenate(pair) for pair in zip(one.dense, other.dense)],
        [_joined_ids(*pair) for pair in zip(one.ids, other.ids)],
        np.concatenate([one.lines, other.lines]),
        [],
        times,
    )


def _joined_ids(one: np.ndarray | Bags, other: np.ndarray | Bags) -> np.ndarray | Bags:
    if isinstance(one, Bags) and isinstance(other, Bags):
        lengths = np.concatenate([np.diff(one.offsets), np.diff(other.offsets)])
        return Bags(offsets_of(lengths), np.concatenate([one.ids, other.ids]))
    assert not isinstance(one, Bags), "a feature has bags in one chunk and not in the next"
    assert not isinstance(other, Bags), "a feature has bags in one chunk and not in the one before"
    return np.concatenate([one, other])


def _some(rows: EncodedRows, start: int, stop: int) -> EncodedRows:
    """Rows start .. stop - 1."""
    times = None if rows.times is None else rows.times[start:stop]
    ids = [_some_ids(one, start, stop) for one in rows.ids]
    return EncodedRows(
        rows.labels[start:stop], [one[start:stop] for one in rows.dense], ids, rows.lines[start:stop], [], times
    )


def _some_ids(ids: np.ndarray | Bags, start: int, stop: int) -> np.ndarray | Bags:
    if not isinstance(ids, Bags):
        return ids[start:stop]
    offsets = ids.offsets[start : stop + 1]
    return Bags(offsets - offsets[0], ids.ids[offsets[0] : offsets[-1]])
