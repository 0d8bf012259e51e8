"""What a server did, as Prometheus reads it: counters that are always on, under one lock, and text when asked."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter

from hotbed.host.memory import resident_memory
from hotbed.scorer import Scorer

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # seconds


class Metrics:
    """Of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: Counter[int] = Counter()  # by status
        self._buckets = [0] * (len(_BOUNDS) + 1)
        self._seconds = 0.0
        self._candidates = 0
        self._batches = 0
        self._batched = 0  # requests scored in them
        self._updates: Counter[str] = Counter()  # by the way they came
        self._failed_updates = 0
        self.last_error = ""
        self._updated = time.time()
        self.in_flight = 0  # of the event loop alone

    def answered(self, status: int, seconds: float) -> None:
        """A request has its answer."""
        with self._lock:
            self._answers[status] += 1
            self._buckets[bisect_left(_BOUNDS, seconds)] += 1
            self._seconds += seconds

    def scored(self, requests: int, candidates: int) -> None:
        """So many requests were scored together."""
        with self._lock:
            self._batches += 1
            self._batched += requests
            self._candidates += candidates

    def updated(self, way: str) -> None:
        """A new version scores."""
        with self._lock:
            self._updates[way] += 1
            self._updated = time.time()
            self.last_error = ""

    def not_updated(self, error: str) -> None:
        """A new version was refused; the old one scores on."""
        with self._lock:
            self._failed_updates += 1
            self.last_error = error

    def text(self, scorer: Scorer) -> str:
        """The exposition format."""
        counts, version = scorer.counts(), scorer.version
        with self._lock:
            lines = _family("requests_total", "counter", "Requests answered, by status.")
            lines += [f'hotbed_serve_requests_total{{status="{one}"}} {n}' for one, n in sorted(self._answers.items())]
            lines += self._histogram()
            for name, kind, about, value in (
                ("candidates_total", "counter", "Candidates scored.", self._candidates),
                ("batches_total", "counter", "Batches scored.", self._batches),
                ("batched_requests_total", "counter", "Requests in those batches.", self._batched),
                ("in_flight", "gauge", "Requests being answered now.", self.in_flight),
                ("failed_updates_total", "counter", "Newer models that were refused.", self._failed_updates),
                ("model_loaded_timestamp_seconds", "gauge", "When the model that scores came.", self._updated),
                (
                    "stale",
                    "gauge",
                    "1 while the newest model is refused and an older one scores.",
                    int(bool(self.last_error)),
                ),
                ("rows_bytes", "gauge", "Memory held for rows and for finding them.", scorer.num_bytes),
                ("resident_bytes", "gauge", "Memory of the process.", resident_memory() or 0),
            ):
                lines += [*_family(name, kind, about), f"hotbed_serve_{name} {value}"]
            lines += _family("updates_total", "counter", "Newer models taken over, by the way they came.")
            lines += [f'hotbed_serve_updates_total{{way="{way}"}} {n}' for way, n in sorted(self._updates.items())]
        lines += _family("row_lookups_total", "counter", "Rows looked up since the model was read whole, by place.")
        lines += [f'hotbed_serve_row_lookups_total{{place="{place}"}} {n}' for place, n in counts._asdict().items()]
        lines += [
            *_family("model_info", "gauge", "The model that scores."),
            f'hotbed_serve_model_info{{model="{version}"}} 1',
        ]
        return "\n".join(lines) + "\n"

    def _histogram(self) -> list[str]:
        lines = _family("request_seconds", "histogram", "Seconds from the first byte of a request to its answer.")
        total = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self._buckets):
            total += count
            lines.append(f'hotbed_serve_request_seconds_bucket{{le="{bound}"}} {total}')
        return [
            *lines,
            f"hotbed_serve_request_seconds_sum {self._seconds}",
            f"hotbed_serve_request_seconds_count {total}",
        ]


def _family(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP hotbed_serve_{name} {about}", f"# TYPE hotbed_serve_{name} {kind}"]
