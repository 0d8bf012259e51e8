"""The lines of metrics.jsonl over HTTP in the format of Prometheus, while the run continues.

    hotbed_train_loss 0.4821
    hotbed_eval_auc{split="valid"} 0.7654
    hotbed_cache_lookup_hit_rate 0.896
    hotbed_ids_seen{table="user"} 60000

Names are those of TensorBoard with `_` for `/`; split and table are labels. A server of the standard library in a thread of its
own answers from the newest line. An answer costs training only the thread's share of the GIL (0.2 ms).
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from typing import Any, NamedTuple

from hotbed.errors import RunError
from hotbed.telemetry.log import Record
from hotbed.telemetry.observer import Progress
from hotbed.telemetry.scalars import Number, numbers_of

CONTENT = "text/plain; version=0.0.4; charset=utf-8"
PATIENCE = 5.0  # seconds for a client to send its request
HELP = {
    "train": "of the last interval of training",
    "hour": "of the last hour of a followed log, before it was learned",
    "drift": "of the last hour of a followed log against the hour before",
    "new_ids": "share of the lookups of the last hour whose id is new",
    "eval": "of the last evaluation of the split",
    "times": "of a mean step of the training thread, in seconds; ready: batches read ahead",
    "device_times": "of a mean step on the device, in seconds",
    "memory": "at the end of the last interval, in bytes",
    "cache": "of the cache in the last interval; rates are shares, the others means over batches",
    "tiers": "of memory and ssd below the cache",
    "ids": "of the dynamic ids of a table since the run began",
}
POSITION = {
    "steps_total": ("counter", "steps trained"),
    "samples_total": ("counter", "samples trained"),
    "epoch": ("gauge", "epochs completed"),
    "steps_planned": ("gauge", "steps that the run will have"),
}


class Sample(NamedTuple):
    """One line of a response."""

    name: str
    kind: str  # gauge, counter or histogram
    about: str
    value: float
    label: tuple[str, str] | None = None
    part: str = ""  # of a histogram: _bucket, _sum, _count


def exposition(samples: Iterable[Sample]) -> str:
    """The text format 0.0.4: samples of one name together, below their help and type."""
    by_name: dict[str, list[Sample]] = {}
    for one in samples:
        by_name.setdefault(one.name, []).append(one)
    lines = []
    for name, same in by_name.items():
        about = same[0].about.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {same[0].kind}"]
        for one in same:
            label = f'{{{one.label[0]}="{_escaped(one.label[1])}"}}' if one.label else ""
            lines.append(f"{name}{one.part}{label} {one.value!r}")
    return "\n".join(lines) + "\n"


def histogram(name: str, about: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> list[Sample]:
    """Events by value: `counts[i]` up to `bounds[i]`, the last count beyond all bounds; `total` is the sum of all values."""
    sums = list(accumulate(counts))
    labels = [*map(str, bounds), "+Inf"]
    buckets = [Sample(name, "histogram", about, n, ("le", bound), "_bucket") for bound, n in zip(labels, sums)]
    ends = (("_sum", total), ("_count", sums[-1]))
    return [*buckets, *(Sample(name, "histogram", about, value, part=part) for part, value in ends)]


def sample_of(number: Number) -> Sample:
    """A number of a line."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", f"hotbed_{number.group}_{number.name}")
    label = {"eval": "split", "ids": "table"}.get(number.group)
    about = f"{number.name} {HELP.get(number.group, 'of the last line')}"
    return Sample(name, "gauge", about, number.value, (label, number.of) if label else None)


class MetricsServer:
    """An Observer that serves the newest numbers at http://HOST:PORT/metrics; it opens the port when it is made."""

    def __init__(self, host: str, port: int) -> None:
        self._newest: dict[tuple[str, str], Sample] = {}
        self._position: dict[str, float] = {}
        kind = type("Server", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
        try:
            self._server: _Server = kind((host, port), self.text)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RunError(
                f"metrics cannot be served at {host} port {port}: {reason}. Give another --metrics-port, 0 for any that is "
                "free, or another --metrics-host."
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="hotbed-metrics", daemon=True
        )
        self._thread.start()

    def text(self) -> str:
        """The current response."""
        position = [Sample(f"hotbed_{name}", *POSITION[name], value) for name, value in dict(self._position).items()]
        return exposition([*position, *dict(self._newest).values()])

    def begin(self, progress: Progress, total_steps: int) -> None:
        self._position["steps_planned"] = float(total_steps)
        self.step(progress)

    def step(self, progress: Progress) -> None:
        self._position |= {
            "steps_total": float(progress.step),
            "samples_total": float(progress.samples),
            "epoch": float(progress.epoch),
        }

    def record(self, record: Record) -> None:
        new = {(one.name, one.label[1] if one.label else ""): one for one in map(sample_of, numbers_of(record))}
        self._newest = {**self._newest, **new}

    def say(self, text: str) -> None:
        """Numbers only."""

    def end(self) -> None:
        """Free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], text: Any) -> None:
        self.text = text
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects is not an error."""


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    server: _Server

    def do_GET(self) -> None:
        """Answer /metrics."""
        if self.path.partition("?")[0] in ("/metrics", "/"):
            self._answer(200, self.server.text())
        else:
            self._answer(404, "The numbers are at /metrics.\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """The screen belongs to training."""

    def _answer(self, status: int, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", CONTENT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
