"""A Training in; its files and its summary out, whatever way it ends.

all went well      checkpoint, model/, summary.json with the metrics of valid and test
full disk          what it has room for: the model without the last checkpoint, or the last checkpoint without the model
Ctrl-C or SIGTERM  checkpoint, summary.json with "finished": false
diverged           the last good checkpoint stays, summary.json says why, RunError
"""

from __future__ import annotations

import json
import math
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch

import hotbed
from hotbed.data.dataset import Dataset
from hotbed.errors import ExitCode, HotbedError, RunError
from hotbed.run.folder import write_text
from hotbed.tables.group.group import TableGroup
from hotbed.tables.module import EmbeddingTables
from hotbed.train.disk_room import is_refused_by_disk, what_is_left
from hotbed.train.evaluation import Evaluation
from hotbed.train.loop import INTERRUPTED, Training
from hotbed.train.metrics import calibration_curve
from hotbed.train.model_folder import save_model
from hotbed.train.ranks import AgreedStop
from hotbed.train.step import repeatable
from hotbed.train.watch import Ids, ids_of

EXIT_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}
_SWITCH_SECONDS = 0.0005  # between threads of Python
Summary = dict[str, Any]


class Subject(NamedTuple):
    """What is trained, by name, and the card that lets the model be built again."""

    model: str
    dataset_name: str
    dataset: Dataset
    card: dict[str, Any]
    label_notes: tuple[str, ...] = ()  # how the counting of labels differs from the log


class RunOutcome(NamedTuple):
    """How a run ended; the exit code is 0, or that of the signal that stopped it."""

    summary: Summary
    exit_code: int
    unsaved: str = ""  # what the disk refused of a run that has its model


