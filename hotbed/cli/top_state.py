"""The state of a run, from the log in its folder or its metrics endpoint: the newest numbers by name (telemetry/trackers.py).

Only new lines of a log are read each time; a log that a resumed run has truncated is read again from the start.
"""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hotbed.errors import RunError
from hotbed.report.formats import number
from hotbed.run.folder import is_training
from hotbed.telemetry.trackers import numbers_of

PATIENCE = 5.0  # seconds for an endpoint to answer
MOST_ANSWER = 8 << 20  # bytes
KEPT = 240  # log lines used for the time left and the loss curve
RUNNING, FINISHED, STOPPED = "running", "finished", "not running"
_SAMPLE = re.compile(r'hotbed_([a-z]+|device_times)_(\w+?)(?:\{(?:split|table)="((?:[^"\\]|\\.)*)"\})? (\S+)')
_GROUPS = ("device_times", "train", "eval", "times", "memory", "cache", "tiers", "ids")


class SplitEvaluation(NamedTuple):
    """The evaluation of a split after some step."""

    auc: float
    step: float
    epoch: float


@dataclass
class RunStatus:
    """What the panel of a run shows."""

    name: str
    status: str = RUNNING
    about: str = ""  # model and data
    why: str = ""  # it ended
    step: float = 0.0
    total_steps: float = math.nan
    epoch: float = 0.0
    samples: float = 0.0
    batch_size: float = math.nan
    seconds: float = math.nan
    numbers: dict[str, float] = field(default_factory=dict)  # newest of every path
    losses: list[float] = field(default_factory=list)
    seconds_left: float = math.nan
    newest: dict[str, SplitEvaluation] = field(default_factory=dict)  # by split; an endpoint does not report it
    best: dict[str, SplitEvaluation] = field(default_factory=dict)
    kept_step: float = math.nan  # of the weights that were kept, once the run has ended

    def get(self, path: str) -> float:
        return self.numbers.get(path, math.nan)

    @property
    def steps_per_s(self) -> float:
        """The speed of the last interval of training."""
        rate = self.get("train/samples_per_s")
        return rate / self.batch_size if self.batch_size > 0 else math.nan


class StateSource(Protocol):
    """A run folder or an endpoint."""

    def look(self) -> RunStatus:
        """The current state."""


