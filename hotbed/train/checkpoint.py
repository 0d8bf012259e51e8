"""RUN/checkpoint: everything that a run needs to go on as if it had never stopped, bit for bit.

dense.safetensors            weights and buffers of the model
dense_optimizer.safetensors  state of its optimizer, `<parameter number>.<name>`
tables.safetensors           rows with their optimizer state
interval.safetensors         steps since the last line of metrics.jsonl
state.json                   Progress, random generators, format version
manifest.json                size and checksum of each
"""

from __future__ import annotations

import base64
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotbed.errors import RunError
from hotbed.train.files import check_folder, read_tensors, recover_folder, write_folder, write_tensors
from hotbed.train.interval import Interval
from hotbed.train.step import Learner

FORMAT_VERSION = 1


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


def checkpoint_folder(run: Path) -> Path:
    return run / "checkpoint"


def save_checkpoint(run: Path, learner: Learner, progress: Progress, interval: Interval) -> None:
    """Replace the run's checkpoint in one step."""
    state = {
        "format_version": FORMAT_VERSION,
        "progress": dataclasses.asdict(progress),
        "generators": _generators(learner.device),
    }

    def fill(folder: Path) -> None:
        write_tensors(folder / "dense.safetensors", learner.model.state_dict())
        write_tensors(folder / "dense_optimizer.safetensors", _optimizer_state(learner.optimizer))
        write_tensors(folder / "tables.safetensors", learner.tables.state_dict())
        write_tensors(folder / "interval.safetensors", interval.state())
        (folder / "state.json").write_text(json.dumps(state, indent=1) + "\n")

    write_folder(checkpoint_folder(run), fill)


def load_checkpoint(run: Path, learner: Learner) -> tuple[Progress, Interval]:
    """Put the learner and the random generators where the checkpoint left them."""
    folder = checkpoint_folder(run)
    recover_folder(folder)
    if not folder.is_dir():
        raise RunError(f"{run} has no checkpoint to resume from. Start it again with --overwrite.")
    check_folder(folder)
    try:
        state = json.loads((folder / "state.json").read_text())
        if state["format_version"] > FORMAT_VERSION:
            raise RunError(
                f"{folder} has format version {state['format_version']}; this hotbed reads up to {FORMAT_VERSION}."
            )
        best = state["progress"].pop("best")
        progress = Progress(**state["progress"], best=best and Best(**best))
        learner.model.load_state_dict(read_tensors(folder / "dense.safetensors"))
        _load_optimizer(learner.optimizer, read_tensors(folder / "dense_optimizer.safetensors"))
        learner.tables.load_state_dict(read_tensors(folder / "tables.safetensors"))
        interval = Interval.from_state(read_tensors(folder / "interval.safetensors"), learner.device)
        _set_generators(state["generators"], learner.device)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"{folder} does not fit this run ({type(error).__name__}: {error}).") from error
    return progress, interval


def _optimizer_state(optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    if optimizer is None:
        return {}
    states = optimizer.state_dict()["state"]
    return {f"{number}.{name}": value for number, state in states.items() for name, value in state.items()}


def _load_optimizer(optimizer: torch.optim.Optimizer | None, tensors: dict[str, Tensor]) -> None:
    if optimizer is None:
        return
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        states.setdefault(int(number), {})[name] = value.clone()  # the file is mapped into memory and may go away
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


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
