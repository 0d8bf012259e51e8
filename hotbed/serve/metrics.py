"""The counters of a server, always on, under one lock, for prometheus_client.

It writes the answers of /metrics. Its own counters would take 14 to 18 us of a request instead of 3 to 4 (two busy cores), and
would not be read together.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from hotbed.host.memory import resident_memory
from hotbed.scorer import Scorer

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

    def text(self, scorer: Scorer, accept: str) -> tuple[bytes, str]:
        """The answer in a format that the client accepts, and its content type."""
        registry = CollectorRegistry()
        registry.register(_Snapshot([*self._families(scorer)]))
        write, kind = choose_encoder(accept)
        return write(registry), kind

    def _families(self, scorer: Scorer) -> Iterator[Metric]:
        counts, version = scorer.counts(), scorer.version
        named = re.match(r"step-(\d+)-", version)  # an incremental update leaves the source as it was
        step = int(named[1]) if named else scorer.source.step
        with self._lock:
            yield _by("requests_total", "Requests answered, by status.", "status", sorted(self._answers.items()))
            about = "Seconds from the first byte of a request to its answer."
            buckets = list(zip([*map(str, _BOUNDS), "+Inf"], accumulate(self._buckets)))
            yield HistogramMetricFamily("hotbed_serve_request_seconds", about, buckets=buckets, sum_value=self._seconds)
            yield _one("candidates_total", "Candidates scored.", self._candidates)
            yield _one("batches_total", "Batches scored.", self._batches)
            yield _one("batched_requests_total", "Requests in those batches.", self._batched)
            yield _one("in_flight", "Requests being answered now.", self.in_flight)
            yield _one("failed_updates_total", "Newer models that were refused.", self._failed_updates)
            yield _one("model_loaded_timestamp_seconds", "When the current model was loaded.", self._updated)
            yield _one("stale", _STALE, int(bool(self.last_error)))
            yield _one("rows_bytes", "Memory of rows and their indexes.", scorer.num_bytes)
            yield _one("resident_bytes", "Memory of the process.", resident_memory() or 0)
            if (age := self.model_age) is not None:
                yield _one("model_age_seconds", "Seconds since the current model was written.", age)
            if step is not None:
                yield _one("model_step", "The training step of the current model.", step)
            about = "Newer models loaded, by kind of update."
            yield _by("updates_total", about, "way", sorted(self._updates.items()))
        about = "Rows looked up since the model was read whole, by place."
        yield _by("row_lookups_total", about, "place", counts._asdict().items())
        yield _by("model_info", "The current model.", "model", [(version, 1)])


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
