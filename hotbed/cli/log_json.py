"""`--log-json`: progress and messages on stderr, one JSON object a line, for collectors of logs.

    {"time": "2026-11-18T04:05:06.789+00:00", "level": "info", "event": "train", "step": 200, "loss": 0.48, ...}

`event` says what it is: message, error, begin, train, eval, hour (the records of metrics.jsonl) or progress. Results on stdout
are as without it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from datetime import UTC, datetime
from io import StringIO
from typing import Any

from rich.console import Console

from hotbed.cli.console import ResilientStream, printable
from hotbed.telemetry.observer import Observer, Progress, Record

_BETWEEN = 10.0  # seconds between two lines of progress of one thing
_PREFIX = re.compile(r"(error|warning|note)(?:: | )", re.IGNORECASE)


def log_event(event: str, level: str = "info", at: float | None = None, **fields: Any) -> None:
    """Write one line."""
    moment = datetime.fromtimestamp(time.time() if at is None else at, UTC).isoformat(timespec="milliseconds")
    known = {name: value for name, value in fields.items() if value is not None}
    line = {"time": moment, "level": level, "event": event, **known}
    stream = ResilientStream(sys.stderr)
    stream.write(json.dumps(printable(line)) + "\n")
    stream.flush()


class JsonConsole(Console):
    """A console whose every `print` is one line."""

    def print(self, *objects: Any, **options: Any) -> None:
        if self.quiet:
            return
        text = StringIO()
        plain = Console(file=text, width=1000, highlight=False, markup=False, emoji=False, color_system=None)
        plain.print(*objects, **{**options, "soft_wrap": True})
        message = text.getvalue().strip()
        found = _PREFIX.match(message)
        level = found[1].lower().replace("note", "info") if found else "info"
        log_event("message", level, message=message[found.end() :] if found else message)


class JsonLines(Observer):
    """The Observer of training: all records."""

    def begin(self, progress: Progress, total_steps: int) -> None:
        log_event("begin", step=progress.step, samples=progress.samples, steps_planned=total_steps)

    def record(self, record: Record) -> None:
        log_event(record["kind"], **{name: value for name, value in record.items() if name not in ("kind", "time")})

    def say(self, text: str) -> None:
        JsonConsole().print(text)


class ProgressLines:
    """Progress of a job by stage: the first line, the last one, and one every ten seconds."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def report(self, stage: str, done: int, total: int | None, **more: Any) -> None:
        now = time.monotonic()
        if done == total or now - self._last.get(stage, -_BETWEEN) >= _BETWEEN:
            self._last[stage] = now
            log_event("progress", stage=stage, done=done, total=total, **more)


class JsonHandler(logging.Handler):
    """Lines of Python's logging, and its warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else None
        level, message = record.levelname.lower(), record.getMessage()
        log_event("message", level, record.created, message=message, logger=record.name, traceback=trace)


_HANDLER = JsonHandler()


def handle_logging(on: bool) -> None:
    """Write the lines of logging as JSON from here on, or no longer."""
    root = logging.getLogger()
    if on and _HANDLER not in root.handlers:
        root.addHandler(_HANDLER)
    elif not on:
        root.removeHandler(_HANDLER)
    logging.captureWarnings(on)
