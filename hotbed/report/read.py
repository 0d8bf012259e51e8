"""The files of a run directory -> one frozen `RunRecord`, whatever state the run was left in.

Only config.json must be present and intact. Everything else may be missing, truncated in the middle of a line, or hold nulls
and nans: missing numbers become nan, and `RunRecord.notes` says what was left out. So every run that started has a page, at
the price that a wrong value in an optional file shows as a dash instead of an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hotbed.errors import RunError
from hotbed.report.formats import NAN, first_known, listing, mapping, median, name_of, number
from hotbed.report.hours import HourPoint, hour_point
from hotbed.report.points import (
    CachePoint,
    IdPoint,
    MemoryPoint,
    TierPoint,
    TimesPoint,
    id_points,
    point_of,
    times_point,
    usable,
)


class TrainPoint(NamedTuple):
    """One line of kind "train": the state after an interval of steps."""

    epoch: int
    step: int
    samples: float
    loss: float
    lr: float
    auc: float
    samples_per_s: float
    seconds: float
    cache: CachePoint | None = None
    tiers: TierPoint | None = None
    ids: dict[str, IdPoint] = {}  # noqa: RUF012  never written to
    times: TimesPoint | None = None
    memory: MemoryPoint | None = None

    @property
    def batches(self) -> float:
        """Batches that were planned in the interval; nan without a cache."""
        return self.cache.batches if self.cache else NAN


class SplitScore(NamedTuple):
    """The metrics of one split at one moment."""

    auc: float = NAN
    log_loss: float = NAN
    normalized_entropy: float = NAN
    calibration: float = NAN
    positives: float = NAN
    samples: float = NAN
    pr_auc: float = NAN


class EvalPoint(NamedTuple):
    """One line of kind "eval"."""

    step: int
    samples: float
    split: str
    score: SplitScore
    seconds: float = NAN


class Skew(NamedTuple):
    """How unevenly lookups fall on the ids of one feature, or of all together (data/dataset.py)."""

    name: str
    rows: float
    distinct: float
    top_share: float  # of lookups, on the most frequent 1.5 % of ids
    curve: tuple[tuple[float, float], ...]  # share of ids, share of lookups


class SplitSize(NamedTuple):
    """Rows and share of positives of one split."""

    name: str
    rows: float
    positive_rate: float


class CalibrationPoint(NamedTuple):
    """One bin of the calibration curve."""

    prediction: float
    label: float
    samples: float


@dataclass(frozen=True)
class RunRecord:
    """Everything that the page shows."""

    directory: Path
    config: dict[str, Any]
    model: str
    dataset: str
    device: str = ""
    train: tuple[TrainPoint, ...] = ()
    evals: tuple[EvalPoint, ...] = ()
    hours: tuple[HourPoint, ...] = ()  # of a followed log
    final: dict[str, SplitScore] = field(
        default_factory=dict
    )  # by split; from the last eval lines when there is no summary
    more: dict[str, Any] = field(default_factory=dict)  # by split: grouped AUC, metrics by slice and of further tasks
    label_notes: tuple[str, ...] = ()  # how the counting of labels differs from the log
    best_auc: dict[str, float] = field(default_factory=dict)
    calibration: tuple[CalibrationPoint, ...] = ()
    splits: tuple[SplitSize, ...] = ()
    features: tuple[Skew, ...] = ()
    total: Skew | None = None
    parameters: dict[str, float] = field(default_factory=dict)
    cache: dict[str, float] = field(default_factory=dict)  # sizes: slots, device_bytes, table_bytes
    modes: tuple[str, ...] = ()  # what parallel.mode=auto has chosen, and why
    versions: dict[str, str] = field(default_factory=dict)
    samples: float = NAN
    samples_per_s: float = NAN
    seconds: float = NAN
    train_seconds: float = NAN
    bad_rows: dict[str, float] | None = None  # reason -> rows; None when not recorded
    epochs: float = NAN  # done
    best_epoch: float = NAN  # whose weights were kept
    finished: bool = False
    stopped_because: str = ""
    analysis: Mapping[str, Any] = field(default_factory=dict)  # of `hotbed report --analyze`
    notes: tuple[str, ...] = ()

    def cache_mean(
        self,
        value: Callable[[CachePoint], float],
        weight: Callable[[TrainPoint], float] = lambda point: point.batches,
    ) -> float:
        """The mean over the intervals, each by its weight; nan when none is known."""
        known = [(value(point.cache), weight(point)) for point in self.train if point.cache]
        known = [(one, much) for one, much in known if usable(one) and usable(much) and much > 0]
        total = sum(much for _, much in known)
        return sum(one * much for one, much in known) / total if total > 0 else NAN


def read_run(directory: Path) -> RunRecord:
    """Read a run directory; RunError if it is not one."""
    config = _read_config(directory)
    notes: list[str] = []
    summary = _read_optional(directory / "summary.json", "the final results", notes)
    data = _read_optional(directory / "data.json", "the description of the dataset", notes)
    train, evals, hours = _read_metrics(directory / "metrics.jsonl", notes)
    final = {name: _score(value) for name, value in mapping(summary.get("final")).items()}
    total = mapping(data.get("total"))
    return RunRecord(
        directory=directory,
        config=config,
        model=name_of(summary.get("model")) or name_of(config.get("model")) or "model",
        dataset=name_of(summary.get("dataset")) or name_of(mapping(config.get("data")).get("path")) or "data",
        device=name_of(summary.get("device")),
        train=train,
        evals=evals,
        hours=hours,
        final=final or {point.split: point.score for point in evals},
        more={name: mapping(value) for name, value in mapping(summary.get("more")).items()},
        label_notes=tuple(map(name_of, listing(summary.get("label_notes")))),
        best_auc={name: number(value) for name, value in mapping(summary.get("best_auc")).items()},
        calibration=_calibration(summary.get("calibration_curve")),
        splits=tuple(
            SplitSize(name, number(mapping(split).get("rows")), number(mapping(split).get("positive_rate")))
            for name, split in mapping(data.get("splits")).items()
        ),
        features=tuple(_skew(mapping(feature)) for feature in listing(data.get("features"))),
        total=_skew(total) if total else None,
        parameters={name: number(value) for name, value in mapping(summary.get("parameters")).items()},
        cache={name: number(value) for name, value in mapping(summary.get("cache")).items()},
        modes=tuple(name_of(mapping(one).get("said")) for one in listing(summary.get("modes"))),
        versions={name: str(value) for name, value in mapping(summary.get("versions")).items()},
        samples=first_known(number(summary.get("samples")), train[-1].samples if train else NAN),
        samples_per_s=first_known(number(summary.get("samples_per_s")), median([p.samples_per_s for p in train])),
        seconds=first_known(number(summary.get("seconds")), train[-1].seconds if train else NAN),
        train_seconds=number(summary.get("train_seconds")),
        bad_rows=_bad_rows(summary.get("bad_rows")),
        epochs=number(summary.get("epochs")),
        best_epoch=number(summary.get("best_epoch")),
        finished=summary.get("finished") is True,
        stopped_because=name_of(summary.get("stopped_because")),
        analysis=_read_analysis(directory / "analysis.json", summary.get("steps"), notes),
        notes=tuple(notes),
    )


def _read_analysis(path: Path, steps: Any, notes: list[str]) -> Mapping[str, Any]:
    """What `--analyze` has found, unless the run has been trained for longer since."""
    if not path.exists():
        return {}
    found = _read_optional(path, "what features contribute", notes)
    if found.get("steps", steps) == steps:
        return found
    notes.append(
        f"{path.name} is of the model of step {found['steps']}, and the run has been trained for longer since: "
        "`hotbed report --analyze` measures the current one."
    )
    return {}


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise RunError(f"There is no run directory {directory}. `hotbed train --out DIR` makes one.")
    path = directory / "config.json"
    if not path.is_file():
        expected = ("config.json", "metrics.jsonl", "summary.json", "data.json")
        missing = ", ".join(name for name in expected if not (directory / name).exists())
        raise RunError(
            f"{directory} is not a run directory: config.json is missing (not found there: {missing}). "
            "Give the directory that `hotbed train --out DIR` wrote."
        )
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({error}). Train again, or restore the file from a copy.") from error
    if not isinstance(config, dict):
        raise RunError(f"{path} holds a {type(config).__name__}, not the settings of a run. Train again.")
    return config


def _read_optional(path: Path, what: str, notes: list[str]) -> Mapping[str, Any]:
    if not path.exists():
        notes.append(f"{path.name} is missing: {what} cannot be shown.")
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        notes.append(f"{path.name} is damaged: {what} cannot be shown.")
        return {}
    return value


def _read_metrics(
    path: Path, notes: list[str]
) -> tuple[tuple[TrainPoint, ...], tuple[EvalPoint, ...], tuple[HourPoint, ...]]:
    """Train, eval and hour lines in order of steps; if a step was written twice, the later line counts.

    The last evaluation may belong to an earlier step: the best weights are restored at the end.
    """
    if not path.exists():
        notes.append(f"{path.name} is missing: the curves cannot be shown.")
        return (), (), ()
    train: list[TrainPoint] = []
    evals: dict[tuple[int, str], EvalPoint] = {}
    hours: dict[str, HourPoint] = {}
    unreadable, torn = 0, False
    try:
        lines = path.open("rb")
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror}): the curves cannot be shown.")
        return (), (), ()
    with lines:
        for line in lines:
            point = _point(line)
            if isinstance(point, TrainPoint):
                while train and train[-1].step >= point.step:
                    train.pop()
                train.append(point)
            elif isinstance(point, EvalPoint):
                evals[point.step, point.split] = point
            elif isinstance(point, HourPoint):
                hours[point.hour] = point
            elif line.strip():
                unreadable += 1
                torn = not line.endswith(b"\n")
    if unreadable:
        ending = "; the last one was cut off while it was written" if torn else ""
        lines_are = "1 line is" if unreadable == 1 else f"{unreadable:,} lines are"
        notes.append(f"{path.name}: {lines_are} not readable and left out{ending}.")
    by_hour = tuple(sorted(hours.values(), key=lambda point: point.hour))
    return tuple(train), tuple(sorted(evals.values(), key=lambda point: point.step)), by_hour


def _point(line: bytes) -> TrainPoint | EvalPoint | HourPoint | None:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not math.isfinite(samples := number(raw.get("samples"))):
        return None
    epoch, step = (number(raw.get(name)) for name in ("epoch", "step"))
    if not math.isfinite(step):
        return None
    if raw.get("kind") == "eval" and raw.get("split"):
        score = _score({**raw, "samples": None})
        return EvalPoint(int(step), samples, str(raw["split"]), score, number(raw.get("seconds")))
    if raw.get("kind") == "hour":
        return hour_point(raw, int(step))
    if raw.get("kind") != "train":
        return None
    loss, lr, auc, rate, seconds = (number(raw.get(name)) for name in ("loss", "lr", "auc", "samples_per_s", "seconds"))
    cache, tiers = point_of(CachePoint, mapping(raw.get("cache"))), point_of(TierPoint, mapping(raw.get("tiers")))
    epoch = epoch if math.isfinite(epoch) else 0
    ids = id_points(mapping(raw.get("ids")))
    times, memory = times_point(mapping(raw.get("times"))), point_of(MemoryPoint, mapping(raw.get("memory")))
    return TrainPoint(int(epoch), int(step), samples, loss, lr, auc, rate, seconds, cache, tiers, ids, times, memory)


def _score(value: object) -> SplitScore:
    raw = mapping(value)
    return SplitScore(**{name: number(raw.get(name)) for name in SplitScore._fields})


def _skew(raw: Mapping[str, Any]) -> Skew:
    pairs = [[number(one) for one in listing(pair)] for pair in listing(raw.get("curve"))]
    curve = tuple((pair[0], pair[1]) for pair in pairs if len(pair) == 2 and all(map(math.isfinite, pair)))
    rows, distinct, top_share = (number(raw.get(name)) for name in ("rows", "distinct", "top_share"))
    return Skew(name_of(raw.get("name")), rows, distinct, top_share, curve)


def _calibration(value: object) -> tuple[CalibrationPoint, ...]:
    bins = [[number(one) for one in listing(entry)] for entry in listing(value)]
    return tuple(CalibrationPoint(*entry) for entry in bins if len(entry) == 3 and all(map(math.isfinite, entry)))


def _bad_rows(value: object) -> dict[str, float] | None:
    """Bad rows by reason; older runs have only a total."""
    if isinstance(value, dict):
        return {reason: first_known(number(rows), 0.0) for reason, rows in value.items()}
    total = number(value)
    return None if not math.isfinite(total) else {"bad": total} if total else {}
