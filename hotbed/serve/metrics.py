"""The counters of a server, always on, for prometheus_client; those of several workers are added up (board.py).

prometheus_client writes the answers of /metrics. Its own counters would take 14 to 18 us of a request instead of 3 to 4 (two
busy cores), and would not be read together.
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from hotbed.host.memory import resident_memory, shared_out_memory
from hotbed.scorer import Scorer
from hotbed.scorer.rows import FileRows, RowCounts
from hotbed.serve.board import NUM_BUCKETS, UPDATES, Board, WorkerPart, Writing

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # seconds
assert len(_BOUNDS) + 1 == NUM_BUCKETS
_NO_LOOKUPS = RowCounts(0, 0, 0)
_STALE = "1 while the newest model is refused and an older one is in use."


class ServerMetrics:
    """The counters of one worker, and the sums of all."""

    def __init__(self, board: Board, number: int = 0) -> None:
        self.board, self.own = board, board.parts[number]
        self._writing = Writing(self.own)
        self._answers, self._buckets = self.own.answers, self.own.buckets  # fetched once: each takes 0.1 us
        self._counted: WeakKeyDictionary[FileRows, RowCounts] = (
            WeakKeyDictionary()
        )  # lookups, of the old and the new model
        self.last_error = ""
        self.own.in_flight = self.own.stale = 0
        self.own.updated, self.own.pid = time.time(), os.getpid()

    def answered(self, status: int, seconds: float) -> None:
        """Count an answered request."""
        with self._writing:
            self._answers[status] += 1
            self._buckets[bisect_left(_BOUNDS, seconds)] += 1
            self.own.seconds += seconds

    def scored(self, requests: int, candidates: int, rows: FileRows) -> None:
        """Count a batch of `requests` requests, whose rows were looked up there."""
        own = self.own
        with self._writing:
            own.batches += 1
            own.batched += requests
            own.candidates += candidates
            self._count_lookups(rows)

    def _count_lookups(self, rows: FileRows) -> None:
        counts = rows.counts()
        for place, (count, counted) in enumerate(zip(counts, self._counted.get(rows, _NO_LOOKUPS))):
            self.own.lookups[place] += count - counted
        self._counted[rows] = counts

    def uses(self, scorer: Scorer, written: float = 0.0) -> None:
        """The scorer's current model was written at this time, in seconds since 1970; 0: not known."""
        version, own = scorer.version, self.own
        named = re.match(r"step-(\d+)-", version)  # an incremental update leaves the source as it was
        step = int(named[1]) if named else scorer.source.step
        with self._writing:
            own.version, own.step = version.encode()[:127], -1 if step is None else step
            own.written, own.rows_bytes = written, scorer.num_bytes

    def ask_reload(self) -> int:
        """Ask all workers to look for a newer model; returns how often that was asked."""
        with self._writing:
            self.own.reloads_asked += 1
            return self.board.reloads

    @property
    def model_age(self) -> float | None:
        """Seconds since the current model was written; None if that is not known."""
        return _age(self.own)

    def updated(self, way: str) -> None:
        """Count a new version that is in use now."""
        with self._writing:
            self.own.updates[UPDATES.index(way)] += 1
            self.own.updated, self.own.stale = time.time(), 0
            self.last_error = ""

    def up_to_date(self) -> None:
        """There is no newer version than the one in use; one that was refused may have gone."""
        if self.own.stale:
            with self._writing:
                self.own.stale = 0
                self.last_error = ""

    def not_updated(self, error: str) -> None:
        """Count a new version that was refused; the old one stays in use."""
        with self._writing:
            self.own.failed_updates += 1
            self.own.stale = 1
            self.last_error = error

    def text(self, accept: str) -> tuple[bytes, str]:
        """The answer in a format that the client accepts, and its content type."""
        registry = CollectorRegistry()
        registry.register(_Snapshot([*self._families()]))
        write, kind = choose_encoder(accept)
        return write(registry), kind

    def _families(self) -> Iterator[Metric]:
        parts = self.board.copies()
        running = [part for part in parts if part.ready] or [self.own]
        yield from _of_requests(parts)
        yield from _of_models(parts, running)
        yield _one("in_flight", "Requests being answered now.", sum(part.in_flight for part in parts))
        yield _one("rows_bytes", "Memory of rows and their indexes.", sum(part.rows_bytes for part in running))
        yield _one(
            "resident_bytes", "Memory of the server; pages that workers share count once.", self._memory(running)
        )
        yield _one("workers", "Worker processes that take requests.", len(running))
        yield _one(
            "worker_restarts_total", "Worker processes that died and were restarted.", self.board.server.restarts
        )
        yield _by(
            "row_lookups_total", "Rows looked up, by place.", "place", _summed(parts, "lookups", RowCounts._fields)
        )

    def _memory(self, running: Sequence[WorkerPart]) -> int:
        if len(self.board.parts) == 1:
            return resident_memory() or 0
        return sum(shared_out_memory(pid) or 0 for pid in (os.getppid(), *(part.pid for part in running)))


