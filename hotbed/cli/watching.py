"""`hotbed train --metrics-port` and `--trace`: who watches a run besides the screen and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hotbed.telemetry.clock import StepClock
    from hotbed.telemetry.observer import Observer
    from hotbed.telemetry.prometheus import MetricsServer
    from hotbed.telemetry.trace import TraceWriter


class Watching(NamedTuple):
    """What was asked for."""

    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    trace: Path | None = None
    trace_steps: str | None = None

    def check(self) -> None:
        """A ConfigError for what cannot be meant."""
        from hotbed.errors import ConfigError
        from hotbed.telemetry.trace import parse_steps

        if self.trace is None and self.trace_steps is not None:
            raise ConfigError("--trace-steps says of which steps --trace FILE is; give both")
        parse_steps(self.trace_steps)


class Watchers(NamedTuple):
    """Those who are at work."""

    server: MetricsServer | None = None
    writer: TraceWriter | None = None

    @property
    def observers(self) -> list[Observer]:
        return [one for one in self if one is not None]

    def watch(self, clock: StepClock, say: Callable[[str], None]) -> None:
        """What the training thread does."""
        if self.writer is not None:
            self.writer.watch(clock, say)


@contextmanager
def opened(asked: Watching, say: Callable[[str], None]) -> Iterator[Watchers]:
    """The port is taken before anything is built, and freed however the run ends."""
    if asked.metrics_port is None and asked.trace is None:
        yield Watchers()
        return
    from hotbed.telemetry.prometheus import MetricsServer
    from hotbed.telemetry.trace import TraceWriter, parse_steps

    writer = None if asked.trace is None else TraceWriter(asked.trace, parse_steps(asked.trace_steps))
    server = None if asked.metrics_port is None else MetricsServer(asked.metrics_host, asked.metrics_port)
    try:
        if server is not None:
            say(f"metrics: {server.url}")
        yield Watchers(server, writer)
    finally:
        if server is not None:
            server.end()
