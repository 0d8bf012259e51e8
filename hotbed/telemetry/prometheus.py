"""The lines of metrics.jsonl over HTTP in the format of Prometheus, while the run continues.

    hotbed_train_loss 0.4821
    hotbed_eval_auc{split="valid"} 0.7654
    hotbed_cache_lookup_hit_rate 0.896
    hotbed_ids_seen{table="user"} 60000

Names are those of TensorBoard with `_` for `/`; split and table are labels. The server of prometheus_client answers from the
newest line, in threads of its own, on any path; that costs training only their share of the GIL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hotbed.errors import RunError
from hotbed.telemetry.observer import Observer, Progress, Record
from hotbed.telemetry.trackers import Number, numbers_of

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
LABELS = {"eval": "split", "ids": "table"}
POSITION = {
    "steps_total": ("counter", "steps trained"),
    "samples_total": ("counter", "samples trained"),
    "epoch": ("gauge", "epochs completed"),
    "steps_planned": ("gauge", "steps that the run will have"),
}


class MetricsServer(Observer):
    """An Observer that serves the newest numbers at http://HOST:PORT/metrics; it opens the port when it is made."""

    def __init__(self, host: str, port: int) -> None:
        self._newest: dict[tuple[str, str], Number] = {}
        self._position: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RunError(
                f"metrics cannot be served at {host} port {port}: {reason}. Give another --metrics-port, 0 for any that is "
                "free, or another --metrics-host."
            ) from error
        handler: Any = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": PATIENCE})
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that disconnects is not an error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/metrics"

    def collect(self) -> Iterator[Metric]:
        """The current response."""
        for name, value in dict(self._position).items():
            kind, about = POSITION[name]
            made = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            yield made(f"hotbed_{name}", about, value=value)
        families: dict[str, GaugeMetricFamily] = {}
        for (name, of), number in dict(self._newest).items():
            label = LABELS.get(number.group)
            about = f"{number.name} {HELP.get(number.group, 'of the last line')}"
            family = families.setdefault(name, GaugeMetricFamily(name, about, labels=[label] if label else []))
            family.add_metric([of] if label else [], number.value)
        yield from families.values()

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
        self._newest = {**self._newest, **{(name_of(one), one.of): one for one in numbers_of(record)}}

    def end(self) -> None:
        """Free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def name_of(number: Number) -> str:
    """The name that Prometheus gets."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", f"hotbed_{number.group}_{number.name}")
