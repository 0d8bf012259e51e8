"""A line of metrics.jsonl -> its numbers by name; sent to TensorBoard, W&B, MLflow, OpenTelemetry; read by Prometheus and top.

train/loss, train/auc, train/lr, train/samples_per_s        <split>/auc, <split>/log_loss, ... over steps
times/model, times/plan, ..., times/ready                   seconds of a mean step by part; batches read ahead
device_times/model, ...                                     the same of a CUDA stream
memory/resident_bytes, memory/device_bytes, ...
cache/hit_rate, cache/bytes_in, cache/stall_share, ...      where rows are cached
tiers/memory_hit_rate, tiers/bytes_read, tiers/wear, ...    where rows are on an ssd
ids/<table>/seen, ids/<table>/rows, ...                     where ids are dynamic

Each receiver is an observer and an optional package, and changes nothing in the run:

    tensorboard   scalars in RUN/tensorboard; importing it takes a third of a second, so that happens when training begins
    wandb         pip install 'hotbed[wandb]'; WANDB_MODE=offline, WANDB_PROJECT, WANDB_DIR and so on are wandb's own
    mlflow        pip install 'hotbed[mlflow]'; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME
    otel          pip install 'hotbed[otel]'; the provider that the program has set, else OTLP as OTEL_EXPORTER_OTLP_* say

What fails there (a server that is away) is reported once and ends the tracker, never the run. A run that resumes continues its
W&B and MLflow run: its id is in RUN/trackers.json.
"""

from __future__ import annotations

import json
import math
import os
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hotbed.errors import ConfigError
from hotbed.host.atomic import write_file
from hotbed.host.extras import how_to_install
from hotbed.telemetry.observer import Observer, Progress, Record

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE = "trackers.json"
POSITION = {"kind", "split", "epoch", "step", "samples", "seconds"}
PARTS = ("times", "memory", "cache", "tiers", "drift", "new_ids")


class Number(NamedTuple):
    """One value: its group, its name in it, and its split or table, if it has one."""

    group: str  # train, eval, times, device_times, memory, cache, tiers, ids
    name: str
    value: float
    of: str = ""

    @property
    def path(self) -> str:
        """As TensorBoard shows it."""
        if self.group == "eval":
            return f"{self.of}/{self.name}"
        return "/".join(part for part in (self.group, self.of, self.name) if part)


def numbers_of(record: Record) -> list[Number]:
    """All numbers, without those that are null in the log."""
    split = str(record["split"]) if record["kind"] == "eval" else ""
    found = _plain(str(record["kind"]), record, split)
    for part in PARTS:
        found += _plain(part, record.get(part))
    times = record.get("times")
    found += _plain("device_times", times.get("device") if isinstance(times, Mapping) else None)
    for table, counts in (record.get("ids") or {}).items():
        found += _plain("ids", counts, table)
    return found


def _plain(group: str, values: Mapping[str, Any] | None, of: str = "") -> list[Number]:
    return [
        Number(group, name, float(value), of)
        for name, value in (values or {}).items()
        if name not in POSITION and isinstance(value, int | float) and math.isfinite(value)
    ]


class TensorBoardWriter(Observer):
    """An Observer that turns each line into scalars."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def begin(self, progress: Progress, total_steps: int) -> None:
        """Open the event file; on resume TensorBoard drops what came after the checkpoint."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its dependencies warn about each other at import
                from torch.utils.tensorboard import SummaryWriter
        except Exception as error:  # incompatible versions fail in many ways; none may end a run
            warnings.warn(f"TensorBoard cannot be imported ({error}); RUN/tensorboard stays empty.", stacklevel=2)
            return
        self._writer = SummaryWriter(str(self._folder), purge_step=progress.step + 1 if progress.step else None)

    def record(self, record: Record) -> None:
        if self._writer is None:
            return
        for one in numbers_of(record):
            self._writer.add_scalar(one.path, one.value, global_step=record["step"])

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def open_writer(run_dir: Path) -> TensorBoardWriter | None:
    """The observer for a run, or None where TensorBoard is not installed."""
    return TensorBoardWriter(run_dir / "tensorboard") if find_spec("tensorboard") else None


class Backend(Protocol):
    """Where numbers go."""

    def log(self, numbers: Sequence[Number], step: int) -> None: ...

    def end(self) -> None: ...