def _of_requests(parts: Sequence[WorkerPart]) -> Iterator[Metric]:
    answers: Counter[int] = Counter()
    for part in parts:
        answers.update({status: count for status, count in enumerate(part.answers) if count})
    yield _by("requests_total", "Requests answered, by status.", "status", sorted(answers.items()))
    about = "Seconds from the first byte of a request to its answer."
    counts = accumulate(sum(column) for column in zip(*(part.buckets for part in parts)))
    buckets, seconds = list(zip([*map(str, _BOUNDS), "+Inf"], counts)), sum(part.seconds for part in parts)
    yield HistogramMetricFamily("hotbed_serve_request_seconds", about, buckets=buckets, sum_value=seconds)
    yield _one("candidates_total", "Candidates scored.", sum(part.candidates for part in parts))
    yield _one("batches_total", "Batches scored.", sum(part.batches for part in parts))
    yield _one("batched_requests_total", "Requests in those batches.", sum(part.batched for part in parts))


def _of_models(parts: Sequence[WorkerPart], running: Sequence[WorkerPart]) -> Iterator[Metric]:
    """The model that workers serve; if they differ, the oldest."""
    about = "Newer models loaded, by kind of update; every worker loads them."
    yield _by("updates_total", about, "way", [one for one in _summed(parts, "updates", UPDATES) if one[1]])
    failed = sum(part.failed_updates for part in parts)
    yield _one("failed_updates_total", "Newer models that were refused.", failed)
    loaded = max(part.updated for part in running)
    yield _one("model_loaded_timestamp_seconds", "When the current model was loaded.", loaded)
    yield _one("stale", _STALE, max(part.stale for part in running))
    ages = [age for part in running if (age := _age(part)) is not None]
    if ages:
        yield _one("model_age_seconds", "Seconds since the current model was written.", max(ages))
    if (step := min(part.step for part in running)) >= 0:
        yield _one("model_step", "The training step of the current model.", step)
    versions = Counter(part.version.decode(errors="replace") for part in running)
    about = "The models that score, and the number of workers of each."
    yield _by("model_info", about, "model", sorted(versions.items()))


def _age(part: WorkerPart) -> float | None:
    return max(time.time() - part.written, 0.0) if part.written else None


def _summed(parts: Sequence[WorkerPart], field: str, names: Sequence[str]) -> list[tuple[str, int]]:
    """The sums of a field of all parts, by name."""
    return [(name, sum(getattr(part, field)[place] for part in parts)) for place, name in enumerate(names)]


class _Snapshot:
    """A collector of families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _by(name: str, about: str, label: str, values: Iterable[tuple[object, float]]) -> Metric:
    """A value for every value of a label."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(f"hotbed_serve_{name}", about, labels=[label])
    for one, value in values:
        family.add_metric([str(one)], value)
    return family


def _one(name: str, about: str, value: float) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(f"hotbed_serve_{name}", about, value=value)