class Folder:
    """A run folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._numbers: dict[str, float] = {}
        self._last: dict[str, Any] = {}
        self._times: deque[tuple[float, float]] = deque(maxlen=KEPT)  # step, seconds
        self._losses: deque[float] = deque(maxlen=KEPT)
        self._newest: dict[str, SplitEvaluation] = {}
        self._best: dict[str, SplitEvaluation] = {}
        if not (path / "config.json").is_file():
            raise RunError(
                f"{path} is not a run folder: it has no config.json. Give the folder of `hotbed train --out`."
            )

    def look(self) -> RunStatus:
        self._read()
        config, data, summary = (self._json(name) for name in ("config.json", "data.json", "summary.json"))
        batch = number(_in(config, "data", "batch_size"))
        state = RunStatus(self._path.name or str(self._path), batch_size=batch)
        state.about = f"{_in(config, 'model', 'name') or 'model'} on {_in(config, 'data', 'path') or 'data'}"
        state.total_steps = _total_steps(config, data, batch)
        state.step, state.epoch, state.samples = (number(self._last.get(name)) for name in ("step", "epoch", "samples"))
        state.seconds = number(self._last.get("seconds"))
        state.numbers, state.losses = dict(self._numbers), list(self._losses)
        state.newest, state.best = dict(self._newest), dict(self._best)
        state.status = RUNNING if is_training(self._path) else STOPPED
        if state.status != RUNNING and summary.get("finished") is True:
            state.status, state.kept_step = FINISHED, number(summary.get("best_step"))
        state.why = str(summary.get("stopped_because") or "") if state.status != RUNNING else ""
        state.seconds_left = self._seconds_left(state)
        return state

    def _read(self) -> None:
        path = self._path / "metrics.jsonl"
        try:
            size = path.stat().st_size
            if size < self._offset:
                self._offset, self._numbers, self._last = 0, {}, {}
                self._times.clear()
                for one in (self._losses, self._newest, self._best):
                    one.clear()
            with path.open("rb") as log:
                log.seek(self._offset)
                for line in log:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    self._offset += len(line)
                    self._take(line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}.") from error

    def _take(self, line: bytes) -> None:
        with suppress(ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
            record = json.loads(line)
            self._numbers |= {one.path: one.value for one in numbers_of(record)}
            if record["kind"] == "train":
                self._times.append((number(record["step"]), number(record["seconds"])))
                self._last = record
                if math.isfinite(loss := number(record.get("loss"))):
                    self._losses.append(loss)
            elif record["kind"] == "eval":
                split, found = (
                    record["split"],
                    SplitEvaluation(*(number(record.get(name)) for name in SplitEvaluation._fields)),
                )
                self._newest[split] = found
                if split not in self._best or not found.auc <= self._best[split].auc:
                    self._best[split] = found

    def _seconds_left(self, state: RunStatus) -> float:
        """Estimated from the last lines, including evaluations."""
        if len(self._times) < 2 or state.status != RUNNING:
            return math.nan
        (step, then), (last, now) = self._times[0], self._times[-1]
        return (state.total_steps - last) * (now - then) / (last - step) if last > step else math.nan

    def _json(self, name: str) -> dict[str, Any]:
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads((self._path / name).read_bytes())
            return found if isinstance(found, dict) else {}
        return {}


class Endpoint:
    """The endpoint of `hotbed train --metrics-port`."""

    def __init__(self, url: str) -> None:
        self._url = url if url.rstrip("/").endswith("/metrics") else url.rstrip("/") + "/metrics"
        self._seen: RunStatus | None = None
        self._losses: deque[float] = deque(maxlen=KEPT)

    def look(self) -> RunStatus:
        try:
            with urllib.request.urlopen(self._url, timeout=PATIENCE) as answer:
                text = answer.read(MOST_ANSWER).decode("utf-8", "replace")
        except (OSError, ValueError, urllib.error.URLError) as error:
            if self._seen is not None:  # the port is freed when a run ends
                self._seen.status, self._seen.why = STOPPED, "its endpoint no longer answers"
                return self._seen
            reason = getattr(error, "reason", None) or error
            raise RunError(
                f"{self._url} does not answer ({reason}). `hotbed train --metrics-port 9100` serves "
                "http://127.0.0.1:9100/metrics while it trains."
            ) from error
        state = self._parsed(text)
        self._seen = state
        return state

    def _parsed(self, text: str) -> RunStatus:
        state, position = RunStatus(self._url), dict[str, float]()
        for line in text.splitlines():
            found = _SAMPLE.fullmatch(line)
            if found is None:
                name, _, value = line.partition(" ")
                position[name] = _as_float(value)
                continue
            group, name, of, value = found.groups()
            whole = f"{group}_{name}"
            group = next((one for one in _GROUPS if whole.startswith(f"{one}_")), "")
            if not group:
                position[f"hotbed_{whole}"] = _as_float(value)
                continue
            name = whole.removeprefix(f"{group}_")
            path = f"{of}/{name}" if group == "eval" else "/".join(part for part in (group, of, name) if part)
            state.numbers[path] = _as_float(value)
        if "hotbed_steps_planned" not in position:
            raise RunError(f"{self._url} answers, but is not an endpoint of `hotbed train --metrics-port`.")
        state.step, state.samples = position.get("hotbed_steps_total", 0.0), position.get("hotbed_samples_total", 0.0)
        state.total_steps, state.epoch = (
            position["hotbed_steps_planned"] or math.nan,
            position.get("hotbed_epoch", 0.0) + 1,
        )
        state.batch_size = state.samples / state.step if state.step else math.nan
        loss = state.get("train/loss")
        if math.isfinite(loss) and (not self._losses or self._losses[-1] != loss):
            self._losses.append(loss)
        state.losses = list(self._losses)
        pace = state.steps_per_s
        state.seconds_left = (state.total_steps - state.step) / pace if pace > 0 else math.nan
        return state


def source_of(given: str) -> StateSource:
    """A URL or a folder."""
    return Endpoint(given) if given.startswith(("http://", "https://")) else Folder(Path(given))


def runs_below(folder: Path) -> list[Path]:
    """The runs in a folder, the newest last."""
    found = [path.parent for path in folder.glob("*/config.json")]
    return sorted(found, key=lambda run: max((one.stat().st_mtime for one in run.glob("*.json*")), default=0.0))


def _total_steps(config: dict[str, Any], data: dict[str, Any], batch: float) -> float:
    if _in(config, "follow", "source"):
        return math.nan
    rows = number(_in(_in(data, "splits", "train"), "rows"))
    epochs, most = number(_in(config, "train", "epochs")), number(_in(config, "train", "max_steps"))
    steps = epochs * math.ceil(rows / batch) if batch > 0 and math.isfinite(rows / batch) else math.nan
    return min(steps, most) if most > 0 else steps


def _in(tree: Any, *names: str) -> Any:
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _as_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