class Tracker(Observer):
    """An Observer that sends the numbers of each line to a backend, which is opened when training begins."""

    def __init__(self, name: str, opens: Callable[[], Backend], say: Callable[[str], None]) -> None:
        self._name, self._opens, self._say = name, opens, say
        self._backend: Backend | None = None

    def begin(self, progress: Progress, total_steps: int) -> None:
        with _Guard(self, "opened"):
            self._backend = self._opens()

    def record(self, record: Record) -> None:
        if self._backend is not None:
            with _Guard(self, "written to"):
                self._backend.log(numbers_of(record), int(record["step"]))

    def end(self) -> None:
        if self._backend is not None:
            backend, self._backend = self._backend, None
            with _Guard(self, "closed"):
                backend.end()

    def give_up(self, what: str, error: BaseException) -> None:
        self._backend = None
        self._say(
            f"warning: {self._name} cannot be {what} and gets no further numbers: {type(error).__name__}: {error}"
        )


class _Guard:
    """An error of a tracker ends the tracker, not the run."""

    def __init__(self, tracker: Tracker, what: str) -> None:
        self._tracker, self._what = tracker, what

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self._tracker.give_up(self._what, error)
            return True
        return False


class WandbBackend:
    """A run of Weights & Biases."""

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        wandb = import_module("wandb")
        identity = run_identity(run, "wandb", lambda: uuid.uuid4().hex[:12])
        project = os.environ.get("WANDB_PROJECT", "hotbed")
        self._run = wandb.init(
            project=project, name=run.name, id=identity, resume="allow", dir=str(run), config=dict(settings)
        )

    def log(self, numbers: Sequence[Number], step: int) -> None:
        self._run.log({one.path: one.value for one in numbers}, step=step)

    def end(self) -> None:
        self._run.finish()


class MlflowBackend:
    """A run of MLflow."""

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        mlflow = import_module("mlflow")
        self._client = mlflow.tracking.MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "hotbed")
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        made: list[str] = []

        def start() -> str:
            made.append(self._client.create_run(number, run_name=run.name).info.run_id)
            return made[0]

        self._id = run_identity(run, "mlflow", start)
        for name, value in _flat(settings).items() if made else ():
            self._client.log_param(self._id, name, value)

    def log(self, numbers: Sequence[Number], step: int) -> None:
        for one in numbers:
            self._client.log_metric(self._id, one.path, one.value, step=step)

    def end(self) -> None:
        self._client.set_terminated(self._id)


class OtelBackend:
    """Gauges of OpenTelemetry, hotbed.<group>.<name>; the split or table is an attribute."""

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        from opentelemetry import metrics

        self._own: Any = None
        provider = metrics.get_meter_provider()
        if not hasattr(provider, "force_flush"):  # none was set
            provider = self._own = _otlp_provider(run)
        self._meter: Any = provider.get_meter("hotbed")
        self._gauges: dict[str, Any] = {}
        self._run = run.name

    def log(self, numbers: Sequence[Number], step: int) -> None:
        for one in [*numbers, Number("train", "step", step)]:
            name = f"hotbed.{one.group}.{one.name}"
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name)
            self._gauges[name].set(one.value, {"run": self._run, **({"of": one.of} if one.of else {})})

    def end(self) -> None:
        if self._own is not None:
            self._own.shutdown()


BACKENDS: dict[str, tuple[Callable[[Path, Mapping[str, Any]], Backend], str, str]] = {
    "wandb": (WandbBackend, "wandb", "wandb"),
    "mlflow": (MlflowBackend, "mlflow", "mlflow"),
    "otel": (OtelBackend, "opentelemetry", "otel"),
}


def open_trackers(
    names: Sequence[str], run: Path, settings: Mapping[str, Any], say: Callable[[str], None]
) -> list[Tracker]:
    """The observers that --track names."""
    return [Tracker(name, partial(BACKENDS[name][0], run, settings), say) for name in dict.fromkeys(names)]


def check_trackers(names: Sequence[str]) -> None:
    """A ConfigError for a tracker that is not known or not installed."""
    from importlib.util import find_spec

    for name in names:
        if name not in BACKENDS:
            raise ConfigError(f"--track {name}: there are {', '.join(BACKENDS)}.")
        _, package, extra = BACKENDS[name]
        if find_spec(package) is None:
            raise ConfigError(f"--track {name} needs {package}, which is not installed: {how_to_install(extra)}")


def run_identity(run: Path, name: str, make: Callable[[], str]) -> str:
    """The id that a run has in a tracker: that of RUN/trackers.json, else a new one."""
    path = run / FILE
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if name not in known:
        known[name] = make()
        write_file(path, json.dumps(known) + "\n")
    return known[name]


def _otlp_provider(run: Path) -> Any:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    exporter = import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    reader = PeriodicExportingMetricReader(exporter.OTLPMetricExporter())
    return MeterProvider([reader], resource=Resource.create({"service.name": "hotbed", "hotbed.run": run.name}))


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, part in settings.items() for name, value in part.items()}
