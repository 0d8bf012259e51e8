"""Progress of training: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hotbed.cli.console import in_digits, is_log_json, is_verbose, live
from hotbed.telemetry.observer import Observer, Record
from hotbed.telemetry.observer import Progress as Position

if TYPE_CHECKING:
    from hotbed.telemetry.clock import StepClock
    from hotbed.telemetry.prometheus import MetricsServer
    from hotbed.telemetry.spans import TraceWriter


def facts(record: Record) -> str:
    """One record of metrics.jsonl in words."""
    score = in_digits(record["auc"])
    if record["kind"] == "hour":
        return f"hour {record['hour']}: AUC {score} of {record['hour_samples']:,} samples before they were learned"
    if record["kind"] == "eval":
        return f"{record['split']} AUC {score}, log loss {in_digits(record['log_loss'])}"
    said = f"loss {in_digits(record['loss'])}, AUC {score}, {record['samples_per_s'] or 0:,.0f} samples/s"
    cache = record.get("cache")
    if not cache:
        return said
    return f"{said}, {_percent(cache['lookup_hit_rate'])} hits, {_percent(cache['stall_share'])} waiting"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


class LiveBar(Observer):
    """A bar with samples/s, loss, running AUC and time left."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._console = console
        self._shown = ExitStack()

    def begin(self, progress: Position, total_steps: int) -> None:
        self._task = self._bar.add_task(
            "", total=total_steps or None, completed=progress.step, epoch=progress.epoch + 1, facts=""
        )
        self._bar.start()
        self._shown.enter_context(live(self._console))

    def step(self, progress: Position) -> None:
        self._bar.update(self._task, completed=progress.step, epoch=progress.epoch + bool(progress.batch))

    def record(self, record: Record) -> None:
        if record["kind"] == "train":
            self._bar.update(self._task, facts=facts(record))
        else:
            self._console.print(f"epoch {record['epoch']}, step {record['step']:,}: {facts(record)}")

    def say(self, text: str) -> None:
        self._console.print(text)

    def end(self) -> None:
        self._shown.close()
        self._bar.stop()


class PlainLines(Observer):
    """Every evaluation, and a training line at most every ten seconds."""

    def __init__(self, console: Console, every_seconds: float = 10.0) -> None:
        self._console = console
        self._every = every_seconds
        self._last = float("-inf")

    def begin(self, progress: Position, total_steps: int) -> None:
        from hotbed.host.compiling import CompileReport

        self._total, self._first_step, self._began = total_steps, progress.step, time.monotonic()
        self._compiled = CompileReport()

    def record(self, record: Record) -> None:
        now, step = time.monotonic(), record["step"]
        left = ""
        if record["kind"] == "train":
            if now - self._last < self._every:
                return
            self._last = now
            if self._first_step < step < self._total:
                gone = now - self._began - self._compiled.seconds
                seconds = gone / (step - self._first_step) * (self._total - step)
                left = f", {seconds:,.0f} s left"
        of_all = f" of {self._total:,}" if self._total else ""
        self.say(f"epoch {record['epoch']}, step {step:,}{of_all}: {facts(record)}{left}")

    def say(self, text: str) -> None:
        self._console.print(text)


class Warnings(Observer):
    """The display of a rank other than 0: warnings only."""

    def __init__(self, console: Console, who: str) -> None:
        self._console, self._who = console, who

    def say(self, text: str) -> None:
        if text.startswith("warning"):
            self._console.print(f"{self._who}{text}")


def progress_display(console: Console) -> Observer:
    """A bar on a terminal, lines in a file, or JSON."""
    if is_log_json():
        from hotbed.cli.log_json import JsonLines

        return JsonLines()
    if console.is_terminal:
        return LiveBar(console)
    return PlainLines(console, every_seconds=0.0) if is_verbose() else PlainLines(console)


class WatchOptions(NamedTuple):
    """The options of metrics endpoint and trace."""

    metrics_port: int | None = None
    metrics_host: str | None = None
    trace: Path | None = None
    trace_steps: str | None = None
    trackers: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise a ConfigError if options contradict each other."""
        from importlib.util import find_spec

        from hotbed.errors import ConfigError
        from hotbed.host.extras import how_to_install
        from hotbed.telemetry.spans import parse_steps
        from hotbed.telemetry.trackers import check_trackers

        check_trackers(self.trackers)
        if self.metrics_port is not None and find_spec("prometheus_client") is None:
            needed = how_to_install("prometheus")
            raise ConfigError(f"--metrics-port needs prometheus_client, which is not installed: {needed}")
        if self.metrics_port is None and self.metrics_host is not None:
            raise ConfigError("--metrics-host is the address of --metrics-port; give both")
        if self.trace is None and self.trace_steps is not None:
            raise ConfigError("--trace-steps chooses the steps of --trace FILE; give both")
        parse_steps(self.trace_steps)


class Watchers(NamedTuple):
    """The active metrics server and trace writer."""

    server: MetricsServer | None = None
    writer: TraceWriter | None = None

    @property
    def observers(self) -> list[Observer]:
        return [one for one in self if one is not None]

    def watch(self, clock: StepClock, say: Callable[[str], None]) -> None:
        """Trace the training thread."""
        if self.writer is not None:
            self.writer.watch(clock, say)


@contextmanager
def open_watchers(options: WatchOptions, say: Callable[[str], None]) -> Iterator[Watchers]:
    """Open the port before anything is built; it is freed however the run ends."""
    if options.metrics_port is None and options.trace is None:
        yield Watchers()
        return
    from hotbed.telemetry.prometheus import MetricsServer
    from hotbed.telemetry.spans import TraceWriter, parse_steps

    writer = None if options.trace is None else TraceWriter(options.trace, parse_steps(options.trace_steps))
    server = (
        None
        if options.metrics_port is None
        else MetricsServer(options.metrics_host or "127.0.0.1", options.metrics_port)
    )
    try:
        if server is not None:
            say(f"metrics: {server.url}")
        yield Watchers(server, writer)
    finally:
        if server is not None:
            server.end()
