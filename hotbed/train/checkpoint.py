"""RUN/checkpoints: everything that a run needs to go on as if it had never stopped, bit for bit.

Beside rows and dense weights (hotbed/checkpoint), a run saves where it stands: its Progress and the random generators in the
manifest, the open interval of metrics.jsonl as tensors.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotbed.checkpoint import State, load_entry
from hotbed.checkpoint.chain import Entry, folders_in
from hotbed.checkpoint.dense import dense_tensors
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.read import tensors_of
from hotbed.errors import RunError
from hotbed.train.interval import Interval
from hotbed.train.old_checkpoint import load_old_checkpoint, old_folder
from hotbed.train.step import Learner

INTERVAL = "interval"


@dataclass(frozen=True)
class Best:
    """The evaluation with the highest valid AUC so far."""

    auc: float
    epoch: int  # counted from 1
    step: int
    samples: int


@dataclass
class Progress:
    """Where a run stands, between two steps."""

    epoch: int = 0  # epochs done
    batch: int = 0  # batches of the open epoch done
    step: int = 0
    samples: int = 0
    evaluated_step: int = 0  # step of the last evaluation during training
    stale: int = 0  # evaluations since the best one
    plateau: float = 1.0  # product of the plateau factors so far
    best: Best | None = None
    train_seconds: float = 0.0
    seconds: float = 0.0
    log_position: int = 0
    train_rows: int = 0  # of the dataset; a resumed run must find as many
    data: str = ""  # fingerprint of the dataset; a resumed run must find the same


def checkpoint_root(run: Path) -> Path:
    return run / "checkpoints"


def has_checkpoint(run: Path) -> bool:
    return bool(folders_in(checkpoint_root(run))) or old_folder(run).is_dir()


def state_of(run: Path, learner: Learner, progress: Progress, interval: Interval) -> State:
    """What is saved beside the rows, copied."""
    document = {
        "config": _config_of(run),
        "progress": dataclasses.asdict(progress),
        "generators": _generators(learner.device),
    }
    dense = dense_tensors(learner.model, learner.optimizer)
    return State(progress.step, {**dense, INTERVAL: interval.state()}, document)


def load_checkpoint(
    run: Path, learner: Learner, say: Callable[[str], None] = lambda _: None
) -> tuple[Progress, Interval]:
    """Put the learner and the random generators where the run's newest checkpoint left them."""
    root = checkpoint_root(run)
    if not folders_in(root):
        if not old_folder(run).exists():
            raise RunError(f"{run} has no checkpoint to resume from. Start it again with --overwrite.")
        document, interval = load_old_checkpoint(run, learner)
    else:
        document, interval = _load_newest(root, learner, say)
    try:
        saved = dict(document["progress"])
        best = saved.pop("best")
        progress = Progress(**saved, best=best and Best(**best))
        _set_generators(document["generators"], learner.device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"the checkpoint of {run} does not fit this run ({type(error).__name__}: {error}).") from error
    return progress, interval


def best_steps(run: Path) -> set[int]:
    """The steps whose best weights some checkpoint counts on."""
    steps = set()
    for folder in folders_in(checkpoint_root(run)):
        try:
            best = read_manifest(folder).document.get("progress", {}).get("best")
        except RunError:
            continue
        if best:
            steps.add(int(best["step"]))
    return steps


def _load_newest(root: Path, learner: Learner, say: Callable[[str], None]) -> tuple[dict[str, Any], Interval]:
    """What the newest checkpoint says of the run; its rows and weights are loaded."""
    newest = folders_in(root)[-1]
    try:
        entry = Entry(newest, read_manifest(newest))
        if "progress" not in entry.manifest.document:
            raise RunError(f"{entry.folder} was not saved by `hotbed train`; it does not say where its run stood.")
        interval = Interval.from_state(tensors_of(entry, INTERVAL), learner.device)
        for note in load_entry(entry, learner.tables, learner.model, learner.optimizer):
            say(note)
    except RunError as error:
        older = "" if len(folders_in(root)) == 1 else f" To go on from the one before it, move {newest} away."
        hint = f" `hotbed checkpoint verify {root.parent}` names all damage.{older}" if "damaged" in str(error) else ""
        raise RunError(f"{error}{hint}") from error
    return entry.manifest.document, interval


def _config_of(run: Path) -> dict[str, Any]:
    """The run's settings as they are on disk; none when the run was built in Python."""
    try:
        found = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _generators(device: torch.device) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def _set_generators(saved: dict[str, Any], device: torch.device) -> None:
    states = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for name, text in saved.items()
    }
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
