"""The counters of a server in the Prometheus text format: always on, under one lock."""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from hotbed.host.memory import resident_memory
from hotbed.scorer import Scorer
from hotbed.telemetry.prometheus import Sample, exposition, histogram

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # seconds
_STALE = "1 while the newest model is refused and an older one is in use."


class ServerMetrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: Counter[int] = Counter()  # by status
        self._buckets = [0] * (len(_BOUNDS) + 1)
        self._seconds = 0.0
        self._candidates = 0
        self._batches = 0
        self._batched = 0  # requests scored in them
        self._updates: Counter[str] = Counter()  # by kind
        self._failed_updates = 0
        self.last_error = ""
        self._updated = time.time()
        self._written = 0.0  # when the files of the current model were written; 0: not known
        self.in_flight = 0  # of the event loop alone

    def answered(self, status: int, seconds: float) -> None:
        """Count an answered request."""
        with self._lock:
            self._answers[status] += 1
            self._buckets[bisect_left(_BOUNDS, seconds)] += 1
            self._seconds += seconds

    def scored(self, requests: int, candidates: int) -> None:
        """Count a batch of `requests` requests."""
        with self._lock:
            self._batches += 1
            self._batched += requests
            self._candidates += candidates

    def uses(self, written: float) -> None:
        """The current model was written at this time, in seconds since 1970."""
        with self._lock:
            self._written = written

    @property
    def model_age(self) -> float | None:
        """Seconds since the current model was written; None if that is not known."""
        return max(time.time() - self._written, 0.0) if self._written else None

    def updated(self, way: str) -> None:
        """Count a new version that is in use now."""
        with self._lock:
            self._updates[way] += 1
            self._updated = time.time()
            self.last_error = ""

    def not_updated(self, error: str) -> None:
        """Count a new version that was refused; the old one stays in use."""
        with self._lock:
            self._failed_updates += 1
            self.last_error = error

    def text(self, scorer: Scorer) -> str:
        """The exposition format."""
        counts, version = scorer.counts(), scorer.version
        named = re.match(r"step-(\d+)-", version)  # an incremental update leaves the source as it was
        step = int(named[1]) if named else scorer.source.step
        with self._lock:
            samples = _by(
                "requests_total", "counter", "Requests answered, by status.", "status", sorted(self._answers.items())
            )
            about = "Seconds from the first byte of a request to its answer."
            samples += histogram("hotbed_serve_request_seconds", about, _BOUNDS, self._buckets, self._seconds)
            samples += [
                _one("candidates_total", "counter", "Candidates scored.", self._candidates),
                _one("batches_total", "counter", "Batches scored.", self._batches),
                _one("batched_requests_total", "counter", "Requests in those batches.", self._batched),
                _one("in_flight", "gauge", "Requests being answered now.", self.in_flight),
                _one("failed_updates_total", "counter", "Newer models that were refused.", self._failed_updates),
                _one("model_loaded_timestamp_seconds", "gauge", "When the current model was loaded.", self._updated),
                _one("stale", "gauge", _STALE, int(bool(self.last_error))),
                _one("rows_bytes", "gauge", "Memory of rows and their indexes.", scorer.num_bytes),
                _one("resident_bytes", "gauge", "Memory of the process.", resident_memory() or 0),
            ]
            if (age := self.model_age) is not None:
                samples.append(_one("model_age_seconds", "gauge", "Seconds since the current model was written.", age))
            if step is not None:
                samples.append(_one("model_step", "gauge", "The training step of the current model.", step))
            about = "Newer models loaded, by kind of update."
            samples += _by("updates_total", "counter", about, "way", sorted(self._updates.items()))
        about = "Rows looked up since the model was read whole, by place."
        samples += _by("row_lookups_total", "counter", about, "place", counts._asdict().items())
        samples += _by("model_info", "gauge", "The current model.", "model", [(version, 1)])
        return exposition(samples)


def _one(name: str, kind: str, about: str, value: float) -> Sample:
    return Sample(f"hotbed_serve_{name}", kind, about, value)


def _by(name: str, kind: str, about: str, label: str, values: Iterable[tuple[object, int]]) -> list[Sample]:
    """A sample for every value of a label."""
    return [Sample(f"hotbed_serve_{name}", kind, about, n, (label, str(one))) for one, n in values]