@contextmanager
def _short_switch_interval(device: torch.device) -> Iterator[None]:
    """On CUDA the training thread takes Python's lock again after every launch, and waits 5 ms for a reader that has it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS if device.type == "cuda" else before)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run(training: Training, subject: Subject) -> RunOutcome:
    """Train, evaluate, and write everything down."""
    world = training.world
    with StopSignals() as signals, repeatable(), _short_switch_interval(training.learner.device):
        at_once, stop = False, AgreedStop(signals, world)
        try:
            reason = training.train(stop)
            found = None if reason == INTERRUPTED else _finish(training, subject, stop)
            summary = _summary(training, subject, found, INTERRUPTED if found is None else reason, together=True)
            if world.is_first:
                write_summary(training.run, summary)
            code = 0 if summary["finished"] else max(world.gather(signals.exit_code))
            return RunOutcome(summary, code, _unsaved(training) if summary["finished"] else "")
        except (MemoryError, torch.OutOfMemoryError) as error:
            what = str(error).partition("\n")[0] or "of the host"
            reason = f"out of memory at step {training.progress.step} ({what})."
            _try_summary(training, subject, reason)
            raise RunError(f"{reason} Lower data.batch_size, data.eval_batch_size or model.dim.") from error
        except HotbedError as error:
            _try_summary(training, subject, str(error))
            if is_refused_by_disk(error):
                raise RunError(_refused(training, error)) from error
            raise
        except KeyboardInterrupt:  # the second signal
            at_once = True
            raise
        finally:
            training.close(at_once)
            training.observer.end()


def write_summary(folder: Path, summary: Summary) -> None:
    """summary.json; nan (the AUC of one class) becomes null."""
    write_text(folder / "summary.json", json.dumps(_without_nan(summary), indent=1, allow_nan=False) + "\n")


def _try_summary(training: Training, subject: Subject, reason: str) -> None:
    """The summary of a run that failed; where it cannot be written either, the first failure is the one to report."""
    with suppress(RunError):
        if not training.world.is_first:
            return
        write_summary(training.run, _summary(training, subject, None, reason, together=False))


def _refused(training: Training, error: HotbedError) -> str:
    """What the disk refused, and what is there nevertheless."""
    first = f"{training.unsaved} The model does not fit either: " if training.unsaved else ""
    return f"{first}{error} {what_is_left(training.run)}"


def _unsaved(training: Training) -> str:
    """The message for a run whose model was written, and whose last checkpoint was not."""
    if not training.unsaved:
        return ""
    model = f"What was learned is not lost: {training.run / 'model'} is whole."
    return f"{training.unsaved} {model} But the checkpoint of the end is missing. {what_is_left(training.run)}"


def _finish(training: Training, subject: Subject, stop: Callable[[], bool]) -> dict[str, Evaluation] | None:
    """Choose the weights, measure them on every held-out split, write the model; None when asked to stop before."""
    training.settle(stop)
    training.recalibrate(stop)
    found = {}
    for split in training.loaders.held_out:
        evaluation = None if stop() else training.evaluate_split(split, stop)
        if evaluation is None:
            return None
        found[split] = evaluation
    training.world.stage("writing the model")
    card = {**subject.card, "steps": training.progress.step}
    save_model(training.run / "model", training.learner, subject.dataset, card, training.world)
    return found


def _summary(
    training: Training, subject: Subject, found: dict[str, Evaluation] | None, reason: str, *, together: bool
) -> Summary:
    """`found` is None when the run did not finish; `together`: all ranks are here."""
    progress, learner, schema = training.progress, training.learner, subject.dataset.schema
    evaluations = found or {}
    final = {split: evaluation.metrics._asdict() for split, evaluation in evaluations.items()}
    best = {split: value for split, value in schema.best_auc.items() if split in final}
    shown = evaluations.get("test") or evaluations.get("valid")
    curve = calibration_curve(shown.labels, shown.logits) if shown and training.world.is_first else []
    ids = training.ids(together) or {}
    sizes = [(group_rows(group, ids), group.layout.dim) for group in learner.tables.groups]
    kept = {} if found is None else training.position()
    return {
        "model": subject.model,
        "dataset": subject.dataset_name,
        "device": _device_name(learner.device),
        "parameters": {
            "dense": sum(one.numel() for one in learner.model.parameters()),
            "rows": sum(rows for rows, _ in sizes),
            "row_values": sum(rows * dim for rows, dim in sizes),
        },
        "cache": cache_sizes(learner.tables),
        "modes": learner.tables.exchange.modes,
        **training.storage(together),
        "final": final,
        "more": {split: evaluation.more for split, evaluation in evaluations.items() if evaluation.more},
        "best_auc": best,
        "gap": {split: value - final[split]["auc"] for split, value in best.items()},
        "best_epoch": kept.get("epoch"),  # whose weights were kept
        "best_step": kept.get("step"),
        "kept_because": _why_kept(training) if kept else None,
        "epochs": progress.epoch,
        "steps": progress.step,
        "seconds": progress.seconds,
        "train_seconds": progress.train_seconds,
        "samples": progress.samples,
        "samples_per_s": progress.samples / progress.train_seconds if progress.train_seconds else None,
        "steady_samples_per_s": training.clock.steady_rate,
        "label_notes": list(subject.label_notes),
        "leaks": schema.notes.get("leaks", {}),  # columns that tell the label -> AUC
        "bad_rows": schema.notes.get("bad_rows", 0),
        "calibration_curve": [list(one) for one in curve],
        "versions": _versions(),
        "failed_checkpoints": training.num_failed_checkpoints,
        "finished": found is not None,
        "stopped_because": reason,
    }


def _why_kept(training: Training) -> str:
    """Why the model has the weights of this step and of no other."""
    if not training.loaders.held_out.get("valid"):
        return "they are the last, and there is no valid split to choose by"
    if training.progress.best is None:
        return "they are the last, and of no others a valid AUC is known"
    if not training.course.keep_best:
        return "they are the last; train.keep_best is off"
    return "their valid AUC is the best of the run"


def cache_sizes(tables: EmbeddingTables) -> dict[str, int] | None:
    """Rows and bytes on the device, and what whole tables would take there; None without a cache."""
    if not tables.caches:
        return None
    ids = ids_of(tables) or {}
    return {
        "slots": sum(group.num_slots for group in tables.groups),
        "device_bytes": sum(group.num_bytes for group in tables.groups) + tables.exchange.replica_bytes,
        "replica_bytes": tables.exchange.replica_bytes,
        "table_bytes": sum(
            _rows_here(group, ids) * group.layout.width * group.records.itemsize for group in tables.groups
        ),
    }


def group_rows(group: TableGroup, ids: Ids) -> int:
    """Rows of the tables of a group, on all ranks; of dynamic ids, those that `ids` counts."""
    return sum(ids[name]["rows"] if name in ids else member.rows for name, member in group.members.items())


def _rows_here(group: TableGroup, ids: Ids) -> int:
    """As `group_rows`, on this rank; dynamic ids are counted by each rank for itself."""
    preset = 0 if group.keyspace.preset_rows is None else group.num_rows
    return preset + sum(ids[name]["rows"] for name in group.members if name in ids)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _versions() -> dict[str, str]:
    packages = {package: version(package) for package in ("torch", "numpy", "numba")}
    return {"python": platform.python_version(), "hotbed": hotbed.__version__, **packages}


class StopSignals:
    """While entered, the first SIGINT or SIGTERM is remembered in `received`; outside the main thread nothing changes.

    A second Ctrl-C stops at once. A further SIGTERM does not: Slurm sends it to all processes of a job, and torchrun, which
    gets it too, to its ranks once more.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in EXIT_CODES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """True when someone asked to stop."""
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that ended by this signal; 0 when there was none."""
        return EXIT_CODES[self.received] if self.received is not None else 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
